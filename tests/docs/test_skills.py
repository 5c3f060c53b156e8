"""The skills, followed to the letter: every command of them is run, and what comes out is a working fusion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKILLS = ROOT / "skills"
SECTIONS = ("When to use", "Inputs and outputs", "Workflow", "Guardrails")


def _commands(skill: str) -> list[str]:
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", (SKILLS / skill / "SKILL.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.strip().splitlines()]


def _follow(skill: str, folder: Path, **variables: str) -> str:
    """Run the commands one after the other in a folder that holds the example; what they printed."""
    shutil.copy(ROOT / "examples" / "mixer.py", folder)
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "COLUMNS": "120", **variables}
    printed = ""
    for command in _commands(skill):
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail; {command}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        printed += done.stdout
    return printed


@pytest.mark.fast
@pytest.mark.parametrize("skill", ["graph-dump", "add-fusion"])
def test_front_matter_and_sections(skill: str) -> None:
    text = (SKILLS / skill / "SKILL.md").read_text()
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert fields["name"] == skill
    assert len(fields["description"]) > 80
    assert tuple(re.findall(r"^## (.*)$", body, re.MULTILINE)) == SECTIONS
    assert len(_commands(skill)) >= 4


@pytest.mark.nightly
def test_graph_dump(tmp_path: Path) -> None:
    printed = _follow("graph-dump", tmp_path, MODEL="mixer:mixer", PASS="fuse_gemms")
    assert (tmp_path / "dumps" / "index.json").exists()
    assert "× 3" in printed, "three layers, folded"
    assert '"transform": "fuse_gemms"' in printed


@pytest.mark.nightly
def test_add_fusion(tmp_path: Path) -> None:
    name = "conv1d_tanh_sigmoid_mul"
    printed = _follow("add-fusion", tmp_path, MODEL="mixer:mixer", NAME=name, KERNEL="--kernel triton")
    assert f"inlay.{name}(" in printed
    review = (tmp_path / "fusion" / "review" / "review.md").read_text()
    assert "- [ ]" not in review
    assert f"Candidate: fuse_{name}" in review
    assert "mixer:mixer: 3 sites" in review
    assert "Path: triton_fallback_path" in review
