"""The commands as a person runs them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from inlay import machine
from inlay.cli.main import app
from tests.models import config_folder, tiny_gguf

if TYPE_CHECKING:
    from typer.testing import Result

TESTS = Path(__file__).parents[1]


def _inlay(*arguments: str, check: int | None = 0, **env: str) -> Result:
    """A command in this process, which has imported torch already."""
    with contextlib.chdir(TESTS):
        run = CliRunner().invoke(app, arguments, env={"COLUMNS": "120", **env})
    assert check is None or run.exit_code == check, run.stderr
    assert "Traceback" not in run.stderr
    return run


def _inlay_afresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from inlay.cli.main import main; main()", *arguments]
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=300)


@pytest.mark.fast
def test_the_same_in_a_process_of_its_own() -> None:
    here, there = _inlay("show", "models:convolutions"), _inlay_afresh("show", "models:convolutions")
    assert (there.returncode, there.stdout) == (0, here.stdout)
    wrong = _inlay_afresh("show", "models:no_such_factory")
    assert wrong.returncode == _inlay("show", "models:no_such_factory", check=None).exit_code != 0
    assert "Traceback" not in wrong.stderr


@pytest.mark.fast
def test_help_is_quick_and_has_examples() -> None:
    for verb in ("show", "diff", "doctor", "explain", "candidates", "report"):
        assert "Example" in _inlay(verb, "--help").stdout
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from inlay.cli.main import app"], capture_output=True, text=True
    )
    assert " torch\n" not in run.stderr, "the command line must not import torch before it is needed"


@pytest.mark.fast
def test_options_are_readable_in_80_columns() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for verb in commands:
        text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
        assert max(map(len, text.splitlines())) <= 80
        assert re.search(r"--[a-z-]+…", text) is None, text


@pytest.mark.fast
def test_several_sequences_at_a_time_by_default() -> None:
    for verb, text in (("build", "8 by default"), ("report", "[default: 8]")):
        assert text in _inlay(verb, "--help").stdout


@pytest.mark.fast
def test_doctor() -> None:
    checks = json.loads(_inlay("doctor", "--json").stdout)
    assert {check["name"] for check in checks} >= {"python", "torch", "compiler", "cpu", "threads"}
    assert all(check["remedy"] for check in checks if check["status"] != "ok")


@pytest.mark.fast
def test_doctor_names_the_tested_versions_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for version in ("5.19.4", "5.20.0", "5.23.1", "5.24.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        found[version] = machine._transformers()
    assert [each.status for each in found.values()] == ["warn", "ok", "ok", "warn"]
    assert "tested with transformers 5.20 to 5.23" in found["5.24.0"].remedy


def test_doctor_says_what_to_do() -> None:
    run = _inlay("doctor", check=1, CXX="no-such-compiler")
    assert "no-such-compiler not found" in run.stdout
    assert "apt-get install g++" in run.stdout


@pytest.mark.fast
def test_show_and_diff_on_a_module_that_is_no_llm(tmp_path: Path) -> None:
    shown = _inlay("show", "models:convolutions").stdout
    assert "× 5" in shown
    assert "audio: f32[batch, 1, frames]" in shown
    assert "def block(w" in shown
    described = json.loads(_inlay("show", "models:convolutions", "--json").stdout)
    assert described["folds"][0]["times"] == 5
    assert described["operators"]["aten.conv1d.default"] == 12
    dumped = tmp_path / "conv.py"
    _inlay("show", "models:convolutions", "--full", "-o", str(dumped))
    assert "The programs are identical" in _inlay("diff", "models:convolutions", str(dumped)).stdout
    changed = dumped.read_text().replace("aten.tanh.default", "aten.sigmoid.default", 2)
    dumped.write_text(changed)
    assert "tanh" in _inlay("diff", "models:convolutions", str(dumped), check=1).stdout


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["show", "no/such/file.gguf"], 3, "There is no file or folder"),
        (["show", "org/model-that-is-not-here"], 3, "downloading it as a Hugging Face id failed"),
        (["show", "models:raises"], 3, "the factory is broken"),
        (["show", "models:data_dependent"], 4, "cannot be captured"),
        (["show", "--no-such-option"], 2, "No such option"),
        (["show", "models:convolutions", "--dtype", "bfloat16"], 2, "builds the module itself"),
        (["show", "x", "--pass", "clean_noops", "-o", "x.py"], 2, "--output and --pass cannot be combined"),
        (["show", "x", "--set", "fuse_gemms.enabled=false"], 2, "--config and --set need --pass"),
        (["shw"], 2, "No such command"),
        (["diff", "models:convolutions", "architectures.py"], 5, "not an Inlay dump"),
    ],
)
def test_errors_are_sentences(arguments: list[str], code: int, sentence: str) -> None:
    run = _inlay(*arguments, check=code)
    assert sentence in " ".join(run.stderr.split())


@pytest.mark.fast
def test_damaged_gguf_on_the_command_line(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:5000])
    run = _inlay("show", str(path), check=3)
    assert "is damaged" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


@pytest.mark.fast
def test_output_is_not_written_over_other_files(tmp_path: Path) -> None:
    precious = tmp_path / "precious.py"
    precious.write_text("x = 1")
    _inlay("show", "models:convolutions", "-o", str(precious), check=5)
    assert precious.read_text() == "x = 1"


def test_show_a_folder(tmp_path: Path) -> None:
    shown = _inlay("show", str(config_folder(tmp_path / "tiny"))).stdout
    assert "layers 2" in shown
    assert "no weights" in shown


@pytest.mark.fast
def test_explain_says_what_is_different_and_where(tmp_path: Path) -> None:
    folder = str(config_folder(tmp_path / "llama", num_hidden_layers=3))
    shown = _inlay("explain", folder).stdout
    assert "match_rms_norm  matched 7" in shown
    assert "2 of 3 matched; layer 0: 1 of 2 nodes: missing node: the norm does not follow an addition" in shown
    (entry,) = json.loads(_inlay("explain", folder, "--pass", "fuse_add_rms_norm", "--json").stdout)
    assert (entry["matches"], [each["layers"] for each in entry["findings"]]) == (6, [[0]])
    assert "Did you mean match_rope" in _inlay("explain", folder, "--pass", "match_rop", check=2).stderr


def test_show_a_pass_fits_a_screen(tmp_path: Path) -> None:
    folder = str(config_folder(tmp_path / "tiny", num_hidden_layers=4))
    run = _inlay("show", folder, "--pass", "fuse_add_rms_norm")
    lines = run.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert "inlay.add_rms_norm(" in run.stdout
    assert "fuse_add_rms_norm: [SUMMARY] matches=8 " in run.stderr
    full = _inlay("show", folder, "--pass", "fuse_add_rms_norm", "--full").stdout
    assert "# ---- before fuse_add_rms_norm" in full
    assert "# ---- after fuse_add_rms_norm" in full


@pytest.mark.fast
def test_candidates() -> None:
    found = json.loads(_inlay("candidates", "models:convolutions", "--json").stdout)
    names = {each["name"]: each for each in found["candidates"]}
    assert names["tanh_add"]["occurrences"] == 5
    assert names["tanh_add"]["recommendation"] == "use_existing_kernel"
    assert found["total"]["launches"] >= 5
    assert "requires --scaffold" in _inlay("candidates", "models:convolutions", "--kernel", "triton", check=2).stderr
    assert "requires --kernel" in _inlay("candidates", "models:convolutions", "--force-kernel", check=2).stderr
