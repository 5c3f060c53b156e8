"""Fold: the repeated blocks of a program, found structurally.

No definition of a layer is needed. A program in order is a string of labels (see `graphs.labels`). Repeated layers are
a *tandem repeat* in that string: a substring that equals itself shifted by one period. Candidate periods are the
distances between equal substrings, at several lengths. Each is checked by comparing the string with its shifted copy.
The phase within a repeat is arbitrary, so blocks are cut where the fewest values cross. Two occurrences are of the same
kind if their *signatures* are equal: the same labels, and the same wiring up to the values from outside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import MODULE, labels, operands

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    import numpy.typing as npt
    from torch import fx

    from inlay.program.program import Program

MIN_SAVED_NODES = 8
"""A repeat that would save fewer nodes than this is not folded."""
_CANDIDATES_PER_LENGTH = 4
_MAX_FOLDS = 32
_MAX_STRETCH = 1024
"""Maximum length of the compared substrings: longer equal parts of one layer would count as two layers."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
_MIN_PREFIX_SHARE = 0.2
_MIN_PREFIX_NODES = 4
"""Minimum part of a period, as a share and in nodes, that must recur inside it to split it into several layers."""


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One occurrence of a block: its nodes in order, and the outside values they read, in order of first use."""

    start: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes that are read outside the block."""
        inside = set(self.nodes)
        return tuple(node for node in self.nodes if any(user not in inside for user in node.users))


@dataclass(frozen=True, eq=False)
class BlockKind:
    """A block and all its occurrences, which compute the same function of their inputs."""

    occurrences: tuple[Occurrence, ...]
    shown_index: int = 0
    """Index of the occurrence that represents all of them in text."""
    name: str = ""
    """Name of its function in text; by default a letter in program order."""

    def __len__(self) -> int:
        return len(self.occurrences)

    @property
    def example(self) -> Occurrence:
        """The occurrence that represents all of them in text."""
        return self.occurrences[self.shown_index]

    @property
    def size(self) -> int:
        """Number of nodes in the block."""
        return len(self.occurrences[0].nodes)

    @cached_property
    def output_positions(self) -> tuple[int, ...]:
        """Positions in the block of the values that are read outside any occurrence."""
        read: set[int] = set()
        for each in self.occurrences:
            where = {node: position for position, node in enumerate(each.nodes)}
            read.update(where[node] for node in each.outputs)
        return tuple(sorted(read))


@dataclass(frozen=True, eq=False)
class BlockDeviation:
    """A run of nodes that is almost a block: most of its operators, but not all, or with different wiring."""

    start: int
    nodes: tuple[fx.Node, ...]
    kind: BlockKind
    extra: Counter[str]
    missing: Counter[str]

    @property
    def text(self) -> str:
        """A short description of the difference."""
        parts = [f"+ {count} {name}" for name, count in self.extra.items()]
        parts += [f"- {count} {name}" for name, count in self.missing.items()]
        return ", ".join(parts) or "same operators, wired differently"


@dataclass(frozen=True, eq=False)
class Folds:
    """The folds of one graph, in program order, and deviating blocks."""

    graph: fx.Graph
    kinds: tuple[BlockKind, ...]
    deviations: tuple[BlockDeviation, ...]

    @property
    def layer_count(self) -> int:
        """Number of layer-like blocks: occurrences of the main kinds, including deviating ones."""
        if not self.kinds:
            return 0
        largest = max(kind.size for kind in self.kinds)
        mains = [kind for kind in self.kinds if kind.size * 3 >= largest]
        return sum(map(len, mains)) + sum(1 for each in self.deviations if each.kind in mains)

    @property
    def covered_node_count(self) -> int:
        """Number of nodes that belong to an occurrence."""
        return sum(kind.size * len(kind) for kind in self.kinds)

    def iter_occurrences(self) -> Iterator[tuple[BlockKind, int, Occurrence]]:
        """Yield every occurrence in program order: its kind, its index within the kind, and the occurrence."""
        found = [(kind, index, each) for kind in self.kinds for index, each in enumerate(kind.occurrences)]
        yield from sorted(found, key=lambda item: item[2].start)

    @property
    def blocks(self) -> list[tuple[fx.Node, ...]]:
        """The nodes of every block of all kinds, including deviating ones, in program order."""
        found: list[Occurrence | BlockDeviation] = [each for _, _, each in self.iter_occurrences()]
        found += self.deviations
        return [each.nodes for each in sorted(found, key=lambda each: each.start)]

    @cached_property
    def layer_of(self) -> dict[fx.Node, int]:
        """Node → index of its block in `blocks`."""
        return {node: index for index, nodes in enumerate(self.blocks) for node in nodes}


