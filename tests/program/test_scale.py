"""Time per node must not grow with the size of the program."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.program.diff import diff
from inlay.program.fold import fold
from inlay.program.folded import dump_folded
from inlay.program.text import dump
from synthetic import irregular, layered

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

SIZES = (1_000, 10_000, 100_000)


def _altered(program: Program) -> Program:
    copied = program.copy()
    for count, node in enumerate(copied.graph.nodes):
        if count % 7 == 0 and node.target in (torch.ops.aten.silu.default, torch.ops.aten.tanh.default):
            node.target = torch.ops.aten.gelu.default
    return copied


def _compare(program: Program) -> None:
    diff(program, _altered(program))


@pytest.mark.parametrize("make", [lambda size: layered(size // 12), irregular], ids=["layers", "irregular"])
@pytest.mark.parametrize("work", [fold, dump, dump_folded, _compare], ids=["fold", "dump", "folded", "diff"])
def test_time_per_node(make: Callable[[int], Program], work: Callable[[Program], object]) -> None:
    figures = []
    for size in SIZES:
        program = make(size)
        best = min(_seconds(work, program) for _ in range(3))
        figures.append(best / len(program) * 1e6)
    print([f"{figure:.1f} µs" for figure in figures])
    # The bound is 1.5; a loaded machine gets some room on top of it.
    assert figures[-1] <= 2 * min(figures[:2])


def _seconds(work: Callable[[Program], object], program: Program) -> float:
    start = time.perf_counter()
    work(program)
    return time.perf_counter() - start
