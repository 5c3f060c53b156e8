"""Find the values that a program chooses by its length, such as rotary factors for short and for long sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from inlay.analysis.masks.derivation import IndexAnalysis
from inlay.analysis.masks.index_function import UnknownIndexFunctionError
from inlay.analysis.masks.inequalities import (
    AffineExpr,
    Formula,
    UndecidedError,
    is_satisfied,
    is_unsatisfiable,
    iter_inequalities,
    negate,
)
from inlay.program.graphs import all_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.program.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class LengthChoice:
    """A call of `where` whose condition is one number that depends on sizes alone."""

    node: fx.Node
    condition: fx.Node
    always: bool | None
    """Whether the condition holds at every size, or at none; None if it differs."""
    limit: int = 0
    """Up to this length the condition does not change; 0 if that is unknown."""

    @property
    def reason(self) -> str:
        """Why it cannot be decided, and what would decide it."""
        until = f": set max_length to {self.limit} or less" if self.limit else ""
        return f"{self.condition} holds at some lengths and not at others{until}"


def find_length_choices(program: Program) -> Iterator[LengthChoice]:
    """Yield the choices of a program, with what decides them at the sizes that it accepts."""
    known = list(_bounds(program))
    length = next((raw for raw, each in program.symbols.items() if each.name == "length"), "")
    for _, graph in all_graphs(program.graph):
        analysis = IndexAnalysis(graph, program.symbols)
        for node in graph.nodes:
            condition = node.args[0] if node.target is aten.where.self else None
            if not isinstance(condition, fx.Node) or condition.meta["val"].dim():
                continue
            try:
                holds = analysis.derive(condition, node).nonzero
                always = _always(holds, known)
            except (UnknownIndexFunctionError, UndecidedError):
                continue  # values decide
            yield LengthChoice(node, condition, always, 0 if always is not None else _limit(holds, length))


def _bounds(program: Program) -> Iterator[AffineExpr]:
    """Yield the inequalities that the sizes of a program satisfy. Every size is at least 1."""
    for raw, symbol in program.symbols.items():
        size = AffineExpr.from_variable(raw)
        yield size - 1
        if symbol.high is not None:
            yield -size + symbol.high


def _always(holds: Formula, known: Sequence[AffineExpr]) -> bool | None:
    if is_unsatisfiable(known, negate(holds)):
        return True
    return False if is_unsatisfiable(known, holds) else None


def _limit(holds: Formula, length: str) -> int:
    """Return the largest length up to which a formula of the length alone does not change, or 0."""
    edges: set[int] = set()
    for each in iter_inequalities(holds):
        if [variable for variable, _ in each.terms] != [length]:
            return 0
        edge = -each.constant // each.terms[0][1]
        edges.update(edge + step for step in (-1, 0, 1, 2))
    first = is_satisfied(holds, {length: 1})
    return min((edge for edge in edges if edge > 1 and is_satisfied(holds, {length: edge}) != first), default=1) - 1
