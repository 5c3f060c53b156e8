"""The examples do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inlay.cli.main import app

EXAMPLES = Path(__file__).parents[1] / "examples"
FIRES = (
    *("clean_noops", "match_layer_norm", "match_rms_norm", "match_softmax_attention", "match_attention"),
    *("match_rope_interleaved", "match_rope", "match_swiglu", "match_geglu", "fuse_add_rms_norm"),
)
"""What the decoder of the example was written to show."""
PASSES = [each["name"] for each in json.loads(CliRunner().invoke(app, ["passes", "--json"]).stdout)]


@pytest.fixture(scope="module")
def example() -> Any:
    """The example, which captures each model only once here."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import run_pass_before_after as module
    finally:
        sys.path.remove(str(EXAMPLES))
    whole, make = module.capture, module.decoder
    module.decoder = lambda: "the decoder"
    module.capture = cache(lambda model: whole(make() if model == "the decoder" else model))
    return module


def test_every_pass_of_the_list_is_meant() -> None:
    assert set(FIRES) <= set(PASSES)


@pytest.mark.fast
@pytest.mark.parametrize("name", PASSES)
def test_before_and_after(example: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", name]) == 0
    text = capsys.readouterr().out
    assert f"{name}: [SUMMARY] matches=" in text
    assert len(text.splitlines()) <= 61, "a screen, and the summary"
    if name in FIRES:
        assert "[SUMMARY] matches=0" not in text
        assert any(line.startswith(("~", "-", "+")) for line in text.splitlines())
    elif "[SUMMARY] matches=0" in text:
        assert f"{name} changed nothing: " in text


@pytest.mark.fast
def test_full(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swiglu", "--full"]) == 0
    before, after = capsys.readouterr().out.split("# ---- after match_swiglu")
    assert before.count("aten.silu.default(") == 2
    assert after.count("inlay.swiglu.default(") == 2
    assert "aten.silu.default(" not in after


@pytest.mark.fast
def test_nothing_to_do_is_said_kindly(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swiglu", "--model", "models:convolutions"]) == 0
    text = capsys.readouterr().out
    assert "match_swiglu changed nothing: nothing in this program starts like it." in text
    assert "[SUMMARY] matches=0" in text


@pytest.mark.fast
def test_mistakes_are_sentences(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--pass", "match_swigl"]) == 2
    assert "Did you mean match_swiglu?" in capsys.readouterr().err
    assert example.main(["--pass", "match_swiglu", "--model", "no/such folder"]) == 3
    assert "There is no file or folder" in capsys.readouterr().err


def test_as_a_person_runs_it() -> None:
    command = [sys.executable, str(EXAMPLES / "run_pass_before_after.py"), "--pass", "fuse_add_rms_norm"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300, check=True)
    assert run.stdout.splitlines()[-1].startswith("fuse_add_rms_norm: [SUMMARY] matches=4 ")
    assert "inlay.add_rms_norm(" in run.stdout
