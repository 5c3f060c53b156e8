"""`inlay watch -- PROGRAM`, and `explain`, `lock` and `check` of what was watched."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from inlay import watch_startup
from inlay.cli.main import app
from inlay.errors import ExitCode

PROGRAM = """
import os
import sys
import torch
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

def search(x, w):
    return x.exp() * 2 + w

def model(x, w):
    return (x.exp() * 2 + w).sin().exp() * float(sys.argv[1]) + w

def drop_sines(graph):
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        if float(sys.argv[1]) == 2:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

with FakeTensorMode():
    inputs = [torch.empty(3), torch.empty(3)]
    GraphTransformObserver(fwd_only(model, inputs), "some").apply_graph_pass(drop_sines)
    passes = PatternMatcherPass(pass_name="doubles")
    register_replacement(search, lambda x, w: x - w, inputs, fwd_only, [passes])
    print("matches", passes.apply(fwd_only(model, inputs)), "hidden", os.environ.get("HIDDEN_RAN"))
    torch.fx.replace_pattern(fwd_only(model, inputs), lambda x: x.neg(), lambda x: x)
sys.exit(int(sys.argv[2]))
"""


def _inlay(folder: Path, *arguments: str, code: int = 0) -> str:
    words = [sys.executable, "-m", "inlay", *arguments]
    run = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN_RAN'] = 'yes'")
    return tmp_path


@pytest.mark.nightly
def test_an_upgrade_that_breaks_a_pattern(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{program}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ["watch", "-o", "watched", "--", sys.executable, "program.py"]
    first = _inlay(program, *words, "2", "0")
    assert "matches 2" in first
    assert "hidden yes" in first
    assert "removed aten.sin.default × 1" in first
    _inlay(program, "lock", "watched", "-o", "passes.lock")
    assert "1 models match as locked" in _inlay(program, "check", "--lock", "passes.lock")
    assert "constant differs: other of mul_1 is 3.0; expected 2" in _inlay(program, *words, "3", "7", code=7)
    checked = json.loads(_inlay(program, "check", "--lock", "passes.lock", "--json", code=1))
    message = next(each["message"] for each in checked["differences"] if each["transform"] == "doubles")
    assert message.startswith("doubles matched 1 sites, the lock has 2: 1 of 2 matched; add_1: 3 of 3 nodes:")
    assert "other of mul_1 is 3.0; expected 2" in message
    left = "left: sin = aten.sin.default(add)"
    assert [each["message"] for each in checked["differences"] if "drop_sines" in each["transform"]] == [
        "__main__.drop_sines matched 0 sites, the lock has 2.",
        f"__main__.drop_sines: removed aten.sin.default matched 0 sites, the lock has 1: {left}.",
    ]
    (row,) = json.loads(_inlay(program, "explain", "watched", "--pass", "doubles", "--json"))
    assert (row["matches"], row["findings"][0]["node"]) == (1, "mul_1")


@pytest.mark.nightly
def test_the_workflow_and_the_hook(program: Path) -> None:
    """What docs/lock.md gives away for watched passes runs as it stands, and fails when the lock does not hold."""
    root = Path(__file__).parents[3]
    steps = yaml.safe_load((root / "docs" / "inlay-check.yml").read_text())["jobs"]["passes"]["steps"]
    workflow = " && ".join(step["run"] for step in steps if step.get("run", "").startswith("inlay "))
    hooks = yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text())
    (hook,) = [each for each in hooks if each["id"] == "inlay-check-watched"]
    assert re.search(hook["files"], "passes.lock")
    assert hook["pass_filenames"] is False
    source = (program / "program.py").read_text().replace("sys.argv[2]", "0")
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(words: list[str], factor: int) -> subprocess.CompletedProcess[str]:
        (program / "program.py").write_text(source.replace("sys.argv[1]", str(factor)))
        environment = {**os.environ, "PATH": scripts}
        return subprocess.run(words, cwd=program, env=environment, capture_output=True, text=True, timeout=300)

    lock = ["bash", "-c", "inlay watch -o watched -- python program.py && inlay lock watched -o passes.lock"]
    assert run(lock, 2).returncode == 0
    for words in ([*shlex.split(hook["entry"]), *hook["args"]], ["bash", "-c", workflow]):
        good = run(words, 2)
        assert good.returncode == 0, good.stdout + good.stderr
        assert "1 models match as locked." in good.stdout
        bad = run(words, 3)
        assert bad.returncode == ExitCode.FAILED
        assert "differs: watched: doubles matched 1 sites, the lock has 2: " in bad.stdout


@pytest.mark.fast
def test_nothing_is_installed_without_the_variable() -> None:
    code = """
import sys
from inlay.watch_startup import install
install()
print('torch' in sys.modules, len(sys.meta_path))
"""
    counts = []
    for value in ("", "folder"):
        environment = {**os.environ, watch_startup.VARIABLE: value}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        counts.append(run.stdout.split())
    assert [each[0] for each in counts] == ["False", "False"]
    assert int(counts[1][1]) == int(counts[0][1]) + 1


@pytest.mark.fast
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    refused = CliRunner().invoke(app, ["watch", "-o", "mine", "--", "true"])
    assert refused.exit_code == ExitCode.USAGE
    assert "has no records of a watch" in refused.output
    missing = CliRunner().invoke(app, ["watch", "--", "no-such-program-here"])
    assert missing.exit_code == ExitCode.USAGE
    nothing = CliRunner().invoke(app, ["watch", "--", "true"])
    assert nothing.exit_code == 0
    assert "No graph pass ran" in nothing.output
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"1{watch_startup.SUFFIX}").write_text("{}\n")
    broken = CliRunner().invoke(app, ["explain", "broken"])
    assert broken.exit_code == ExitCode.USAGE
    assert "is not a record" in broken.output
