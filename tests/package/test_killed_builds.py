"""Builds killed with SIGKILL: afterwards there is no package or a whole one, and what was there before is not lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inlay.package.refit import refit
from tests.models import random_model
from tests.small_packages import FIELDS

CHANGES = ["mkdir", "rename", "rmdir", "symlink", "unlink"]
"""What changes folders: between two of these calls, nothing changes that others see."""


@pytest.mark.parametrize(
    ("tries", "calls"),
    [(4, CHANGES), pytest.param(100, [*CHANGES, "fsync"], marks=pytest.mark.nightly)],
    ids=["ci", "all"],
)
def test_killed_builds(package: Path, model_folder: Path, tmp_path: Path, tries: int, calls: list[str]) -> None:
    """Builds killed at random moments, and one before each call that changes a folder; nightly also before each sync.

    Killing shows that the order of the calls is right. That the disk keeps to that order when the power fails is what
    the syncs are for, and no test here.
    """
    random_model(FIELDS, seed=5).save_pretrained(tmp_path / "model")
    refit(package, str(tmp_path / "model"), output=tmp_path / "other")
    (tmp_path / "tries").mkdir()
    script = Path(__file__).with_name("killed_builds.py")
    paths = [str(script.parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, script, model_folder, package, tmp_path / "other", tmp_path / "tries", str(tries), *calls],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    killed = {name: count for name, count in found["at random"].items() if ": killed" in name}
    # Where a build is when it is killed depends on the machine; what it may leave behind is checked at each try.
    assert 0 < sum(killed.values()) <= tries
    for before, number in found["places"].items():
        assert number > 10, f"over {before}, a build makes {number} calls"
    assert {"another version: killed, old", "another version: killed, new"} <= set(found["before calls"])
    assert found["before calls"]["swept by the next build"] > 5
