"""Time per node must not grow with the size of the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from inlay.program.fold import fold
from inlay.program.text.diff import diff
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.printer import dump
from tests.measurement import calls, seconds
from tests.synthetic_programs import irregular, layered

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

SIZES = (1_000, 10_000, 100_000)
COUNTED = (1_000, 30_000)


def _altered(program: Program) -> Program:
    copied = program.copy()
    for count, node in enumerate(copied.graph.nodes):
        if count % 7 == 0 and node.target in (torch.ops.aten.silu.default, torch.ops.aten.tanh.default):
            node.target = torch.ops.aten.gelu.default
    return copied


def _compare(program: Program) -> None:
    diff(program, _altered(program))


MAKERS = pytest.mark.parametrize("make", [lambda size: layered(size // 12), irregular], ids=["layers", "irregular"])
WORK = pytest.mark.parametrize(
    "work",
    [fold, dump, dump_folded, pytest.param(_compare, marks=pytest.mark.nightly)],
    ids=["fold", "dump", "folded", "diff"],
)


@MAKERS
@WORK
def test_calls_per_node(make: Callable[[int], Program], work: Callable[[Program], object]) -> None:
    """Counted, not timed: what Python does for a node, whatever else the machine is doing."""
    figures = [calls(work, program) / len(program) for program in map(make, COUNTED)]
    print([f"{figure:.1f} calls" for figure in figures])
    assert max(figures) <= 1.5 * figures[0]


@pytest.mark.nightly
@MAKERS
@WORK
def test_time_per_node(make: Callable[[int], Program], work: Callable[[Program], object]) -> None:
    """The same by the clock, on a machine that does nothing else."""
    figures = []
    for program in map(make, SIZES):
        best = min(seconds(work, program) for _ in range(3))
        figures.append(best / len(program) * 1e6)
    print([f"{figure:.1f} µs" for figure in figures])
    assert figures[-1] <= 1.5 * figures[0]
