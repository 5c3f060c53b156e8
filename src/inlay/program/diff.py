"""The structural difference of two programs, folded, side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.align import align
from inlay.program.fold import Folds, Kind, fold_graph
from inlay.program.folded import lines_to_compare
from inlay.program.graphs import labels, operands
from inlay.program.pause import collector_paused
from inlay.program.weights import InMemory

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from torch import fx

    from inlay.program.program import Program


@dataclass(frozen=True)
class Row:
    """One line of a side-by-side difference: `same`, `changed`, `removed`, `added`, or `skipped` lines between."""

    kind: str
    left: str = ""
    right: str = ""


@dataclass(frozen=True)
class Diff:
    """How two programs differ. Names of nodes do not count; operators, constants, types and wiring do."""

    rows: tuple[Row, ...]
    operators: Mapping[str, int]
    """Operator → how many more the right program calls, over all layers; only what changed."""
    nodes: tuple[int, int]
    bindings: tuple[str, ...]
    """Sentences about inputs and outputs that differ."""
    same_wiring: bool

    @property
    def equal(self) -> bool:
        """Whether the programs compute the same thing by the same steps."""
        return self.same_wiring and not self.operators and not self.bindings and not any(self.hunks(0))

    def hunks(self, context: int = 3) -> Iterator[Row]:
        """The rows that differ, with this many equal rows around them."""
        wanted = [False] * len(self.rows)
        for index, row in enumerate(self.rows):
            if row.kind != "same":
                wanted[max(0, index - context) : index + context + 1] = [True] * (
                    min(len(self.rows), index + context + 1) - max(0, index - context)
                )
        skipped = 0
        for row, keep in zip(self.rows, wanted, strict=True):
            if keep:
                if skipped and context:
                    yield Row("skipped", f"… {skipped} equal lines")
                skipped = 0
                yield row
            else:
                skipped += 1


@collector_paused()
def diff(left: Program, right: Program) -> Diff:
    """Compare two programs."""
    right_side = _Side(right)
    shown = {node.name for kind in right_side.folds.kinds for node in kind.example.nodes}
    sides = [_Side(left, shown), right_side]
    taken = {node.name for node in sides[0].nodes}
    matched = _matched(*sides)
    names = {node: matched[node].name if node in matched else _fresh(node.name, taken) for node in sides[1].nodes}
    texts = [lines_to_compare(left, sides[0].folds, {}), lines_to_compare(right, sides[1].folds, names)]
    operators = Counter(right.op_counts())
    operators.subtract(left.op_counts())
    return Diff(
        rows=tuple(_rows(*texts)),
        operators={name: count for name, count in sorted(operators.items()) if count},
        nodes=(len(left), len(right)),
        bindings=tuple(_binding_changes(left, right)),
        same_wiring=_same_wiring(*sides),
    )


class _Side:
    """A program as the sequence of its nodes with each block once."""

    def __init__(self, program: Program, like: frozenset[str] | set[str] = frozenset()) -> None:
        every = list(program.graph.nodes)
        marks = labels(program.graph, program.types)
        self.all_nodes, self.all_labels = every, marks
        folds = fold_graph(program.graph, marks)
        # Of each kind, show the occurrence that the other side shows: a transform keeps the names of what it leaves.
        self.folds: Folds = replace(folds, kinds=tuple(replace(kind, shown=_shown(kind, like)) for kind in folds.kinds))
        shown = {node for kind in self.folds.kinds for node in kind.example.nodes}
        hidden = {node for kind in self.folds.kinds for each in kind.occurrences for node in each.nodes} - shown
        self.nodes: list[fx.Node] = []
        self.labels: list[Hashable] = []
        for node, mark in zip(every, marks, strict=True):
            if node not in hidden and node.op not in ("placeholder", "output"):
                self.nodes.append(node)
                self.labels.append(mark)


def _matched(left: _Side, right: _Side) -> dict[fx.Node, fx.Node]:
    """Which node on the left each node on the right is.

    A transform keeps the name of what it leaves alone: same name, same label, same operands by name is the same node.
    The rest is aligned by labels, in order.
    """
    by_name = {node.name: (node, mark) for node, mark in zip(left.nodes, left.labels, strict=True)}
    matched: dict[fx.Node, fx.Node] = {}
    for node, mark in zip(right.nodes, right.labels, strict=True):
        other, label = by_name.get(node.name, (None, None))
        if other is not None and label == mark and _operand_names(other) == _operand_names(node):
            matched[node] = other
    taken = set(matched.values())
    rest = [
        [(node, mark) for node, mark in zip(side.nodes, side.labels, strict=True) if node not in done]
        for side, done in ((left, taken), (right, matched.keys()))
    ]
    for i, j in align([mark for _, mark in rest[0]], [mark for _, mark in rest[1]]):
        matched[rest[1][j][0]] = rest[0][i][0]
    return matched


def _operand_names(node: fx.Node) -> list[str]:
    return [each.name for each in operands(node)]


def _shown(kind: Kind, like: frozenset[str] | set[str]) -> int:
    """The occurrence with most of these names; if none has any, the second: the first one is often special."""
    shared = [sum(node.name in like for node in each.nodes) for each in kind.occurrences]
    return shared.index(max(shared)) if any(shared) else min(1, len(kind) - 1)


def _same_wiring(left: _Side, right: _Side) -> bool:
    if left.all_labels != right.all_labels:
        return False
    place = [{node: index for index, node in enumerate(side.all_nodes)} for side in (left, right)]
    return all(
        [place[0][node] for node in operands(one)] == [place[1][node] for node in operands(two)]
        for one, two in zip(left.all_nodes, right.all_nodes, strict=True)
    )


def _fresh(name: str, taken: set[str]) -> str:
    return name if name not in taken else f"{name}_new"


def _rows(left: list[str], right: list[str]) -> Iterator[Row]:
    i = j = 0
    for a, b in [*align(left, right), (len(left), len(right))]:
        for step in range(max(a - i, b - j)):
            old = left[i + step] if i + step < a else None
            new = right[j + step] if j + step < b else None
            kind = "removed" if new is None else "added" if old is None else "changed"
            yield Row(kind, old or "", new or "")
        if a < len(left):
            yield Row("same", left[a], right[b])
        i, j = a + 1, b + 1


def _binding_changes(left: Program, right: Program) -> Iterator[str]:
    ours: dict[tuple[str, str], Any] = {(row.role.value, row.target): row for row in left.bindings}
    theirs = {(row.role.value, row.target): row for row in right.bindings}
    for key in dict.fromkeys([*ours, *theirs]):
        one, two = ours.get(key), theirs.get(key)
        if one is None:
            yield f"{key[0]} {key[1]} is new"
        elif two is None:
            yield f"{key[0]} {key[1]} is gone"
        elif (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{key[0]} {key[1]} was {one.text} and is {two.text}"
        elif (one.alias is None) != (two.alias is None):
            yield f"{key[0]} {key[1]} lives in other storage"
        elif one.value != two.value:
            yield f"{key[0]} {key[1]} was {one.value!r} and is {two.value!r}"
        elif not _same_values(left.tensors.get(one.name), right.tensors.get(two.name)):
            yield f"{key[0]} {key[1]} has other values"
    ranges = [{symbol.name: symbol.text for symbol in each.symbols.values()} for each in (left, right)]
    for name in dict.fromkeys([*ranges[0], *ranges[1]]):
        if ranges[0].get(name) != ranges[1].get(name):
            yield f"the size {name} was {ranges[0].get(name, 'fixed')} and is {ranges[1].get(name, 'fixed')}"


def _same_values(one: Any, two: Any) -> bool:
    """Values that are in no checkpoint are part of the program; weights are not."""
    if not isinstance(one, InMemory) or not isinstance(two, InMemory):
        return True
    left, right = one.tensor.detach(), two.tensor.detach()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    pair = [each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(pair[0], pair[1])
