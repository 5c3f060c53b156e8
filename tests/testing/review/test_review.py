"""`inlay review`: library transforms pass it honestly, and tests that cannot fail are found."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.cli.review import _transform as find_file_transform
from inlay.config import layers as config_layers
from inlay.frontend import capture
from inlay.program import Fact, Facts
from inlay.testing import assert_rewrites, program_of
from inlay.testing.review import checklist, note, review
from inlay.testing.review.mutants import EVERYWHERE, NOTHING, WRONG, find_conditions, make_mutants
from inlay.testing.review.note import render_markdown
from inlay.testing.review.previous_revision import previous_sites
from inlay.transforms import Numerics, Stage, Transform, TransformResult, base, registry
from inlay.transforms.base import TransformOptions, find_transform
from tests.models import llama_folder

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.testing.review import ChecklistItem

ROOT = Path(__file__).parents[3]
NOTE = ("Candidate:", "Path:", "Rationale:", "Graph validation:", "Summary logs:", "Tests:", "Open risks:")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return capture(str(llama_folder(tmp_path_factory.mktemp("llama"))))


@pytest.mark.parametrize(
    "name",
    [
        "match_swiglu",
        pytest.param("match_rms_norm", marks=pytest.mark.nightly),
        pytest.param("match_rope", marks=pytest.mark.nightly),
        pytest.param("match_attention", marks=pytest.mark.nightly),
        pytest.param("fuse_add_rms_norm", marks=pytest.mark.nightly),
    ],
)
def test_library_transforms_pass(name: str, llama: Program, tmp_path: Path) -> None:
    before = {"llama": {name: 0}}  # so that git is not asked
    done = review(find_transform(name), {"llama": llama}, folder=tmp_path, expected_sites=before)
    text = render_markdown(done)
    assert done.passed, text
    assert "- [ ]" not in text
    assert tuple(line.partition(":")[0] + ":" for line in text.strip().splitlines()[-7:]) == NOTE
    assert (tmp_path / "llama" / "before.folded.py").read_text() != (tmp_path / "llama" / "after.folded.py").read_text()


class Clamp(Transform):
    """Writes relu as clamp_min."""

    name, stage, numerics = "clamp", Stage.CLEAN, Numerics.EXACT
    runs = 0

    def apply(self, program: Program) -> TransformResult:
        type(self).runs += 1
        found = [node for node in program.graph.nodes if node.target is torch.ops.aten.relu.default]
        for node in found:
            node.target, node.args = torch.ops.aten.clamp_min.default, (node.args[0], 0)
        return TransformResult(program, len(found), [node.name for node in found])


class Moody(Clamp):
    """Matches twice and then no more."""

    def apply(self, program: Program) -> TransformResult:
        return super().apply(program) if type(self).runs < 2 else TransformResult(program, 0)


class Idle(Clamp):
    """Claims a site and changes nothing."""

    def apply(self, program: Program) -> TransformResult:
        return TransformResult(program, 1)


class Absent(Clamp):
    """Finds nothing."""

    def apply(self, program: Program) -> TransformResult:
        return TransformResult(program, 0)


class Wrong(Clamp):
    """Clamps at 1."""

    def apply(self, program: Program) -> TransformResult:
        made = super().apply(program)
        for node in [each for each in program.graph.nodes if each.target is torch.ops.aten.clamp_min.default]:
            node.args = (node.args[0], 1)
        return made


class Costly(Clamp):
    """Writes its result once more."""

    def apply(self, program: Program) -> TransformResult:
        made = super().apply(program)
        for node in [each for each in program.graph.nodes if each.target is torch.ops.aten.clamp_min.default]:
            with program.graph.inserting_after(node):
                copy = program.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        return made


def _items(
    cls: type[Transform], folder: Path, monkeypatch: pytest.MonkeyPatch, before: int | None = 1
) -> dict[str, ChecklistItem]:
    monkeypatch.setitem(base._REGISTRY, "clamp", cls)
    cls.runs = 0  # type: ignore[attr-defined]
    file = folder / "clamp.yaml"
    file.write_text("transforms: {clamp: {}}")
    program = program_of(lambda x: torch.relu(x) + 1, [torch.randn(3, 4)])
    locked = {"small": {"clamp": before}} if before is not None else {}
    done = review(cls, {"small": program}, folder=folder, config=[file], expected_sites=locked)
    return {" ".join(each.title.split()[:2]): each for each in done.checks}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("cls", "item", "evidence"),
    [
        (Absent, "The models", "small: absent"),
        (Absent, "It matches,", "small: none: no near misses"),
        (Wrong, "Outputs: no", "small: wrong"),
        (Moody, "Saved toggles,", "small: saved as enabled, it has 0 sites instead of 1"),
        (Idle, "The programs", "before.folded.py, after.folded.py: equal, with 1 sites"),
        (Costly, "Build time", "kernels write 0.0 → 0.0 MB"),
    ],
)
def test_each_item_can_fail(
    cls: type[Transform], item: str, evidence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _items(cls, tmp_path, monkeypatch)[item]
    assert not found.passed
    assert evidence in found.evidence[0]
    assert _items(Clamp, tmp_path, monkeypatch)[item].passed
    assert not checklist._check_registration(cls, []).passed, "no configuration names it"


@pytest.mark.fast
def test_an_overlay_whose_count_is_not_met_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title = "The count that overlays or files expect of it is met"
    for layers, passed in ((1, True), (3, False)):
        gates = replace(
            program_of(_gated, [torch.randn(3, 4)] * 2),
            facts=Facts(architecture="llama", layers=Fact(layers, "config")),
        )
        cls = find_transform("match_swiglu")
        model = checklist._review_model(cls, "gates", gates, (), tmp_path, {"match_swiglu": 1}, lambda step: None)
        item = checklist._check_overlays(cls, [model])
        assert (item.title, item.passed) == (title, passed)
        assert item.evidence[0].startswith("gates: models/llama.yaml, expect layers: ")
        assert any(line.startswith("models/qwen3.yaml: ") and "not checked" in line for line in item.evidence)


class Limited(Clamp):
    """Matches only if it is asked to."""

    class Options(TransformOptions):
        asked: bool = False

    def apply(self, program: Program) -> TransformResult:
        return super().apply(program) if self.options.asked else TransformResult(program, 0)


@pytest.mark.fast
def test_toggles_are_read_with_the_overlays_of_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay sets an option that decides what matches."""
    monkeypatch.setitem(base._REGISTRY, "clamp", Limited)
    overlay = {"match": {"architecture": ["mine"]}, "transforms": {"clamp": {"asked": True}}}
    checked = config_layers._validate(overlay, "mine")
    monkeypatch.setattr(config_layers, "_overlays", lambda: [("models/mine.yaml", checked)])
    program = program_of(lambda x: torch.relu(x) + 1, [torch.randn(3, 4)])
    for architecture, sites in (("mine", 1), ("other", 0)):
        given = replace(program, facts=Facts(architecture=architecture))
        model = checklist._review_model(Limited, "small", given, (), tmp_path, {"clamp": 1}, lambda step: None)
        assert (model.record.sites, model.toggle_problem) == (sites, "")


