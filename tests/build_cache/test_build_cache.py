"""The cache of builds: a second build compiles nothing, a miss says why, and nothing that is damaged is ever used."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import inlay.flow
from inlay import machine
from inlay.build_cache import key
from inlay.build_cache.module_files import collect_sources
from inlay.build_cache.store import HITS, BuildCache
from inlay.flow import BuildOptions, build
from inlay.frontend import capture
from inlay.package import writer
from inlay.package.loader import read_manifest
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform
from tests.build_cache import tiny_builds
from tests.build_cache.tiny_builds import example, is_right
from tests.small_packages import ROOM, greedy

if TYPE_CHECKING:
    from inlay.program.program import Program

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the cache, in which compiling takes most of the time."""
    monkeypatch.setattr(writer, "build_library", vars(writer)["build_library"])
    tiny_builds.compile_once()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is done: transforms that run, graphs that Inductor compiles, programs that are started."""
    import torch._inductor as inductor

    seen: Counter[str] = Counter()

    def counted(owner: Any, name: str, kind: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "--version" not in str(args):
                seen[kind] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(inductor, "aot_compile", "Inductor")
    counted(inlay.flow, "run", "transforms")
    counted(subprocess.Popen, "_execute_child", "programs")
    return seen


class TestHit:
    def test_a_second_build_compiles_nothing(self, tmp_path: Path, work: Counter[str]) -> None:
        first = build(example(), tmp_path / "one")
        assert not first.cache.hit
        assert (work["Inductor"], work["transforms"]) == (1, 1)
        assert work["programs"] > 0
        work.clear()
        second = build(example(), tmp_path / "two")
        assert second.cache.hit
        assert not work
        one, two = (read_manifest(tmp_path / name)[1] for name in ("one", "two"))
        assert one.name == two.name, "the name is the hash of the manifest, which has the hashes of all files"
        assert [record.to_json() for record in first.records] == [record.to_json() for record in second.records]
        assert is_right(tmp_path / "two")

    @pytest.mark.nightly
    def test_a_decoder(self, model_folder: Path, tmp_path: Path, work: Counter[str]) -> None:
        """With quantised weights, a cache and a tokenizer."""
        import inlay

        options = BuildOptions(max_length=ROOM, max_batch=2, weights="int8", buckets=())
        first = build(str(model_folder), tmp_path / "one", options)
        work.clear()
        second = build(str(model_folder), tmp_path / "two", options)
        assert (first.cache.hit, second.cache.hit, dict(work)) == (False, True, {})
        assert first.manifest == second.manifest
        prompts = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(0))
        packages = [inlay.package.load_package(tmp_path / name) for name in ("one", "two")]
        assert torch.equal(*(greedy(each, prompts, 8) for each in packages))
        assert inlay.load(tmp_path / "two").generate("Hello", max_tokens=2, raw=True).tokens
        names = [tmp_path / name / "current" / "matches.lock" for name in ("one", "two")]
        assert names[0].read_text() == names[1].read_text()

    def test_not_asked(
        self, tmp_path: Path, cache: BuildCache, compiled_once: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for options in (BuildOptions(use_cache=False), BuildOptions(dump=tmp_path / "dump")):
            for _ in range(2):
                built = build(example(), tmp_path / "package", options)
                assert not built.cache.hit
                assert built.cache.reason
        monkeypatch.setenv("INLAY_DUMP_GRAPHS_DIR", str(tmp_path / "variable"))
        assert build(example(), tmp_path / "package").cache.reason
        dumps = [{file.name for file in (tmp_path / name).iterdir()} for name in ("dump", "variable")]
        assert dumps[0] == dumps[1] >= {"000_capture_program.py", "index.json"}
        assert not cache.entries()

    def test_a_cache_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_once: None
    ) -> None:
        """The build does not mind."""
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(BuildCache, "__init__", lambda self: setattr(self, "folder", tmp_path / "file" / "builds"))
        assert "Not a directory" in build(example(), tmp_path / "package").cache.reason
        assert is_right(tmp_path / "package")


@pytest.fixture(scope="module")
def captured() -> Program:
    return capture(example())


def _factors(program: Program, options: BuildOptions | None = None) -> dict[str, str]:
    asked = inlay.flow._build_request(inlay.flow.prepare(program, options or BuildOptions()), options or BuildOptions())
    assert isinstance(asked, key.BuildRequest)
    return key.collect_factors(asked)


def _differing(one: dict[str, str], two: dict[str, str]) -> set[str]:
    assert (key.compute_key(one) == key.compute_key(two)) == (one == two)
    return {name for name in {*one, *two} if one.get(name) != two.get(name)}


class TestFactors:
    def test_of_the_program(self, captured: Program) -> None:
        plain = _factors(captured)
        assert _factors(capture(example())) == plain
        assert _factors(replace(captured, name="another name")) == plain
        assert _differing(plain, _factors(capture(example(variant=1)))) == {"program"}
        assert _differing(plain, _factors(capture(example(seed=1)))) == {"weights in memory"}
        other = example()
        other.module.get_buffer("seen").fill_(3.0)
        assert _differing(plain, _factors(capture(other))) == {"program", "values in the program"}

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            (BuildOptions(buckets=()), {"buckets"}),
            (BuildOptions(settings=("match_rope.enabled=false",)), {"setting match_rope.enabled"}),
            (BuildOptions(kernels="portable"), {"kernels for", "CPU", "CPU features"}),
        ],
        ids=["buckets", "setting", "kernels"],
    )
    def test_of_what_is_asked_for(self, captured: Program, options: BuildOptions, names: set[str]) -> None:
        differing = _differing(_factors(captured), _factors(captured, options))
        sources = {name for name in differing if name.startswith("source ")}
        assert differing - sources == names
        assert all("match_rope" in name for name in sources), "a transform that is switched off does not count"

    @pytest.mark.parametrize(
        ("owner", "name", "value", "factor"),
        [
            (torch, "__version__", "2.99", "torch"),
            (torch, "get_num_threads", lambda: 77, "threads"),
            (machine, "cpu_features", lambda: ("avx1024",), "CPU features"),
            (machine, "cpu_name", lambda: "another", "CPU"),
            (machine, "compiler_version", lambda: "g++ 99", "C++ compiler"),
        ],
    )
    def test_of_the_machine(
        self, captured: Program, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, factor: str
    ) -> None:
        plain = _factors(captured)
        monkeypatch.setattr(owner, name, value)
        assert _differing(plain, _factors(captured)) == {factor}

    def test_of_the_compiler_beside(self, captured: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch._inductor.config as config

        plain = _factors(captured)
        with config.patch(max_autotune=not config.max_autotune):
            assert _differing(plain, _factors(captured)) == {"settings of Inductor"}
        with config.patch({"xpu.cutlass_dir": "/another/working/folder"}):
            assert _differing(plain, _factors(captured)) == set()
        monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
        assert _differing(plain, _factors(captured)) == {"environment TORCHINDUCTOR_FREEZING"}

    def test_of_weights_in_files(self, model_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(model_folder, folder)
        plain = _factors(capture(str(folder)))
        file = folder / "model.safetensors"
        os.utime(file, ns=(1, 1))
        assert _differing(plain, _factors(capture(str(folder)))) == {f"weights {file.resolve()}"}

    def test_sources_are_named(self, captured: Program) -> None:
        found = _factors(captured)
        for name in (
            "rewrite/matcher.py",
            "program/fold.py",
            "analysis/state_updates.py",
            "lowering/aoti.py",
            "flow.py",
        ):
            assert f"source inlay/{name}" in found
        assert "source inlay/ops/native/linear.cpp" in found
        assert "source inlay/transforms/library/match_rope.py" in found
        assert not any(name.startswith(("source inlay/cli", "source inlay/insight", "source torch")) for name in found)
        assert {"torch", "python", "package pydantic"} <= set(found)


class TestImports:
    def write(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
        for name, text in files.items():
            file = folder / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(folder)

    def test_through_packages_and_functions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(
            tmp_path,
            monkeypatch,
            mine="from pack_a.inner import one\nimport json, torch, yaml\ndef late():\n    import late_one",
            late_one="from importlib import import_module\nimport_module('named')",
            named="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never\nelse:\n    import always",
            always="try:\n    import is_not_there\nexcept ImportError:\n    pass",
            never="",
            pack_a__start="",
            pack_a__inner__one="from ..start import nothing\nfrom . import two",
            pack_a__inner__two="import mine",
        )
        (tmp_path / "pack_a" / "inner" / "__init__.py").write_text("")
        (tmp_path / "pack_a" / "__init__.py").write_text("raise RuntimeError('imported')")
        found = collect_sources(["mine"])
        inner = [f"pack_a/{name}.py" for name in ("__init__", "inner/__init__", "inner/one", "inner/two", "start")]
        assert sorted(found.files) == sorted(["always.py", "late_one.py", "mine.py", "named.py", *inner])
        assert list(found.packages) == ["yaml"]
        assert "PyYAML" in found.packages["yaml"] or found.packages["yaml"][0].isdigit()


PARTS = {
    "my_model.py": """
        import my_transform
        from tests.build_cache.tiny_builds import example
    """,
    "my_transform.py": """
        from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform
        from my_helper import how_many

        @transform("mine", stage=Stage.FUSE, numerics=Numerics.EXACT)
        class Mine(Transform):
            "Does nothing."

            def apply(self, program):
                return TransformResult(program, how_many())
    """,
    "my_helper.py": """
        import my_helpers_helper

        def how_many():
            return my_helpers_helper.NUMBER
    """,
    "my_helpers_helper.py": "NUMBER = 1",
    "config.yaml": "transforms: {mine: {}}",
}


class TestMiss:
    def inlay(self, folder: Path, *words: str) -> str:
        code = "import sys\nfrom inlay.cli.main import app\napp(sys.argv[1:])"
        paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        command = [sys.executable, "-c", code, *words]
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @pytest.mark.nightly
    def test_a_helper_of_a_transform(self, tmp_path: Path, cache: BuildCache) -> None:
        """The command line, from nothing to a hit to a miss that names the helper of a helper."""
        for name, text in PARTS.items():
            (tmp_path / name).write_text(textwrap.dedent(text))
        build = ("build", "my_model:example", "-o", "package", "--config", "config.yaml", "--explain-cache")
        assert "no entry to compare with" in self.inlay(tmp_path, *build)
        said = self.inlay(tmp_path, *build)
        assert "Cache hit: nothing was compiled," in said
        assert "mine" in said
        (tmp_path / "my_helpers_helper.py").write_text("NUMBER = 2\n")
        said = self.inlay(tmp_path, *build)
        assert "1 of " in said
        assert "source my_helpers_helper.py changed" in said
        assert [entry.hits for entry in cache.entries()] == [0, 1]
        assert is_right(tmp_path / "package")

    def test_what_differs_is_told(self, tmp_path: Path, compiled_once: None) -> None:
        build(example(), tmp_path / "package")
        built = build(example(), tmp_path / "package", BuildOptions(settings=("match_rope.enabled=false",)))
        told = {each.text for each in built.cache.differences}
        assert "source inlay/transforms/library/match_rope.py removed" in told
        assert any(text.startswith("setting match_rope.enabled") for text in told)

    def test_a_transform_without_a_file(self, tmp_path: Path, cache: BuildCache, compiled_once: None) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("transforms: {of_this_test: {}}")

        @transform("of_this_test", stage=Stage.FUSE, numerics=Numerics.EXACT)
        class OfThisTest(Transform):
            """Does nothing."""

            def apply(self, program: Program) -> TransformResult:
                return TransformResult(program, 0)

        built = build(example(), tmp_path / "package", BuildOptions(config=(config,)))
        assert "of_this_test was defined inside a function" in built.cache.reason
        code = (
            "class Typed(Transform):\n    'Nothing.'\n    def apply(self, program):\n        return Applied(program, 0)"
        )
        names: dict[str, Any] = {"Transform": Transform, "Applied": TransformResult, "__name__": __name__}
        exec(compile(code, "<typed>", "exec"), names)
        transform("of_this_test_too", stage=Stage.FUSE, numerics=Numerics.EXACT)(names["Typed"])
        config.write_text("transforms: {of_this_test_too: {}}")
        built = build(example(), tmp_path / "package", BuildOptions(config=(config,)))
        assert "has no source file: it was defined in <typed>" in built.cache.reason
        assert not cache.entries()

    def test_a_source_that_changed_meanwhile(self, captured: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was imported may be another text than what is hashed."""
        monkeypatch.setattr(machine, "process_start_time", lambda: 0.0)
        with pytest.raises(key.NotCacheable, match="was changed after this process started"):
            _factors(captured)


