"""pytorch#197358: operators that write to views of a split are replayed as slices, and a pattern stops matching.

The graph is written in both forms, because one release of torch makes only one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from inlay.insight.watch import PassRecord, folder, watch_patterns
from inlay.watch_startup import VARIABLE
from tests.insight.watch.slices_for_splits import LAYERS, count_matches

if TYPE_CHECKING:
    from pathlib import Path

REASON = "19 of 23 nodes: missing node: aten.split_with_sizes.default expected, slice_1 (aten.slice.Tensor) found"


def _record(form: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> PassRecord:
    with watch_patterns() as records:
        count_matches(form)
    monkeypatch.setenv(VARIABLE, str(path))
    for record in records:
        folder._write(record)
    return records[0]


@pytest.mark.fast
def test_slices_instead_of_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert _record("split", old, monkeypatch).matches == LAYERS
    record = _record("slices", new, monkeypatch)
    (finding,) = record.near_misses
    assert (record.matches, finding.node, len(finding.roots)) == (0, "slice_1", LAYERS)
    before, after = (folder.sum_records(folder.read_records(str(each))) for each in (old, new))
    locked = folder.lock_passes("old", before)
    messages = [each.message for each in folder.compare_passes(locked, after)]
    for name, message in zip(("rotations", "rotations: search"), messages, strict=True):
        assert message.startswith(f"{name} matched 0 sites, the lock has 6: {REASON}")
    assert not list(folder.compare_passes(locked, before))


@pytest.mark.nightly
def test_the_commands(tmp_path: Path) -> None:
    def inlay(*arguments: str, code: int = 0) -> str:
        words, environment = [sys.executable, "-m", "inlay", *arguments], {**os.environ, "COLUMNS": "400"}
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout

    watch = ("watch", "-o", "watched", "--", sys.executable, "-m", "tests.insight.watch.slices_for_splits")
    assert "matches 6" in inlay(*watch, "split")
    inlay("lock", "watched", "-o", "passes.lock")
    assert "matches 0" in inlay(*watch, "slices")
    assert REASON in inlay("check", "--lock", "passes.lock", code=1)