def fold(program: Program, *, maximize_blocks: bool = False) -> Folds:
    """Find the repeated blocks of a program (of its outermost graph).

    Blocks start at the layer boundaries of the model. With `maximize_blocks`, they start where this gives most blocks.
    """
    return fold_graph(program.graph, labels(program.graph, program.types), maximize_blocks=maximize_blocks)


@pause_gc()
def fold_graph(graph: fx.Graph, node_labels: Sequence[Hashable], *, maximize_blocks: bool = False) -> Folds:
    """Find the repeated blocks of a graph whose nodes have these labels."""
    signer = Signer(graph, node_labels)
    nodes, string = signer.nodes, signer.label_ids
    crossing, boundary = _live_tensor_counts(nodes), _boundary(nodes)
    groups: dict[Hashable, list[Occurrence]] = {}
    known: set[bytes] = set()
    free = string.copy()
    for _ in range(_MAX_FOLDS):
        run = _best_run(free)
        if run is None:
            break
        start, end, period = run
        stretches = _cut(string, crossing, boundary, start, end, period, known, maximize_blocks)
        for begin, stop in stretches:
            known.add(string[begin:stop].tobytes())
            occurrence, signature = signer.sign(begin, stop)
            groups.setdefault(signature, []).append(occurrence)
        _blank(free, stretches[0][0], stretches[-1][1])
    kinds = [
        BlockKind(tuple(sorted(group, key=lambda each: each.start))) for group in groups.values() if len(group) > 1
    ]
    kinds.sort(key=lambda kind: kind.occurrences[0].start)
    return Folds(graph, tuple(kinds), tuple(_deviations(nodes, node_labels, signer.graph_indices, kinds)))


