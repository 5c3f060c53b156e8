"""Overlays for models: the right one is picked, what it states holds, and what does not hold is an error."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.config import resolve_config
from inlay.errors import ContractError, ExitCode
from inlay.frontend import capture, identify
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.transforms import configure, run
from tests.architectures import ARCHITECTURES, without_weights
from tests.models import config_folder, tiny_gguf

OVERLAYS: dict[str, Any] = {
    each.name: yaml.safe_load(each.read_text()) for each in resources.files("inlay.config").joinpath("models").iterdir()
}
SHIPPED = [(file, name) for file, overlay in OVERLAYS.items() for name in overlay["match"]["architecture"]]


@pytest.mark.fast
def test_each_architecture_has_one_overlay_and_is_tested() -> None:
    names = [name for _, name in SHIPPED]
    assert len(names) == len(set(names))
    assert set(names) <= {each.model_type for each in ARCHITECTURES}
    assert all(overlay["transforms"] for overlay in OVERLAYS.values())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, id=name, marks=() if name in ("qwen3", "gemma3_text") else pytest.mark.nightly)
        for file, name in SHIPPED
    ],
)
def test_what_an_overlay_states_holds(file: str, name: str, tmp_path: Path) -> None:
    """In bfloat16, as checkpoints come, at another depth; tests/frontend/test_architectures.py has float32."""
    program = capture(without_weights(tmp_path / "model", name, 3), HFOptions(torch.bfloat16))
    resolved = resolve_config(architecture=program.facts.architecture, model=program.name)
    stated = OVERLAYS[file]["transforms"]
    origins = {entry.key: entry.options["expect"].origin for entry in resolved.entries if entry.key in stated}
    assert origins == dict.fromkeys(stated, f"models/{file}")
    _, records = run(program, configure(resolved))
    assert {record.key for record in records if record.status == "ran"} >= set(stated)


@pytest.mark.fast
def test_a_count_that_is_violated_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    program = capture(str(config_folder(tmp_path / "model"))).copy()
    squares = [node for node in program.graph.nodes if node.target is torch.ops.aten.pow.Tensor_Scalar]
    squares[2].args = (squares[2].args[0], 4)
    run(program, configure(resolve_config()))  # one missed norm of five is no error where nobody stated a count
    with pytest.raises(ContractError) as error:
        run(program, configure(resolve_config(architecture="llama")))
    text = str(error.value)
    assert "match_rms_norm matched 4 sites, expected 5 (2 * layers + 1)." in text
    assert "constant differs: exponent of pow_3 is 4; expected 2" in text
    assert "set match_rms_norm.expect" in text
    assert "\n" not in text


def _inlay(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.nightly
def test_show_picks_the_overlay_of_the_architecture(tmp_path: Path) -> None:
    folder = str(config_folder(tmp_path / "model"))
    arguments = ["show", folder, "--pass", "fuse_add_rms_norm", "--set", "match_rms_norm.enabled=false"]
    assert _inlay(*arguments).exit_code == ExitCode.CONTRACT
    assert _inlay(*arguments, "--set", "fuse_add_rms_norm.expect=any").exit_code == ExitCode.OK


@pytest.mark.fast
@pytest.mark.parametrize("make", [config_folder, tiny_gguf], ids=["folder", "gguf"])
def test_config_picks_the_overlay_of_a_file(make: Any, tmp_path: Path) -> None:
    rows = json.loads(_inlay("config", str(make(tmp_path / "model.gguf")), "--json").stdout)
    origins = {(row["transform"], row["option"]): row["from"] for row in rows}
    assert origins["match_attention", "expect"] == "models/llama.yaml"
    assert origins["match_attention", "enabled"] == "built in"


@pytest.mark.fast
@pytest.mark.parametrize("make", [config_folder, tiny_gguf, None], ids=["folder", "gguf", "factory"])
def test_a_model_is_identified_as_its_program_is(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(make(tmp_path / "model.gguf")) if make else "models:convolutions"
    program = capture(text)

    def built(*_: Any) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr("inlay.frontend.huggingface.causal_lm._build_module", built)
    monkeypatch.setattr("inlay.frontend.model_spec._open_factory", built)
    found = identify(text)
    assert (found.name, found.architecture) == (program.name, program.facts.architecture)


@pytest.mark.fast
def test_the_real_model(smollm2: Path) -> None:
    assert identify(str(smollm2)).architecture == "llama"


@pytest.mark.fast
def test_overlays_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may be a pattern; a file that matches nothing stays out."""
    (tmp_path / "models").mkdir()
    source = Path(str(resources.files("inlay.config")))
    (tmp_path / "default.yaml").write_text((source / "default.yaml").read_text())
    (tmp_path / "models" / "mine.yaml").write_text(
        "match: {model: ['org/mine*']}\ntransforms: {match_rope: {expect: 7}}"
    )
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    for model, expected in (("org/mine@0123", "models/mine.yaml"), ("org/other", "default.yaml")):
        entries = {entry.key: entry.options for entry in resolve_config(model=model).entries}
        assert entries["match_rope"]["expect"].origin == expected


@pytest.mark.fast
def test_overlays_are_in_the_wheel() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="pip install -e '.[dev]' brings hatchling")
    root = str(Path(__file__).parents[2])
    packed = {file.distribution_path for file in builder.WheelBuilder(root).recurse_included_files()}
    assert "inlay/config/default.yaml" in packed
    assert {f"inlay/config/models/{file}" for file in OVERLAYS} <= packed
