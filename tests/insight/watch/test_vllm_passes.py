"""vLLM's own passes: node and reason of their misses, in this process and through the commands."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.insight.watch import vllm_passes

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not vllm_passes.is_installed(), reason=f"needs vLLM: {vllm_passes.INSTALL}"),
]


def test_changes_that_make_passes_miss() -> None:
    for name, variant in vllm_passes.BASE.items():
        assert vllm_passes.effect(vllm_passes.watched(variant)) > 0, name
    rows = list(vllm_passes.verdicts())
    wrong = [f"{variant.what}: {text}" for variant, _, _, text, is_right in rows if not is_right]
    assert not wrong, "\n".join(wrong)
    assert sum(text != "nothing" for *_, text, _ in rows) >= 10


def _run(folder: Path, *words: str, code: int = 0) -> str:
    run = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=400)
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout


def test_the_commands(tmp_path: Path) -> None:
    inlay, program = ("-m", "inlay"), (sys.executable, "-m", "tests.insight.watch.vllm_passes", "--run")
    watch = (*inlay, "watch", "-o", "watched", "--", *program)
    first = _run(tmp_path, *watch, *(each.what for each in vllm_passes.BASE.values()))
    assert "removed aten.slice.Tensor × 3" in first
    _run(tmp_path, *inlay, "lock", "watched", "-o", "passes.lock")
    assert "1 models match as locked" in _run(tmp_path, *inlay, "check", "--lock", "passes.lock")
    changed = ("the epsilon is 1e-4", "q is scaled after its norm", "a gap between q and k", "another operator")
    _run(tmp_path, *watch, *changed)
    checked = " ".join(_run(tmp_path, *inlay, "check", "--lock", "passes.lock", code=1).split())
    for text in ("epsilon of rms_norm is 0.0001", "mul (aten.mul.Tensor) stands in between"):
        assert text in checked
    assert "aten.slice.Tensor(arg0_1, 1, 320, 384)" in checked
    assert "auto_functionalized(vllm_passes.fused_add_rms_norm.default)" in checked
    explained = _run(tmp_path, *inlay, "explain", "watched", "--pass", vllm_passes.QK_NORM_ROPE)
    assert "mul (aten.mul.Tensor) stands in between" in " ".join(explained.split())
