"""Locks: what matched is written down, and what matches differently is told in a sentence."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from inlay import Example
from inlay.cli.main import app
from inlay.machine import package_version
from inlay.transforms import base
from inlay.transforms.base import Numerics, PatternTransform, Stage
from inlay.transforms.lock import read_lock
from tests.architectures import without_weights

ROOT = Path(__file__).parents[2]
WRITTEN = "a"
"""How the norm below is written: as now, or as after an upgrade."""


class Norms(torch.nn.Module):
    """Two RMS norms, the second one written as `WRITTEN` says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        one = _norm(x, self.weights[0])
        if WRITTEN == "a":
            return _norm(one, self.weights[1])
        if WRITTEN == "returned":
            variance = one.pow(2).mean(-1, keepdim=True)
            return self.weights[1] * (one * torch.rsqrt(variance + 1e-6)), variance
        return self.weights[1] * (one / torch.sqrt(one.pow(2).mean(-1, keepdim=True) + 1e-6))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def norms() -> Example:
    return Example(Norms(), (torch.randn(3, 8),), axes={"x": {0: "batch"}})


MODEL = "tests.transforms.test_lock:norms"


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "matches.lock"
    written = _run("lock", MODEL, "-o", str(file))
    assert written.exit_code == 0, written.output
    return file


def _written(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    import sys

    monkeypatch.setattr(sys.modules["tests.transforms.test_lock"], "WRITTEN", how)


def test_a_lock_is_readable_and_holds(lock: Path) -> None:
    text = lock.read_text()
    assert "match_rms_norm:\n      sites: 2\n" in text
    (model,) = read_lock(lock).models
    assert (model.model, model.transforms["match_rms_norm"].sites) == (MODEL, 2)
    checked = _run("check", "--lock", str(lock))
    assert checked.exit_code == 0, checked.output
    assert "1 models match as locked." in checked.stdout


@pytest.mark.parametrize(
    ("how", "reason"),
    [("returned", "another consumer"), ("divided", "aten.rsqrt.default expected, aten.sqrt.default found")],
)
def test_a_norm_written_differently(lock: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str) -> None:
    _written(monkeypatch, how)
    checked = _run("check", "--lock", str(lock))
    assert checked.exit_code == 1
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("differs:")]
    assert "match_rms_norm matched 1 sites, the lock has 2" in line
    assert reason in line
    assert f"inlay lock {MODEL}" in checked.stdout
    found = json.loads(_run("check", "--lock", str(lock), "--json").stdout)
    assert not found["holds"]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert f"::error file={lock}" in _run("check", "--lock", str(lock)).stdout


