"""`inlay explain` keeps its result until the model, its options or the code change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay import derived_cache, package_cache
from inlay.cli import explain
from inlay.cli.main import app
from inlay.config import resolve_config
from inlay.insight import explain as explain_program
from inlay.package.files import stamp
from inlay.program.text.printer import dump
from inlay.testing import program_of
from inlay.transforms import configure, steps_through

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program.program import Program

pytestmark = pytest.mark.fast


def _model(factor: float = 1.0) -> Program:
    def gated(x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * factor
        return torch.nn.functional.silu(normed).neg() * (normed + 1)

    return program_of(gated, [torch.ones(3, 8)])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(derived_cache, "source_key", lambda: "key")
    monkeypatch.setattr(derived_cache, "_is_enabled", True)
    made = tmp_path / "model.py"
    made.write_text(dump(_model()))
    return made


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each explanation that is computed."""
    calls: list[Any] = []
    compute = explain._compute

    def counted(*asked: Any) -> Any:
        calls.append(asked)
        return compute(*asked)

    monkeypatch.setattr(explain, "_compute", counted)
    return calls


def _explain(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_the_same_question_is_computed_once(model: Path, computed: list[Any]) -> None:
    first = _explain(str(model))
    assert "extra node: neg" in first
    assert _explain(str(model)) == first
    assert len(computed) == 1
    rows = json.loads(_explain(str(model), "--json"))
    (row,) = json.loads(_explain(str(model), "--pass", "match_swiglu", "--json"))
    assert row in rows
    assert len(computed) == 1


def test_one_transform_is_explained_as_among_all() -> None:
    """What `--pass` takes from the explanation of all transforms is what it would compute."""
    program, steps = _model(), configure(resolve_config())
    for whole in explain_program(program, steps):
        if whole.status == "ran":
            assert explain_program(program, steps_through(whole.key, steps), whole.key) == [whole]


def test_a_disabled_transform_is_computed(model: Path, computed: list[Any]) -> None:
    _explain(str(model))
    _explain(str(model), "--pass", "insert_kv_cache")
    assert len(computed) == 2


@pytest.mark.parametrize("option", ["--set=match_swiglu.enabled=false", "--pass=match_rms_norm"])
def test_another_question_is_computed(model: Path, computed: list[Any], option: str) -> None:
    _explain(str(model), option)
    _explain(str(model))
    assert len(computed) == 2


def test_changed_files_are_computed(model: Path, computed: list[Any], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("transforms:\n  match_swiglu:\n    enabled: true\n")
    first = _explain(str(model), "--config", str(config))
    config.write_text("transforms:\n  match_swiglu:\n    enabled: false\n")
    assert _explain(str(model), "--config", str(config)) != first
    model.write_text(dump(_model(2.0)))
    _explain(str(model), "--config", str(config))
    assert len(computed) == 3


def test_a_model_that_changes_meanwhile_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = explain._compute

    def edited(*asked: Any) -> Any:
        found = compute(*asked)
        model.write_text(dump(_model(2.0)))
        return found

    monkeypatch.setattr(explain, "_compute", edited)
    _explain(str(model))
    monkeypatch.setattr(explain, "_compute", compute)
    assert not list((model.parent / "cache").rglob("explain-*"))


def test_code_of_others_is_not_kept(model: Path, computed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _explain(str(model), "--trust-remote-code")
    _explain("models:convolutions")
    monkeypatch.setattr(explain, "entry_points", lambda group: [object()])
    _explain(str(model))
    assert len(computed) == 3
    assert not list((model.parent / "cache").rglob("explain-*"))


def test_a_model_without_a_stamp_is_computed(model: Path, computed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read is reported by the capture, and not as a defect of Inlay."""

    def refuse(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(package_cache, "stamp", lambda file: refuse(file) if file == model else stamp(file))
    for _ in range(2):
        assert "extra node: neg" in _explain(str(model))
    assert len(computed) == 2, "what cannot be read before is not kept"


def test_mistakes_are_reported_every_time(model: Path) -> None:
    for _ in range(2):
        _explain(str(model), "--pass", "match_swigl", code=2)
        _explain(str(model.parent / "missing"), code=3)
