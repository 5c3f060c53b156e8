"""A build that asks for no explanation executes none of the code that explains, and warns of nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.models import llama_folder

if TYPE_CHECKING:
    from pathlib import Path

EXPLAINING = ("inlay.insight", "inlay.rewrite.near_misses", "inlay.rewrite.partial_match", "inlay.rewrite.differences")
CODE = """
import json, sys
from inlay.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""


def _loaded(*arguments: str) -> tuple[set[str], str]:
    """What of the explaining code a command loads in a process of its own, and what it says on standard error."""
    environment = os.environ | {"PYTHONWARNINGS": "default"}
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    return {name for name in modules if name.startswith(EXPLAINING)}, done.stderr


@pytest.mark.nightly
def test_a_whole_build(tmp_path: Path) -> None:
    """Code that is not even loaded is not called."""
    folder = str(llama_folder(tmp_path / "model"))
    loaded, said = _loaded("build", folder, "-o", str(tmp_path / "package"), "--max-length", "32", "--buckets", "none")
    assert (tmp_path / "package" / "current" / "manifest.json").exists()
    assert loaded == set()
    assert "Warning" not in said, said
    asked, _ = _loaded("explain", folder, "--pass", "match_swiglu")
    assert asked >= set(EXPLAINING), "the same, asked to explain"
