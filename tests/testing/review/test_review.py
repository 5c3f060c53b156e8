"""`inlay review`: library transforms pass it honestly, and tests that cannot fail are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.frontend import capture
from inlay.testing import assert_rewrites, program_of
from inlay.testing.review import review
from inlay.testing.review.mutants import EVERYWHERE, NOTHING, WRONG, find_conditions, make_mutants
from inlay.testing.review.note import render_markdown
from inlay.transforms import registry
from inlay.transforms.base import find_transform
from tests.models import llama_folder

if TYPE_CHECKING:
    from inlay.program.program import Program

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
    done = review(find_transform(name), {"llama": llama}, folder=tmp_path)
    text = render_markdown(done)
    assert done.passed, text
    assert "- [ ]" not in text
    assert tuple(line.partition(":")[0] + ":" for line in text.strip().splitlines()[-7:]) == NOTE
    assert (tmp_path / "llama" / "before.folded.py").read_text() != (tmp_path / "llama" / "after.folded.py").read_text()


def _scaffold(folder: Path) -> Path:
    shutil.copy(ROOT / "examples" / "mixer.py", folder)
    done = CliRunner().invoke(
        app, ["candidates", "mixer:mixer", "--scaffold", "conv1d_tanh_sigmoid_mul", "--into", str(folder)]
    )
    assert done.exit_code == 0, done.output
    return folder / "fuse_conv1d_tanh_sigmoid_mul.py"


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