class DoubleTanh(PatternTransform):
    """Somebody's own transform."""

    name = "double_tanh"
    stage, numerics = Stage.FUSE, Numerics.ROUNDING

    def examples(self, dtype: torch.dtype) -> dict[str, Any]:
        return {"x": torch.ones(3, 5, dtype=dtype)}

    def pattern(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh().tanh()

    def replacement(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.tanh().tanh().clone()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of somebody whose package registers a transform."""
    monkeypatch.setitem(base._REGISTRY, DoubleTanh.name, DoubleTanh)
    file = tmp_path / "mine.yaml"
    file.write_text("# with a comment\ntransforms:\n  double_tanh: {enabled: true}\n")
    return file


@pytest.fixture
def locked_with(tmp_path: Path, mine: Path) -> Path:
    file = tmp_path / "with.lock"
    options = ["--config", str(mine), "--set", "match_rope.enabled=false"]
    assert _run("lock", MODEL, *options, "-o", str(file)).exit_code == 0
    return file


def test_a_check_uses_the_configuration_of_the_lock(locked_with: Path) -> None:
    transforms = read_lock(locked_with).models[0].transforms
    assert "double_tanh" in transforms
    assert "match_rope" not in transforms
    checked = _run("check", "--lock", str(locked_with))
    assert checked.exit_code == 0, checked.output
    assert checked.stdout == "1 models match as locked.\n"


def test_the_remedy_of_a_check_keeps_the_configuration(
    locked_with: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that it prints locks the user's own transform again."""
    _written(monkeypatch, "returned")
    checked = _run("check", "--lock", str(locked_with))
    assert checked.exit_code == 1
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("To accept the changes: inlay ")]
    words = shlex.split(line.partition("inlay ")[2])
    assert words == ["lock", MODEL, "--config", str(mine), "--set", "match_rope.enabled=false", "-o", str(locked_with)]
    before = read_lock(locked_with).models[0].transforms
    assert _run(*words).exit_code == 0
    assert set(read_lock(locked_with).models[0].transforms) == set(before)
    assert _run("check", "--lock", str(locked_with)).exit_code == 0


def test_a_configuration_that_changed_is_reported(locked_with: Path, mine: Path) -> None:
    mine.write_text("transforms: {double_tanh: {enabled: true}}  # the same, written differently")
    assert _run("check", "--lock", str(locked_with)).exit_code == 0
    mine.write_text("transforms: {double_tanh: {enabled: false}}")
    checked = _run("check", "--lock", str(locked_with))
    assert checked.exit_code == 1
    (line,) = [line for line in checked.stdout.splitlines() if line.startswith("differs:")]
    assert line.endswith("mine.yaml: The file changed since it was locked; its locked contents are used.")
    mine.unlink()
    checked = _run("check", "--lock", str(locked_with))
    assert checked.exit_code == 0, checked.output
    assert "mine.yaml: The file is missing; its locked contents are used." in checked.stdout


def test_other_options_than_those_of_the_lock(locked_with: Path) -> None:
    checked = _run("check", "--lock", str(locked_with), "--set", "match_rms_norm.enabled=false")
    assert checked.exit_code == 1
    assert "match_rms_norm does not run any more." in checked.stdout
    assert "double_tanh" not in checked.stdout


def test_updating_shows_what_changes(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(monkeypatch, "returned")
    updated = _run("lock", MODEL, "-o", str(lock))
    assert updated.exit_code == 0
    assert "-      sites: 2" in updated.stdout
    assert "+      sites: 1" in updated.stdout
    assert _run("check", "--lock", str(lock)).exit_code == 0


def test_a_lock_of_another_torch(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed, in sentences: the version, the operators of the program, the sites with the reason."""
    lock.write_text(re.sub(r"torch: .*", "torch: 2.12.1", lock.read_text()))
    same = _run("check", "--lock", str(lock))
    assert same.exit_code == 0, same.output
    installed = package_version("torch")
    assert f"note: torch: The lock was written with torch 2.12.1; {installed} is installed." in same.stdout
    assert "captured program" not in same.stdout
    _written(monkeypatch, "divided")
    lines = _run("check", "--lock", str(lock)).stdout.splitlines()
    (program,) = [line for line in lines if "The captured program changed" in line]
    assert program.endswith(
        "calls of aten.div.Tensor 0 → 1, aten.mul.Tensor 4 → 3, aten.rsqrt.default 2 → 1, aten.sqrt.default 0 → 1."
    )
    assert any("match_rms_norm matched 1 sites, the lock has 2: " in line for line in lines)
    found = json.loads(_run("check", "--lock", str(lock), "--json").stdout)
    assert [each["model"] for each in found["differences"] if "was written with" in each["message"]] == ["torch"]


def test_a_lock_without_operators_holds(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks written before operators were part of them."""
    lock.write_text(re.sub(r"  operators:\n(    .*\n)*", "", lock.read_text()))
    assert not read_lock(lock).models[0].operators
    assert _run("check", "--lock", str(lock)).exit_code == 0
    _written(monkeypatch, "divided")
    assert "nodes)." in _run("check", "--lock", str(lock)).stdout


def test_no_lock(tmp_path: Path) -> None:
    assert _run("check", "--lock", str(tmp_path / "none")).exit_code == 2
    (tmp_path / "bad").write_text("models: 3")
    bad = _run("check", "--lock", str(tmp_path / "bad"))
    assert bad.exit_code == 2
    assert "is not a lock" in bad.stderr
    (tmp_path / "old").write_text("format: 2\nmodels: []")
    old = _run("check", "--lock", str(tmp_path / "old"))
    assert old.exit_code == 2
    assert "is not a lock of format 3" in old.stderr


def test_a_lock_of_a_test_is_checked_by_pytest(tmp_path: Path) -> None:
    entry = "{model: 'test_a.py::test_b', nodes: 0, program: '', configuration: '', transforms: {}}"
    (tmp_path / "passes.lock").write_text(f"format: 3\nmodels: [{entry}]")
    checked = _run("check", "--lock", str(tmp_path / "passes.lock"))
    assert checked.exit_code == 2
    assert "test_a.py::test_b is a test. Run it with pytest" in checked.stderr


def test_verify_against_a_lock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run("verify", MODEL, "--against", str(lock)).exit_code == 0
    _written(monkeypatch, "returned")
    found = _run("verify", MODEL, "--against", str(lock), "--json")
    assert found.exit_code == 1
    changes = {each["transform"]: each for each in json.loads(found.stdout)}
    assert changes["match_rms_norm"]["change"] == "match loss"
    assert changes["match_rms_norm"]["reason"] == "1 fewer sites than expected"


def _divided(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm as somebody else would write it."""
    wide = hidden_states.to(torch.float32)
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * normed.to(hidden_states.dtype)


def test_a_stock_model_after_an_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another release of transformers wrote the norm differently: one sentence, with the line of the model."""
    from transformers.models.llama import modeling_llama

    folder, file = without_weights(tmp_path / "llama", "llama", 2), str(tmp_path / "matches.lock")
    assert _run("lock", folder, "-o", file).exit_code == 0
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", _divided)
    checked = _run("check", "--lock", file)
    assert checked.exit_code == 1, checked.output
    (line,) = [line for line in checked.stdout.splitlines() if "match_rms_norm" in line]
    start = f"differs: {folder}: match_rms_norm matched 0 sites, the lock has 5: layers 0 and 1: "
    assert line.startswith(start), line
    assert "missing node: " in line
    assert line.endswith(")."), "where it is read"
    assert "modeling_llama.py:" in line
    assert line.count(". ") == 0, "one sentence"
    monkeypatch.undo()
    assert _run("check", "--lock", file).exit_code == 0


def _code(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_and_the_hook(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/lock.md gives away runs as it stands, and fails when the lock does not hold."""
    steps = _code("docs/inlay-check.yml")["jobs"]["matches"]["steps"]
    (command,) = [step["run"] for step in steps if "inlay check" in step.get("run", "")]
    (hook,) = [each for each in _code(".pre-commit-hooks.yaml") if each["id"] == "inlay-check"]
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "requirements.txt"), "an upgrade is what it is for"
    assert lock.name == "matches.lock"
    monkeypatch.chdir(lock.parent)
    for words in (shlex.split(command), [*shlex.split(hook["entry"]), *hook["args"]]):
        assert words[0] == "inlay"
        _written(monkeypatch, "a")
        assert _run(*words[1:]).exit_code == 0
        _written(monkeypatch, "returned")
        assert _run(*words[1:]).exit_code == 1