def size_arithmetic(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return placeholders, outputs, and numbers computed only from them.

    Sizes are shared by all layers and computed where the first layer needs them. If they counted as part of it, the
    first layer would differ from the rest.
    """
    outside: set[fx.Node] = set()
    for node in nodes:
        if node.op in ("placeholder", "output") or (
            isinstance(node.meta.get("val"), _NUMBERS) and all(each in outside for each in node.all_input_nodes)
        ):
            outside.add(node)
    return outside


def _blank(string: npt.NDArray[np.int64], start: int, stop: int) -> None:
    """Exclude folded nodes from the search by giving them unique labels."""
    string[start:stop] = -1 - np.arange(start, stop)


def _live_tensor_counts(nodes: list[fx.Node]) -> npt.NDArray[np.int64]:
    """Return the number of live tensors at the cut before each node."""
    place = {node: index for index, node in enumerate(nodes)}
    change = np.zeros(len(nodes) + 2, dtype=np.int64)
    for index, node in enumerate(nodes):
        last = max((place.get(user, len(nodes)) for user in node.users), default=index)
        value = node.meta.get("val")
        tensors = len(value) if isinstance(value, (list, tuple)) else 1
        change[index + 1] += tensors
        change[last + 1] -= tensors
    return np.cumsum(change)[: len(nodes) + 1]


def _boundary(nodes: list[fx.Node]) -> npt.NDArray[np.bool_]:
    """Whether a node comes from another layer's module than its predecessor, by the first index in the module path."""
    owners = [layer_path(str(node.meta.get(MODULE, ""))) for node in nodes]
    differs = [bool(two) and one != two for one, two in pairwise(owners)]
    return np.array([True, *differs, True], dtype=np.bool_)


def layer_path(path: str) -> str:
    """Return a module path up to its first index, which is its layer, or an empty string.

    >>> layer_path("model.layer_count.3.mlp"), layer_path("model.norm")
    ('model.layer_count.3', '')
    """
    parts = path.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _best_run(string: npt.NDArray[np.int64]) -> tuple[int, int, int] | None:
    """Return the tandem repeat that saves most nodes: start, end, period."""
    best: tuple[int, int, int] | None = None
    best_saved = float(MIN_SAVED_NODES)
    for period in sorted(_candidate_periods(string)):
        for start, end in _runs(string, period):
            # A larger period must save clearly more than a smaller one, or two layers would become one block.
            if (saved := ((end - start) // period - 1) * period) >= best_saved:
                best, best_saved = (start, end, period), saved * 1.05
    return best


def _candidate_periods(string: npt.NDArray[np.int64]) -> set[int]:
    """Return the most frequent distances between equal substrings of 1, 2, 4, 8, … nodes."""
    ranks, length, periods = np.unique(string, return_inverse=True)[1].reshape(-1), 1, set[int]()
    while length <= min(len(string) // 2, _MAX_STRETCH):
        order = np.argsort(ranks, kind="stable")
        same = ranks[order][1:] == ranks[order][:-1]
        gaps = (order[1:] - order[:-1])[same]
        if not len(gaps):
            break
        values, counts = np.unique(gaps[gaps > 1], return_counts=True)
        top = np.argsort(-counts * np.minimum(values, length * 8), kind="stable")[:_CANDIDATES_PER_LENGTH]
        periods.update(int(value) for value in values[top])
        pairs = ranks[:-length] * (int(ranks.max()) + 1) + ranks[length:]
        ranks = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        length *= 2
    return periods


def _runs(string: npt.NDArray[np.int64], period: int) -> Iterator[tuple[int, int]]:
    """Yield substrings of at least two periods that equal themselves shifted by one period."""
    equal = np.concatenate(([False], string[:-period] == string[period:], [False]))
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        if stop - start >= period:
            yield int(start), int(stop) + period


def _cut(
    string: npt.NDArray[np.int64],
    crossing: npt.NDArray[np.int64],
    boundary: npt.NDArray[np.bool_],
    start: int,
    end: int,
    period: int,
    known: set[bytes],
    most: bool,
) -> list[tuple[int, int]]:
    """Cut a repeat into blocks where the fewest tensors cross.

    Ties are resolved in favor of module boundaries, then known blocks, then most blocks; with `most`, most blocks come
    first.
    """

    def cost(phase: int) -> tuple[int, int, bool, bool, int, int]:
        count = (end - phase) // period
        cuts = slice(phase, phase + count * period + 1, period)
        new = string[phase : phase + period].tobytes() not in known
        inside = not bool(boundary[cuts][:-1].all())
        return int(crossing[cuts].max()), -count if most else 0, inside, new, -count, phase

    first = min(range(start, start + period), key=cost)
    count = (end - first) // period
    inner = _inner_cuts(string[first : first + period], crossing[first : first + period])
    cuts = [first + block * period + offset for block in range(count) for offset in inner]
    return list(zip(cuts, [*cuts[1:], first + count * period], strict=True))


def _inner_cuts(block: npt.NDArray[np.int64], crossing: npt.NDArray[np.int64]) -> list[int]:
    """Return the starts of the layers within a period, including 0; they may be of several kinds."""
    cuts = {0}
    inner = _best_run(block)
    if inner is not None:
        start, end, period = inner
        phases = [range(at, end + 1, period) for at in range(start, start + period)]
        cuts.update(min(phases, key=lambda row: _peak(crossing, row)))
    for at in np.flatnonzero(block == block[0]):
        if at > 0 and _common_prefix_length(block[at:], block) >= max(
            _MIN_PREFIX_SHARE * len(block), _MIN_PREFIX_NODES
        ):
            cuts.add(int(at))
    allowed = sorted(at for at in cuts if at < len(block) and crossing[at] <= crossing[0])
    return _split_known(block, crossing, allowed)


def _peak(crossing: npt.NDArray[np.int64], cuts: Iterable[int]) -> int:
    return max((int(crossing[at]) for at in cuts if at < len(crossing)), default=0)


def _split_known(block: npt.NDArray[np.int64], crossing: npt.NDArray[np.int64], cuts: list[int]) -> list[int]:
    """Split pieces that start with another whole piece into that piece and the rest."""
    while True:
        pieces = sorted(zip(cuts, [*cuts[1:], len(block)], strict=True), key=lambda piece: piece[1] - piece[0])
        new = {
            start + end - other
            for start, stop in pieces
            for other, end in pieces
            if end - other < stop - start
            and _common_prefix_length(block[start:stop], block[other:end]) == end - other
            and crossing[start + end - other] <= crossing[0]
        }
        if new <= set(cuts):
            return cuts
        cuts = sorted({*cuts, min(new - set(cuts))})


def _common_prefix_length(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Return the length of the common prefix of two label sequences."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


class Signer:
    """A graph without its size arithmetic, and signatures of its runs of nodes. A signature consists of labels and
    wiring, with outside values numbered by first use."""

    def __init__(self, graph: fx.Graph, node_labels: Sequence[Hashable]) -> None:
        every = list(graph.nodes)
        outside = size_arithmetic(every)
        self.graph_indices = [index for index, node in enumerate(every) if node not in outside]
        self.nodes = [every[index] for index in self.graph_indices]
        ids: dict[Hashable, int] = {}
        self.label_ids = np.array(
            [ids.setdefault(node_labels[index], len(ids)) for index in self.graph_indices], dtype=np.int64
        )
        self.place = {node: index for index, node in enumerate(self.nodes)}

    def sign(self, start: int, stop: int) -> tuple[Occurrence, Hashable]:
        """Return the run of nodes as an occurrence, and its signature, which all occurrences of a kind share."""
        nodes = tuple(self.nodes[start:stop])
        inputs: dict[fx.Node, int] = {}
        wiring: list[int] = []
        for node in nodes:
            for operand in operands(node):
                place = self.place.get(operand, -1)
                wiring.append(place - start if place >= start else -1 - inputs.setdefault(operand, len(inputs)))
        signature = (self.label_ids[start:stop].tobytes(), tuple(wiring))
        return Occurrence(start, nodes, tuple(inputs)), signature


def _deviations(
    nodes: list[fx.Node], node_labels: Sequence[Any], keep: list[int], kinds: list[BlockKind]
) -> Iterator[BlockDeviation]:
    """Yield runs of nodes between the blocks that contain most operators of a block."""
    if not kinds:
        return
    main = max(kinds, key=lambda kind: kind.size * len(kind))
    place = {node: index for index, node in enumerate(nodes)}
    taken = sorted((each.start, each.start + kind.size) for kind in kinds for each in kind.occurrences)
    edges = [(0, 0), *taken, (len(nodes), len(nodes))]
    template = Counter(node_labels[keep[place[node]]] for node in main.occurrences[0].nodes)
    for (_, start), (stop, _) in pairwise(edges):
        while stop - start >= main.size // 2:
            # A long gap may contain several deviating blocks: check one block's length at a time, next to a block.
            begin = max(start, stop - main.size - main.size // 3) if start == 0 else start
            end = min(stop, begin + main.size + main.size // 3)
            end = stop if stop - end < main.size // 2 else end
            found = Counter(node_labels[keep[index]] for index in range(begin, end))
            if sum((template & found).values()) * 2 > main.size:
                extra, lacking = found - template, template - found
                yield BlockDeviation(begin, tuple(nodes[begin:end]), main, _by_operator(extra), _by_operator(lacking))
            start, stop = (start, begin) if start == 0 else (end, stop)


def _by_operator(found: Counter[Any]) -> Counter[str]:
    names: Counter[str] = Counter()
    for label, count in found.items():
        names[str(label[0])] += count
    return names
