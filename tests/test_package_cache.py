"""Packages that are built on demand: when they are built, reused and replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from inlay import flow, machine, package_cache
from inlay.cli.main import app
from inlay.errors import MachineError
from inlay.package import store
from inlay.package.files import lock_file
from inlay.package_cache import PackageCache, is_package, model_name
from tests.small_packages import ROOM

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS: dict[str, Any] = {"max_length": ROOM, "max_batch": 4}


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    return shutil.copytree(model_folder, tmp_path / "tiny")


@pytest.fixture
def builds(package: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were built. A build copies a package: these tests are about when one is made."""
    found: list[str] = []

    def build(model: str, out: Path, options: flow.BuildOptions, on_step: Callable[[str], None]) -> None:
        found.append(model)
        on_step("transforming")
        store.check_free(out)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(package, out, symlinks=True)

    monkeypatch.setattr(flow, "build", build)
    return found


def test_a_model_is_built_once_and_again_when_something_changed(
    folder: Path, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PackageCache(tmp_path / "packages")
    package = cache.ensure(str(folder), OPTIONS)
    assert is_package(str(package))
    assert cache.ensure(str(folder), OPTIONS) == cache.ensure(f"{folder}/", OPTIONS) == package
    monkeypatch.chdir(folder.parent)
    assert cache.ensure("tiny", OPTIONS) == package, "a relative path is the same model"
    assert builds == [str(folder)]
    (entry,) = cache.entries()
    assert (entry.model, entry.folder) == (str(folder), package)
    assert entry.size > 100_000

    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert cache.ensure(str(folder), OPTIONS) == package, "it replaces the old one"
    assert len(builds) == 2
    monkeypatch.setenv("CXXFLAGS", "-g")
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 3, "another setting of the compiler"
    assert len(cache.entries()) == 1


def test_other_weights_of_the_same_size_and_time_are_built(folder: Path, builds: list[str], tmp_path: Path) -> None:
    """Images and archives give all files the same time."""
    cache = PackageCache(tmp_path / "packages")
    cache.ensure(str(folder), OPTIONS)
    weights = next(folder.glob("*.safetensors"))
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 2


def test_installations_do_not_replace_each_others_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {package_cache._entry_name("org/name", {})}
    with monkeypatch.context() as patched:
        patched.setattr(machine, "__file__", str(tmp_path / "other" / "machine.py"))
        names.add(package_cache._entry_name("org/name", {}))
    with monkeypatch.context() as patched:
        patched.setattr(machine, "cpu_name", lambda: "another")
        names.add(package_cache._entry_name("org/name", {}))
    names.add(package_cache._entry_name("models:make", {}))
    monkeypatch.chdir(tmp_path)
    names.add(package_cache._entry_name("models:make", {}))
    assert len(names) == 5


def test_a_folder_of_another_user_is_refused(
    folder: Path, tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has the package: its libraries would be loaded as code."""
    cache = PackageCache(tmp_path / "packages")
    cache.ensure(str(folder), OPTIONS)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(MachineError, match=r"belongs to another user, .* Set XDG_CACHE_HOME"):
        cache.ensure(str(folder), OPTIONS)


def test_what_an_interrupted_build_left_is_listed_and_cleared(tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    staged = cache.folder / "tiny-0" / "package" / "versions" / ".building-x"
    staged.mkdir(parents=True)
    (staged / "weights").write_bytes(b"x" * 1000)
    (entry,) = cache.entries()
    assert (entry.model, entry.size) == ("", 1000)
    with lock_file(cache.folder / ".lock-tiny-0", lambda: None):
        assert cache.clear(float("inf")) == (0, 0), "another process builds it"
    assert cache.clear(float("inf")) == (1, 1000)
    assert list(cache.folder.iterdir()) == []


def test_an_entry_that_was_removed_by_half_is_built_again(folder: Path, builds: list[str], tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    package = cache.ensure(str(folder), OPTIONS)
    shutil.rmtree(package / "versions")
    assert cache.ensure(str(folder), OPTIONS) == package
    assert (package / "current" / "manifest.json").is_file()
    assert len(builds) == 2


def test_a_damaged_package_is_built_again(folder: Path, builds: list[str], tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    package = cache.ensure(str(folder), OPTIONS)
    file = next((package / "current").resolve().rglob("*.so"))
    file.write_bytes(file.read_bytes()[:-1])
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 2
    shutil.rmtree(package)
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 3
    (package.parent / "key.json").write_text('{"model": 7, "files"')
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 4


def test_a_model_that_changes_during_its_build_is_built_again(
    folder: Path, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PackageCache(tmp_path / "packages")
    counted = flow.build

    def build(*arguments: Any, **keywords: Any) -> Any:
        made = counted(*arguments, **keywords)
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        return made

    with monkeypatch.context() as patched:
        patched.setattr(flow, "build", build)
        cache.ensure(str(folder), OPTIONS)
    cache.ensure(str(folder), OPTIONS)
    cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 2


@pytest.mark.parametrize("changed", ["source", "setting"])
def test_what_changes_during_a_build_is_built_again(
    changed: str, folder: Path, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of the old source is not current for the new one."""
    source = tmp_path / "inlay" / "machine.py"
    source.parent.mkdir()
    source.write_text("old = 1\n")
    monkeypatch.setattr(machine, "__file__", str(source))
    monkeypatch.setattr(machine, "process_start_time", lambda: time.time() + 60)  # the source is older
    cache, counted = PackageCache(tmp_path / "packages"), flow.build

    def build(*arguments: Any, **keywords: Any) -> None:
        counted(*arguments, **keywords)
        if changed == "setting":
            monkeypatch.setenv("CXXFLAGS", "-g")
        elif len(builds) == 1:
            source.write_text("new = 2\n")

    monkeypatch.setattr(flow, "build", build)
    for _ in range(3):
        cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 2


def test_a_process_that_may_run_older_source_leaves_no_current_package(
    folder: Path, builds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source that changed between the start of the process and the build."""
    source, cache = tmp_path / "inlay" / "machine.py", PackageCache(tmp_path / "packages")
    source.parent.mkdir()
    source.write_text("new = 2\n")
    monkeypatch.setattr(machine, "__file__", str(source))
    for _ in range(2):
        cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 2, "this process is older than the source"
    monkeypatch.setattr(machine, "process_start_time", lambda: time.time() + 60)
    for _ in range(2):
        cache.ensure(str(folder), OPTIONS)
    assert len(builds) == 3, "a new process builds once"


def test_another_content_of_a_configuration_file_is_built(folder: Path, builds: list[str], tmp_path: Path) -> None:
    cache, config = PackageCache(tmp_path / "packages"), tmp_path / "mine.yaml"
    config.write_text("transforms: {match_rope: {enabled: false}}")
    package = cache.ensure(str(folder), {**OPTIONS, "config": (config,)})
    os.utime(config, (1, 1))
    assert cache.ensure(str(folder), {**OPTIONS, "config": (config,)}) == package
    assert len(builds) == 1, "the same content"
    config.write_text("transforms: {match_rope: {enabled: true}}")
    assert cache.ensure(str(folder), {**OPTIONS, "config": (config,)}) == package
    assert len(builds) == 2


def test_threads_that_want_the_same_model_build_it_once(folder: Path, builds: list[str], tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    found: set[Path] = set()
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.add(cache.ensure(str(folder), OPTIONS, said.append))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == len(found) == 1
    assert said.count("transforming") == 1


def test_options_make_another_package(folder: Path, builds: list[str], tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    first = cache.ensure(str(folder), OPTIONS)
    assert cache.ensure(str(folder), {**OPTIONS, "settings": ("fuse_gemms.enabled=true",)}) != first
    assert len(builds) == len(cache.entries()) == 2
    assert cache.clear(0.0) == (0, 0)
    assert cache.clear(float("inf"))[0] == 2
    assert cache.entries() == []


@pytest.mark.fast
def test_a_factory_is_captured_every_time(builds: list[str], tmp_path: Path) -> None:
    cache = PackageCache(tmp_path / "packages")
    for _ in range(2):
        cache.ensure("tests.models:convolutions", {})
    assert len(builds) == 2
    assert [each.model for each in cache.entries()] == ["tests.models:convolutions"]


@pytest.mark.fast
def test_names(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert model_name(f"{tmp_path}/folder/") == "folder"
    assert not is_package(str(tmp_path / "folder"))
    for strange in ("~nobody-of-that-name/m", "x" * 300, "a\x00b"):
        assert not is_package(strange)
        assert package_cache._model_files(strange + ":f") is None
    hostile = package_cache._entry_name("../../etc/pass wd\x00", {})
    assert "/" not in hostile
    assert not hostile.startswith(".")


@pytest.mark.nightly
def test_run_builds_then_imports_no_compiler(folder: Path, tmp_path: Path) -> None:
    """The second run of a model loads its package and nothing that captures or compiles."""
    code = (
        "import sys\n"
        "from inlay.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print([name for name in sys.modules if name.startswith(('torch._inductor', 'transformers', 'inlay.flow'))])"
    )
    arguments = ["run", str(folder), "fox", "--max-tokens", "3", "--max-length", str(ROOM), "--max-batch", "4"]
    for turn in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600, check=True
        )
        assert "tokens" in done.stderr.splitlines()[-1]
        assert ("inlay.flow" in done.stdout) == (turn == 0), done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    listed = CliRunner().invoke(app, ["run", str(folder), "fox", "--weights", "int9"], env=dict(os.environ))
    assert listed.exit_code == 2


@pytest.mark.fast
def test_build_options_do_not_change_a_package(package: Path) -> None:
    said = CliRunner().invoke(app, ["run", str(package), "fox", "--max-length", "64", "--trust-remote-code"])
    assert said.exit_code == 2
    assert "is a package, and --max-length, --trust-remote-code would change how it is built" in " ".join(
        said.stderr.split()
    )
