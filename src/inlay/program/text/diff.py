"""The structural diff of two programs, folded and side by side."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.fold import BlockKind, Folds, fold_graph
from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import MODULE, SOURCE, labels, operands
from inlay.program.text.alignment import align
from inlay.program.text.diff_rows import DiffRow, build_rows, excerpt, mark_first_changes
from inlay.program.text.folded_printer import comparison_lines
from inlay.program.text.joint_fold import fold_jointly
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program


@dataclass(frozen=True)
class Diff:
    """The difference of two programs in operators, constants, types and wiring; node names are ignored."""

    rows: tuple[DiffRow, ...]
    operator_deltas: Mapping[str, int]
    """Operator → calls in the right program minus calls in the left, over all layers; only nonzero entries."""
    node_counts: tuple[int, int]
    binding_changes: tuple[str, ...]
    """Descriptions of inputs and outputs that differ."""
    has_same_wiring: bool

    @property
    def is_equal(self) -> bool:
        """Whether the programs compute the same result by the same steps."""
        return self.has_same_wiring and not self.operator_deltas and not self.binding_changes and not any(self.hunks(0))

    def hunks(self, context: int = 3) -> Iterator[DiffRow]:
        """Yield the rows that differ, with `context` equal rows around them."""
        wanted = [row.kind != "same" for row in self.rows]
        return excerpt(self.rows, wanted, context, gaps=context > 0)

    def summary(self, context: int = 2, *, gaps: bool = True) -> Iterator[DiffRow]:
        """Yield each kind of change once, with `context` rows around it; the other rows are counted.

        Rows have the same kind of change if they differ only in the names of values and weights.
        """
        return excerpt(self.rows, self.first_change_mask, context, titles=True, gaps=gaps)

    @cached_property
    def first_change_mask(self) -> list[bool]:
        """Which rows show a kind of change for the first time."""
        return mark_first_changes(self.rows)

    def __str__(self) -> str:
        """Return the diff as text; see `inlay.program.text.side_by_side`."""
        from inlay.program.text.side_by_side import diff_lines

        return "\n".join(line.text for line in diff_lines(self))


@pause_gc()
def diff(left: Program, right: Program) -> Diff:
    """Compare two programs."""
    marks = [labels(program.graph, program.types) for program in (left, right)]
    folds = [fold_graph(program.graph, mark) for program, mark in zip((left, right), marks, strict=True)]
    folds = list(fold_jointly(folds[0], folds[1], marks) or _show_same_occurrences(folds[0], folds[1]))
    sides = [_Side(each, mark) for each, mark in zip(folds, marks, strict=True)]
    taken = {node.name for node in sides[0].nodes}
    matched = _match_nodes(*sides)
    names = {node: matched[node].name if node in matched else _unique_name(node.name, taken) for node in sides[1].nodes}
    texts = [comparison_lines(left, folds[0], {}), comparison_lines(right, folds[1], names)]
    operators = Counter(right.op_counts())
    operators.subtract(left.op_counts())
    return Diff(
        rows=tuple(build_rows(*texts)),
        operator_deltas={name: count for name, count in sorted(operators.items()) if count},
        node_counts=(len(left), len(right)),
        binding_changes=tuple(_merge_layers(_binding_changes(left, right))),
        has_same_wiring=_same_wiring(*sides),
    )


class _Side:
    """A program as a sequence of nodes, with each block once."""

    def __init__(self, folds: Folds, marks: Sequence[Hashable]) -> None:
        self.all_nodes, self.all_labels = list(folds.graph.nodes), marks
        shown = {node for kind in folds.kinds for node in kind.example.nodes}
        hidden = {node for kind in folds.kinds for each in kind.occurrences for node in each.nodes} - shown
        self.nodes: list[fx.Node] = []
        self.labels: list[Hashable] = []
        for node, mark in zip(self.all_nodes, marks, strict=True):
            if node not in hidden and node.op not in ("placeholder", "output"):
                self.nodes.append(node)
                self.labels.append(mark)


def _show_same_occurrences(left: Folds, right: Folds) -> tuple[Folds, Folds]:
    """Show the same occurrence of each kind on both sides."""
    second = replace(right, kinds=tuple(replace(kind, shown_index=min(1, len(kind) - 1)) for kind in right.kinds))
    names = {node.name for kind in second.kinds for node in kind.example.nodes}
    return replace(
        left, kinds=tuple(replace(kind, shown_index=_pick_shown(kind, names)) for kind in left.kinds)
    ), second


def _match_nodes(left: _Side, right: _Side) -> dict[fx.Node, fx.Node]:
    """Map each node on the right to its node on the left.

    A transform keeps the names of unchanged nodes. Nodes match if name and label are equal and either their operands
    have the same names or they come from the same place in the model. The others are aligned by labels, in order.
    """
    by_name = {node.name: (node, mark) for node, mark in zip(left.nodes, left.labels, strict=True)}
    matched: dict[fx.Node, fx.Node] = {}
    for node, mark in zip(right.nodes, right.labels, strict=True):
        other, label = by_name.get(node.name, (None, None))
        if other is not None and label == mark and _same_surroundings(other, node):
            matched[node] = other
    taken = set(matched.values())
    rest = [
        [(node, mark) for node, mark in zip(side.nodes, side.labels, strict=True) if node not in done]
        for side, done in ((left, taken), (right, matched.keys()))
    ]
    for i, j in align([mark for _, mark in rest[0]], [mark for _, mark in rest[1]]):
        matched[rest[1][j][0]] = rest[0][i][0]
    return matched


def _same_surroundings(one: fx.Node, two: fx.Node) -> bool:
    names = [[each.name for each in operands(node)] for node in (one, two)]
    places = [(node.meta.get(MODULE), node.meta.get(SOURCE)) for node in (one, two)]
    return names[0] == names[1] or (all(places[0]) and places[0] == places[1])


def _pick_shown(kind: BlockKind, like: set[str]) -> int:
    """Return the occurrence with most of these names; if none has any, the second, as the first is often special."""
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


def _unique_name(name: str, taken: set[str]) -> str:
    return name if name not in taken else f"{name}_new"


def _binding_changes(left: Program, right: Program) -> Iterator[str]:
    ours: dict[tuple[str, str], Any] = {(row.role.value, row.target): row for row in left.bindings}
    theirs = {(row.role.value, row.target): row for row in right.bindings}
    for key in dict.fromkeys([*ours, *theirs]):
        one, two = ours.get(key), theirs.get(key)
        if one is None:
            yield f"{key[0]} {key[1]} is new"
        elif two is None:
            yield f"{key[0]} {key[1]} is removed"
        elif (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{key[0]} {key[1]} was {one.type_text} and is {two.type_text}"
        elif (one.alias is None) != (two.alias is None):
            yield f"{key[0]} {key[1]} has different storage"
        elif one.below != two.below:
            yield f"{key[0]} {key[1]} was below {one.below} and is below {two.below}"
        elif one.value != two.value:
            yield f"{key[0]} {key[1]} was {one.value!r} and is {two.value!r}"
        elif not _same_values(left.tensors.get(one.name), right.tensors.get(two.name)):
            yield f"{key[0]} {key[1]} has different values"
    ranges = [{symbol.name: symbol.range_text for symbol in each.symbols.values()} for each in (left, right)]
    for name in dict.fromkeys([*ranges[0], *ranges[1]]):
        if ranges[0].get(name) != ranges[1].get(name):
            yield f"the size {name} was {ranges[0].get(name, 'fixed')} and is {ranges[1].get(name, 'fixed')}"


def _same_values(one: Any, two: Any) -> bool:
    """Compare values that are in no checkpoint: they are part of the program. Weights are not compared."""
    if not isinstance(one, InMemoryTensor) or not isinstance(two, InMemoryTensor):
        return True
    left, right = one.tensor.detach(), two.tensor.detach()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    pair = [each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(pair[0], pair[1])


def _merge_layers(changes: Iterable[str]) -> Iterator[str]:
    """Merge changes that differ only in the layer number.

    >>> list(_merge_layers(["layers.0.w is removed", "layers.1.w is removed", "head is new"]))
    ['layers.*.w is removed (× 2)', 'head is new']
    """
    groups: dict[str, list[str]] = {}
    for change in changes:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=[. ])", "*", change), []).append(change)
    for text, each in groups.items():
        yield each[0] if len(each) == 1 else f"{text} (× {len(each)})"