class TestDamage:
    def test_is_noticed(self, tmp_path: Path, cache: BuildCache, compiled_once: None) -> None:
        """Every file of an entry, damaged in four ways: the build is right, and its entry whole again."""
        build(example(), tmp_path / "package")
        (entry,) = cache.entries()
        files = sorted(file for file in entry.folder.rglob("*") if file.is_file() and file.name != HITS)
        assert len(files) > 4
        rng = random.Random(0)
        for place, file in enumerate(files):
            _damage(file, place % 4, rng)
            built = build(example(), tmp_path / "package")
            assert not built.cache.hit
            assert "is damaged" in built.cache.reason
            assert is_right(tmp_path / "package")
            assert build(example(), tmp_path / "package").cache.hit, file.name

    def test_other_weights_under_the_same_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_once: None
    ) -> None:
        """A file that was changed and looks as if it was not: weights are compared by what they become."""
        monkeypatch.setattr(key, "_tensor_hash", lambda name, ref: "the same")
        build(example(), tmp_path / "package")
        built = build(example(seed=1), tmp_path / "package")
        assert not built.cache.hit
        assert "weights differ from those of the cached build" in built.cache.reason
        assert is_right(tmp_path / "package", seed=1)


def _damage(file: Path, how: int, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if how == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[len(data) // 2 :]
    elif how == 2:
        file.unlink()
        file.symlink_to("/etc/hostname")
        return
    else:
        file.unlink()
        return
    file.write_bytes(data)
