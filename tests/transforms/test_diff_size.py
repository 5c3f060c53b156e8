"""What one transform changes fits a screen, and no kind of change is hidden, for several architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from inlay.frontend import capture
from tests.architectures import without_weights
from tests.show_pass_checks import check_each_pass

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.fast
def test_llama(tmp_path: Path) -> None:
    texts = check_each_pass(capture(without_weights(tmp_path, "llama", 5)))
    fused = texts["fuse_add_rms_norm"]
    assert sum("× 4" in line for line in fused) >= 2, "the layers that changed alike, once"
    assert any("block_b" in line and "× 1" in line for line in fused), "the first layer, which has no sum before it"
    assert any(line.startswith("+") and "inlay.add_rms_norm(" in line for line in fused)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt2", 3),
        *(pytest.param(name, count, marks=pytest.mark.nightly) for name, count in (("gemma2", 6), ("mixtral", 3))),
    ],
)
def test_architecture(name: str, layers: int, tmp_path: Path) -> None:
    check_each_pass(capture(without_weights(tmp_path, name, layers)))
