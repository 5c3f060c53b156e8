"""What a program is measured with: sizes, random inputs, states at their beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.insight.running import random_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.program import Program


def starting_sizes(program: Program, length: int) -> dict[str, int]:
    """A number for every size that is not fixed: 1 for the batch, `length` for others, or as near as its range allows.

    >>> from types import SimpleNamespace
    >>> from inlay.program.program import Symbol
    >>> symbols = {"s0": Symbol("batch", 1, None), "s1": Symbol("length", 1, 64)}
    >>> starting_sizes(SimpleNamespace(symbols=symbols), 128)
    {'batch': 1, 'length': 64}
    """
    return {
        each.name: max(each.low, min(1 if each.name == "batch" else length, each.high or length))
        for each in program.symbols.values()
    }


def starting_values(program: Program, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Random inputs by name; states begin as the module has them, or as zeros where they are the caller's."""
    given = random_inputs(program, sizes=sizes)
    for row in program.bindings.state:
        if row.name in given:
            held = program.tensors.get(row.name)
            given[row.name] = given[row.name].zero_() if held is None else held.read()
    return given
