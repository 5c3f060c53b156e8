"""Find near misses of a rule and their differences. Slow and thorough: runs only on request."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.graphs import all_graphs, operands, target_text
from inlay.rewrite.differences import PartialMatch, PatternDifference, code_location
from inlay.rewrite.partial_match import MAX_DIFFERENCES, Aligner, value_signature
from inlay.rewrite.pattern_cache import PATTERNS
from inlay.rewrite.pattern_search import find_matches, trace_alternatives
from inlay.rewrite.pattern_trees import PatternCall, PatternTree, children
from inlay.rewrite.reasons import Reason
from inlay.rewrite.rewriter import type_text
from inlay.rewrite.rule import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.rewrite.differences import CodeLocation
    from inlay.rewrite.rule import Alternative, Match, Rule

_MAX_ANCHORS = 400
"""If a call occurs more often than this outside the sites, the search starts only at code locations of sites."""
_MAX_USERS = 16
COMMON_OPERATORS = (
    *("add", "mul", "sub", "div", "view", "slice", "transpose"),
    *("clone", "_to_copy", "expand", "unsqueeze"),
)
"""Operators that most graphs have, so that they say little about a pattern."""
_REPORT_SIMILARITY = 0.5
REFUSAL_COST = 0.25


@dataclass(frozen=True, eq=False)
class NearMiss(Refusal):
    """A place that is almost a site, with every difference, the first one first."""

    differences: tuple[PatternDifference, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    """The nodes of the program that were aligned with the pattern."""
    cost: float = 0.0
    num_covered_nodes: int = 0
    """How many nodes of the program the alignment covers, including those that differ."""
    similarity: float = 0.0
    """How much of it is at code locations where other layers have sites: 0 to 1."""


@dataclass(frozen=True, eq=False)
class NearMissReport:
    """The matches of a rule in a program, and its near misses, best first."""

    sites: tuple[Match, ...]
    misses: tuple[NearMiss, ...]


def find_near_misses(program: Program, rule: Rule) -> NearMissReport:
    """Return every place that starts like a match of a rule and is not one; `program` is not changed."""
    alternatives = trace_alternatives(program, rule)
    sites: list[Match] = []
    found: list[NearMiss] = []
    for _, graph in all_graphs(program.graph):
        accepted, misses = find_matches(program, graph, rule, alternatives)
        places = NearMissFinder.for_rule(graph, rule, alternatives, accepted)
        refused = [miss for each in misses if not each.is_mismatch for miss in places.explain_refusal(each)]
        found += drop_overlapping([*refused, *places.find_misses()])
        found += [miss for each in misses if each.kind is Reason.OVERLAP for miss in places.explain_overlap(each)]
        found += places.find_already_rewritten()
        sites += accepted
    return NearMissReport(tuple(sites), tuple(sorted(found, key=_rank)))


def _rank(miss: NearMiss) -> tuple[float, ...]:
    return (
        miss.kind is Reason.OVERLAP,
        -round(miss.similarity, 1),
        miss.cost / max(miss.pattern_nodes, 1),
        -miss.matched,
    )


def drop_overlapping(misses: Sequence[NearMiss]) -> list[NearMiss]:
    """Keep one miss per place: of those that share nodes, the one with the lowest cost that covers most nodes."""
    taken: set[fx.Node] = set()
    kept = []
    for miss in sorted(misses, key=lambda each: (each.cost - each.similarity / 2, -each.num_covered_nodes)):
        if not taken.intersection(miss.nodes):
            taken.update(miss.nodes)
            kept.append(miss)
    return kept


@dataclass(frozen=True)
class KnownSites:
    """The sites of a pattern that were found: an alignment that resembles them is more likely to be intended."""

    matches: Sequence[Match] = ()
    nodes: frozenset[fx.Node] = frozenset()
    locations: frozenset[CodeLocation] = frozenset()
    sizes: Mapping[CodeLocation, int] = field(default_factory=dict)
    """Code location of the output → number of nodes."""
    values: Mapping[str, set[Any]] = field(default_factory=dict)
    """Variable → identities of its values."""

    @classmethod
    def from_matches(cls, matches: Sequence[Match]) -> KnownSites:
        """Return the sites of these matches."""
        nodes = frozenset(node for match in matches for node in match.nodes)
        sizes = {code_location(match.outputs[0]): len(match.nodes) for match in matches}
        values: dict[str, set[Any]] = {}
        for match in matches:
            for name, value in match.values.items():
                values.setdefault(name, set()).add(value_signature(value))
        return cls(matches, nodes, frozenset(map(code_location, nodes)), sizes, values)


class NearMissFinder:
    """Finds the near misses of patterns in one graph; `aligner` takes the arguments of `Aligner`."""

    def __init__(
        self,
        graph: fx.Graph,
        trees: Sequence[tuple[PatternTree, Mapping[str, Any]]],
        sites: KnownSites,
        aligner: Callable[..., Aligner] = Aligner,
    ) -> None:
        self.graph, self.trees, self.sites, self.make_aligner = graph, trees, sites, aligner

    @classmethod
    def for_rule(
        cls, graph: fx.Graph, rule: Rule, alternatives: list[Alternative], accepted: list[Match]
    ) -> NearMissFinder:
        """Return a finder for the patterns of a rule."""
        trees: dict[PatternTree, Mapping[str, Any]] = {}
        for alternative in alternatives:
            trees.setdefault(PATTERNS.get(alternative.function, alternative.example), alternative.example)
        # An alternative that matches elsewhere in this program is more likely to be the intended one here.
        matched = [each.alternative for each in accepted if each.alternative is not None]
        used = Counter(PATTERNS.get(each.function, each.example) for each in matched)
        ordered = sorted(trees.items(), key=lambda pair: -used[pair[0]])
        aligner = functools.partial(Aligner, ignored_args=rule.ignored_args)
        return cls(graph, ordered, KnownSites.from_matches(accepted), aligner)

    def find_misses(self) -> Iterator[NearMiss]:
        """Yield the best explanation for each place that may be an intended site."""
        best: dict[fx.Node, NearMiss] = {}
        for tree, example in self.trees:
            aligner = self._aligner(tree, example, self.sites.nodes)
            for root in self._roots(tree):
                found = aligner.best_match(root)
                if found is None or not found.differences:
                    continue
                miss = self.miss(tree, root, found)
                if self._is_relevant(miss) and (root not in best or miss.cost < best[root].cost):
                    best[root] = miss
        yield from best.values()

    def _aligner(self, tree: PatternTree, example: Mapping[str, Any], claimed: Collection[fx.Node] = ()) -> Aligner:
        def is_site_location(node: fx.Node) -> bool:
            return code_location(node) in self.sites.locations

        return self.make_aligner(
            tree, example, site_values=self.sites.values, is_site_location=is_site_location, site_nodes=claimed
        )

    def find_already_rewritten(self) -> Iterator[NearMiss]:
        """Yield places where other layers have sites, and an earlier transform rewrote this layer."""
        for node in self.graph.nodes:
            of = self.sites.sizes.get(code_location(node))
            if of is not None and node not in self.sites.nodes and target_text(node.target).startswith("inlay."):
                text = f"an earlier transform, which replaced it by {target_text(node.target)}"
                difference = PatternDifference(Reason.OVERLAP, text, node)
                yield NearMiss(
                    *(node, node, Reason.OVERLAP, text, 0, of, True),
                    differences=(difference,),
                    nodes=(node,),
                    cost=1.0,
                    similarity=1.0,
                )

    def _is_relevant(self, miss: NearMiss) -> bool:
        if not miss.nodes or any(node in self.sites.nodes for node in miss.nodes):
            return False
        if miss.similarity >= _REPORT_SIMILARITY:
            return True
        is_specific = any(operator_name(node) not in COMMON_OPERATORS for node in miss.nodes)
        return 2 * miss.matched >= miss.pattern_nodes and (is_specific or miss.matched > 2)

    def miss(self, tree: PatternTree, root: fx.Node, partial: PartialMatch) -> NearMiss:
        """Return an alignment with differences as a near miss."""
        first = min(partial.differences, key=lambda each: each.node)
        nodes = tuple(sorted(partial.nodes.values()))
        return NearMiss(
            *(root, first.node, first.kind, first.text, len(nodes), tree.num_calls, True),
            differences=partial.differences,
            nodes=nodes,
            num_covered_nodes=len(nodes) + len(partial.extra_nodes),
            cost=partial.cost,
            similarity=self._similarity(root, [*nodes, *partial.extra_nodes]),
        )

    def _similarity(self, root: fx.Node, nodes: Sequence[fx.Node]) -> float:
        """Return the share of nodes at code locations of sites; the output counts as much as all other nodes."""
        share = sum(code_location(node) in self.sites.locations for node in nodes) / max(len(nodes), 1)
        return (share + (code_location(root) in self.sites.sizes)) / 2

    def explain_refusal(self, miss: Refusal) -> Iterator[NearMiss]:
        """Explain a place where the pattern matched and a check refused it: name the operand that differs.

        A place that matched only because a number took the place of a tensor is not reported here: that is an ordinary
        difference.
        """
        ways = [self._aligner(tree, each).best_match(miss.root) for tree, each in self.trees]
        exact = next((way for way in ways if way is not None and not way.differences), None)
        if exact is None and any(way is not None for way in ways):
            return
        nodes = tuple(sorted(exact.nodes.values())) if exact else (miss.root,)
        node = (self._differing_operand(miss, exact) if exact else None) or miss.node
        yield NearMiss(
            *(miss.root, node, miss.kind, miss.text, miss.matched, miss.pattern_nodes, miss.is_mismatch),
            differences=(PatternDifference(miss.kind, miss.text, node),),
            nodes=nodes,
            num_covered_nodes=len(nodes),
            cost=REFUSAL_COST,
            similarity=self._similarity(miss.root, nodes),
        )

    def explain_overlap(self, miss: Refusal) -> Iterator[NearMiss]:
        """Explain a match that overlaps with another site, unless all its nodes are in accepted sites."""
        yield from (each for each in self.explain_refusal(miss) if not self.sites.nodes.issuperset(each.nodes))

    def _differing_operand(self, miss: Refusal, partial: PartialMatch) -> fx.Node | None:
        """Return the operand whose type differs from the most similar site; None if the check named an inner node."""
        inputs = {name: value for name, value in partial.values.items() if hasattr(value, "meta")}
        if miss.node is not miss.root and miss.node not in inputs.values():
            return None
        odd = [
            [value for name, value in inputs.items() if (other := site.node(name)) and _type(value) != _type(other)]
            for site in self.sites.matches
            if code_location(site.outputs[0]) == code_location(miss.root)
        ]
        fewest = min((each for each in odd if each), key=len, default=[])
        return fewest[0] if fewest else None

    def _roots(self, tree: PatternTree) -> list[fx.Node]:
        """Return nodes that may be the pattern's output, found from matching calls outside the sites."""
        free: dict[Any, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self.sites.nodes:
                free.setdefault(node.target, []).append(node)
        readers = _readers(tree)
        roots: set[fx.Node] = set()
        for call in readers:
            anchors = [node for target in (call.target, *call.others) for node in free.get(target, [])]
            if len(anchors) > _MAX_ANCHORS:
                anchors = [node for node in anchors if code_location(node) in self.sites.locations]
            for node in anchors:
                roots |= _find_roots_above(tree, readers, call, node)
        calls = Counter(call.target for call in readers if call.target is not operator.getitem)
        targets = {target: call.target for call in readers for target in (*call.others, call.target)}
        free_roots = (root for root in roots if root.op == "call_function" and root not in self.sites.nodes)
        return sorted(root for root in free_roots if self._is_plausible_root(root, targets, calls, _height(tree)))

    def _is_plausible_root(self, root: fx.Node, targets: Mapping[Any, Any], calls: Counter[Any], height: int) -> bool:
        """Whether enough of the pattern's calls are near `root` for a few differences to explain the rest."""
        near, reached = {root}, {root}
        for _ in range(height + 1):
            reached = {each for node in reached for each in operands(node) if each.op == "call_function"} - near
            near |= reached
        there: Counter[Any] = Counter(targets.get(node.target) for node in near if node not in self.sites.nodes)
        wanted = calls.total()
        return (there & calls).total() >= max(wanted - MAX_DIFFERENCES, wanted / 2)


def _readers(tree: PatternTree) -> dict[PatternCall, list[PatternCall]]:
    """Return for each call of a pattern the calls that read it."""
    readers: dict[PatternCall, list[PatternCall]] = {}
    todo = list(tree.outputs)
    while todo:
        call = todo.pop()
        readers.setdefault(call, [])
        for child in children(call):
            if isinstance(child, PatternCall):
                if child not in readers:
                    todo.append(child)
                if call not in readers.setdefault(child, []):
                    readers[child].append(call)
    return readers


def _height(tree: PatternTree) -> int:
    heights: dict[PatternCall, int] = {}

    def height(call: PatternCall) -> int:
        if call not in heights:
            heights[call] = 1 + max(
                (height(each) for each in children(call) if isinstance(each, PatternCall)), default=0
            )
        return heights[call]

    return max(height(output) for output in tree.outputs)


def _find_roots_above(
    tree: PatternTree, readers: dict[PatternCall, list[PatternCall]], call: PatternCall, node: fx.Node
) -> set[fx.Node]:
    """Return where the pattern's output would be if `node` is this call, with at most one difference on the way."""
    roots: set[fx.Node] = set()
    seen = set()
    todo = [(node, call, 0)]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        at, standing_for, differences = state
        if standing_for is tree.outputs[0]:
            roots.add(at)
            continue
        users = list(at.users) if len(at.users) <= _MAX_USERS else []
        for reader in readers[standing_for]:
            for user in users:
                if reader.accepts(user.target):
                    todo.append((user, reader, differences))
                elif not differences and user.op == "call_function":
                    todo += [(user, reader, 1), (user, standing_for, 1)]
            if not differences:
                todo.append((at, reader, 1))
    return roots


def operator_name(call: fx.Node | PatternCall) -> str:
    """Return the name of the operator of a call, without namespace and overload."""
    name = target_text(call.target).split(".")
    return name[1] if isinstance(call.target, torch._ops.OpOverload) else name[-1]


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return type_text(value) if isinstance(value, torch.Tensor) else str(value)
