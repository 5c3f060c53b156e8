"""Recompute the types of a program for other size ranges, or for sizes that become constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from inlay.errors import ProgramError
from inlay.program.bindings import Bindings
from inlay.program.program import Symbol
from inlay.program.symbols import FakeValues

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.program import Program


def retype(program: Program, ranges: Mapping[str, tuple[int, int | None]]) -> Program:
    """Return `program` with new ranges for these raw symbols of the graph.

    A range of one number makes the size constant. The graph is modified in place, so pass a copy.
    """
    symbols: list[Symbol] = []
    fixed: dict[str, int] = {}
    for raw, symbol in program.symbols.items():
        low, high = ranges.get(raw, (symbol.low, symbol.high))
        if low == high:
            fixed[symbol.name] = low
        else:
            symbols.append(Symbol(symbol.name, low, high, _example(low, high, len(symbols))))
    fakes = FakeValues(symbols)
    graph = program.graph
    rows = {row.name: row for row in program.bindings.ins}
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            row = rows[node.name]
            shape = [fixed.get(str(size), size) for size in row.shape]
            inputs.append(fakes.tensor(getattr(torch, row.dtype), shape) if row.is_tensor else node.meta.get("val"))
    fakes.propagate(graph, inputs)
    _inline_numbers(program)
    made = replace(program, symbols=fakes.symbols)
    values = graph.output_node().args[0]
    return replace(made, bindings=_rows(made, [*inputs, *(each.meta["val"] for each in values)]))  # type: ignore[union-attr]


def _example(low: int, high: int | None, place: int) -> int:
    """Return an example size that differs from 0, 1 and the other symbols, if the range allows it."""
    wanted = (3, 7, 11, 13, 17)[place % 5]
    return max(low, min(wanted, high if high is not None else wanted))


def _inline_numbers(program: Program) -> None:
    """Remove calls that compute a size that is now constant."""
    graph = program.graph
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and type(value) is int:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _rows(program: Program, values: list[object]) -> Bindings:
    rows = []
    for row, value in zip(program.bindings, values, strict=True):
        if row.is_tensor and not isinstance(value, torch.Tensor):
            raise ProgramError(f"{row.name} must be a tensor, but its recomputed value is not.")
        rows.append(replace(row, shape=program.types.shape(value)) if isinstance(value, torch.Tensor) else row)
    return Bindings(tuple(rows))