@pytest.mark.fast
def test_matches_before_come_from_a_lock_or_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = _items(Clamp, tmp_path, monkeypatch, before=4)
    assert locked["It matches,"].evidence == ("small: 1 sites; before: 4 (lock)",)
    assert "3 fewer sites than expected" in locked["Outputs: no"].evidence[0]
    assert not locked["Outputs: no"].passed
    monkeypatch.setattr(checklist, "previous_sites", lambda transform, program: (None, "no revision"))
    assert (
        "before: unknown (no revision)" in _items(Clamp, tmp_path, monkeypatch, before=None)["It matches,"].evidence[0]
    )


@pytest.mark.fast
def test_lost_matches_of_a_transform_that_adds_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are not compared, but its matches are."""
    monkeypatch.setattr(Clamp, "adds_inputs", True)
    for before, passed in ((1, True), (4, False)):
        item = _items(Clamp, tmp_path, monkeypatch, before=before)["Outputs: no"]
        assert item.passed is passed
        assert ("3 fewer sites than expected" in item.evidence[0]) is not passed


@pytest.mark.fast
def test_two_models_of_the_same_name(tmp_path: Path) -> None:
    """One would be reviewed twice, or write over the programs of the other."""
    folders = [tmp_path / name / "model" for name in ("one", "two")]
    for each in folders:
        each.mkdir(parents=True)
    options = [word for each in folders for word in ("--model", str(each))]
    done = CliRunner().invoke(app, ["review", "match_swiglu", *options])
    assert done.exit_code == 2
    assert "Two models are called model. Rename one" in done.stderr
    program = program_of(torch.relu, [torch.ones(2)])
    assert checklist._save(tmp_path, "one/model", program, program) != checklist._save(
        tmp_path, "two/model", program, program
    )


@pytest.mark.nightly
def test_matches_before_come_from_the_previous_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision that does not load says so."""
    file = tmp_path / "my_clamp.py"
    file.write_text(_FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(base, "_REGISTRY", dict(registry()))
    cls = importlib.import_module("my_clamp").MyClamp
    program = program_of(lambda x: torch.relu(x) + 1, [torch.randn(3, 4)])
    assert previous_sites(cls(), program) == (None, "neither a lock nor git has an earlier revision")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "my_clamp.py"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    assert previous_sites(cls(), program)[0] is None
    file.write_text(_FILE.replace("relu", "gelu"))
    sites, origin = previous_sites(cls(), program)
    assert (sites, origin.partition(" ")[0]) == (1, "revision")
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    assert previous_sites(cls(), program)[0] == 1
    for content, problem in (
        ("import no_such_module", "does not run: ModuleNotFoundError"),
        (_FILE.replace("my_clamp", "old_clamp"), "does not run: it has no transform my_clamp"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "does not run: exit code -9"),
    ):
        file.write_text(content)
        subprocess.run([*git, "commit", "-qam", problem], check=True)
        file.write_text(_FILE)
        sites, origin = previous_sites(cls(), program)
        assert sites is None
        assert problem in origin


_FILE = """
import torch
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform


@transform("my_clamp", stage=Stage.CLEAN, numerics=Numerics.EXACT)
class MyClamp(Transform):
    def apply(self, program):
        return TransformResult(program, sum(node.target is torch.ops.aten.relu.default for node in program.graph.nodes))
"""


def _scaffold(folder: Path) -> Path:
    shutil.copy(ROOT / "examples" / "mixer.py", folder)
    done = CliRunner().invoke(
        app, ["candidates", "mixer:mixer", "--scaffold", "conv1d_tanh_sigmoid_mul", "--into", str(folder)]
    )
    assert done.exit_code == 0, done.output
    return folder / "fuse_conv1d_tanh_sigmoid_mul.py"


@pytest.mark.nightly
def test_a_test_that_cannot_fail_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = _scaffold(tmp_path)
    test = tmp_path / f"test_{file.stem}.py"
    test.write_text(test.read_text() + "\n\ndef test_of_nothing() -> None:\n    assert NAME\n")
    command = ["review", str(file), "--model", "mixer:mixer", "--config", str(file.with_suffix(".yaml"))]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 1, done.output
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    (bad,) = [each for each in found["checks"] if not each["passed"]]
    assert "fail when it is broken" in bad["title"]
    (line,) = [line for line in bad["evidence"] if line.startswith("cannot fail")]
    assert "test_of_nothing" in line
    notices = {each["name"].rpartition("::")[2]: each["noticed"] for each in found["tests"]}
    assert notices["test_of_nothing"] == []
    assert NOTHING in notices["test_positive_cases[other sizes]"]
    assert EVERYWHERE in notices["test_negative_cases[a part of it]"]


def _gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * y


@pytest.mark.fast
@pytest.mark.parametrize("kind", [NOTHING, WRONG])
def test_a_broken_transform_is_whole_again(kind: str) -> None:
    cls = find_transform("match_swiglu")
    args = [torch.randn(3, 4)] * 2
    breakage = next(each for each in make_mutants(cls) if each.name == kind)
    program = program_of(_gated, args)
    with breakage(), pytest.raises(AssertionError):
        assert_rewrites(program, cls(), args=args, sites=1)
    assert_rewrites(program, cls(), args=args, sites=1)


@pytest.mark.fast
def test_every_condition_of_the_library_can_be_taken_out() -> None:
    count = 0
    for cls in registry().values():
        for breakage in make_mutants(cls):
            with breakage():
                count += breakage.name.startswith("omits")
    files = {Path(str(__import__(cls.__module__, fromlist=["x"]).__file__)) for cls in registry().values()}
    assert count >= sum(len(find_conditions(file)) for file in files) > 30


@pytest.mark.fast
def test_the_file_of_an_installed_transform() -> None:
    file = ROOT / "src" / "inlay" / "transforms" / "library" / "match_geglu.py"
    assert find_file_transform(str(file)).name == "match_geglu"


@pytest.mark.fast
def test_a_custom_operator_is_called_opaque() -> None:
    @torch.library.custom_op("review_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert "opaque to Inductor" in note._kernel(torch.ops.review_test.twice.default)[1]
    assert "opaque" not in note._kernel(torch.ops.inlay.swiglu.default)[1]
