"""Joint folding of two programs: the blocks of one, and the corresponding nodes of the other.

After a transform a program may fold differently: its first layer may have become special, or two kinds of layers may
alternate where there was one. A transform keeps the names of unchanged nodes, so names identify the nodes that each
block became. Two blocks are of the same kind only if they are equal on both sides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from inlay.program.fold import BlockKind, Folds, Occurrence, Signer, layer_path
from inlay.program.graphs import MODULE
from inlay.program.text.folded_printer import block_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import fx

_MAX_SHRINK_FACTOR = 4
"""A block that keeps less than one in this many of its nodes counts as not found."""


def fold_jointly(left: Folds, right: Folds, node_labels: Sequence[Sequence[Hashable]]) -> tuple[Folds, Folds] | None:
    """Fold two programs the same way; `node_labels` are the labels of their nodes. Return None if their node names do
    not correspond, as for two models that were captured separately."""
    swapped = _coverage(right) > _coverage(left)
    lead, follow = (right, left) if swapped else (left, right)
    signer = Signer(follow.graph, node_labels[0 if swapped else 1])
    blocks = [(kind, each) for kind, _, each in lead.iter_occurrences()]
    stretches = _find_stretches([each for _, each in blocks], signer.nodes)
    if not stretches:
        return None
    classes: dict[tuple[BlockKind, Hashable], list[tuple[Occurrence, Occurrence]]] = {}
    for (kind, block), stretch in zip(blocks, stretches, strict=True):
        occurrence, signature = signer.sign(stretch.start, stretch.stop)
        classes.setdefault((kind, signature), []).append((block, occurrence))
    groups = sorted(classes.values(), key=lambda group: -len(group) * len(group[0][0].nodes))
    folded = [
        replace(each, kinds=tuple(_kind(group, side, index, len(groups)) for index, group in enumerate(groups)))
        for side, each in enumerate((lead, follow))
    ]
    return (folded[1], folded[0]) if swapped else (folded[0], folded[1])


def _coverage(folds: Folds) -> float:
    return folds.covered_node_count / max(1, len(folds.graph.nodes))


def _kind(group: Sequence[tuple[Occurrence, Occurrence]], side: int, index: int, count: int) -> BlockKind:
    """Show the second occurrence if there is one, because the first is often special."""
    return BlockKind(tuple(pair[side] for pair in group), min(1, len(group) - 1), block_name(index, count))


@dataclass
class _Stretch:
    """The current range of the nodes of a block, and their layer in the model."""

    start: int
    stop: int
    layer: str


def _find_stretches(blocks: Sequence[Occurrence], nodes: list[fx.Node]) -> list[_Stretch]:
    """Return the range of each block in `nodes`; empty if a block is not found or blocks are out of order."""
    block_of = {node.name: number for number, block in enumerate(blocks) for node in block.nodes}
    places: list[list[int]] = [[] for _ in blocks]
    for index, node in enumerate(nodes):
        if node.name in block_of:
            places[block_of[node.name]].append(index)
    found: list[_Stretch] = []
    for block, held in zip(blocks, places, strict=True):
        if len(held) * _MAX_SHRINK_FACTOR < len(block.nodes) or (found and held[0] < found[-1].stop):
            return []
        owners = Counter(_layer_of_node(nodes[index]) for index in held)
        found.append(_Stretch(held[0], held[-1] + 1, owners.most_common(1)[0][0]))
    _assign_gaps(blocks, found, nodes)
    return found


def _assign_gaps(blocks: Sequence[Occurrence], found: list[_Stretch], nodes: list[fx.Node]) -> None:
    """Assign new nodes between blocks to the adjacent block of the same layer."""
    outside = _Stretch(0, 0, ""), _Stretch(len(nodes), len(nodes), "")
    for number, (before, after) in enumerate(pairwise([outside[0], *found, outside[1]])):
        gap = nodes[before.stop : after.start]
        touching = 0 < number < len(found) and _end(blocks[number - 1]) == blocks[number].start
        ours, theirs = before.layer or "nobody", after.layer or "nobody"
        early = next((at for at, node in enumerate(gap) if _layer_of_node(node) != ours), len(gap))
        late = next((at for at in range(len(gap), early, -1) if _layer_of_node(gap[at - 1]) != theirs), early)
        if touching:
            early = late = _best_cut([_layer_of_node(node) for node in gap], ours, theirs)
        before.stop, after.start = before.stop + early, after.start - (len(gap) - late)


def _best_cut(owners: Sequence[str], ours: str, theirs: str) -> int:
    """Return the cut with the fewest nodes on the wrong side.

    >>> _best_cut(["one", "two", "two", "one"], "one", "two")
    1
    """
    best, at = 0, 0
    wrong = 0
    for index, owner in enumerate(owners, 1):
        wrong += (owner == theirs) - (owner == ours)
        if wrong < best:
            best, at = wrong, index
    return at


def _end(block: Occurrence) -> int:
    return block.start + len(block.nodes)


def _layer_of_node(node: fx.Node) -> str:
    return layer_path(str(node.meta.get(MODULE, "")))
