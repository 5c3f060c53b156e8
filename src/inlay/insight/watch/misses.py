"""Search the near misses of observed patterns in a copy of a graph."""

from __future__ import annotations

import operator
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.insight.findings import Finding, fold_misses, layer_of
from inlay.insight.watch.bisection import LIMIT
from inlay.program.exported_program import select_meta
from inlay.program.graphs import copy_graph, is_sorted
from inlay.rewrite.differences import meta_location
from inlay.rewrite.near_misses import (
    COMMON_OPERATORS,
    REFUSAL_COST,
    KnownSites,
    NearMiss,
    NearMissFinder,
    drop_overlapping,
    operator_name,
)
from inlay.rewrite.partial_match import MAX_DIFFERENCES
from inlay.rewrite.pattern_trees import subtree_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from inlay.rewrite.differences import CodeLocation, PatternDifference
    from inlay.rewrite.partial_match import Aligner
    from inlay.rewrite.pattern_trees import PatternTree


_INDUCTOR_META = frozenset({"custom"})
"""Metadata that Inductor's matcher reads: the stream of a node."""
_COMMON = frozenset({*COMMON_OPERATORS, "convert_element_type", "permute"})


@dataclass
class ObservedPattern:
    """A pattern, its matches in a graph, and the matches that a check refused."""

    name: str
    tree: PatternTree | None
    aligner: Callable[..., Aligner]
    matches: list[list[fx.Node]] = field(default_factory=list)
    """The nodes of each match, the root last."""
    refusals: list[tuple[list[str], PatternDifference]] = field(default_factory=list)
    """The names of the nodes of a match, the root first, and why a check refused it."""

    def is_plausible(self, there: Counter[Any]) -> bool:
        """Return whether a graph calls enough of the pattern's operators for a near miss.

        If the graph has none of its matches and lacks two of its operators, those that are there must not all be
        operators that most graphs have.
        """
        if self.tree is None:
            return False
        calls = {call for output in self.tree.outputs for call in subtree_calls(output)}
        calls = {call for call in calls if call.target is not operator.getitem} or calls
        found = [call for call in calls if there[call.target] > 0 or any(there[each] for each in call.others)]
        lacking = {call.target for call in calls} - {call.target for call in found}
        if not self.matches and len(lacking) > 1 and _COMMON.issuperset(map(operator_name, found)):
            return False
        return len(found) >= max(len(calls) - MAX_DIFFERENCES, len(calls) / 2) and (len(found) > 1 or len(calls) == 1)


def find_findings(
    graph: fx.Graph, patterns: Sequence[ObservedPattern], taken: Collection[fx.Node] = ()
) -> list[Finding]:
    """Return the near misses of patterns in a graph, closest first. Nodes in `taken` are not part of a site."""
    if os.environ.get(LIMIT):  # the runs of a bisection need only the matches
        return []
    there = Counter(node.target for node in graph.nodes if node.op == "call_function")
    plausible = [each for each in patterns if each.is_plausible(there)]
    if not plausible and not any(each.refusals for each in patterns):
        return []
    # In a thread of its own: the call stack of a compilation is deep, and Python 3.11 then allocates memory at many of
    # the calls of a recursive search, which takes several times as long.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_search, graph, patterns, plausible, taken).result()


def _search(
    graph: fx.Graph,
    patterns: Sequence[ObservedPattern],
    plausible: Sequence[ObservedPattern],
    taken: Collection[fx.Node],
) -> list[Finding]:
    copied = copy_graph(graph) if is_sorted(graph) else _sorted_copy(graph)
    nodes = {node.name: node for node in copied.nodes}
    for node in copied.nodes:
        node.meta = select_meta(node) | {key: node.meta[key] for key in _INDUCTOR_META & node.meta.keys()}
    claimed = frozenset(nodes[node.name] for node in taken)
    misses: list[tuple[str, NearMiss]] = []
    for pattern in patterns:
        misses += [(pattern.name, each) for each in _refused(pattern, nodes)]
    for pattern in plausible:
        assert pattern.tree is not None
        matched = {node for match in pattern.matches for node in _left_nodes(match, nodes)}
        finder = NearMissFinder(copied, [(pattern.tree, {})], _known_sites(pattern, claimed | matched), pattern.aligner)
        refused = {names[0] for names, _ in pattern.refusals}
        misses += [(pattern.name, each) for each in finder.find_misses() if each.root.name not in refused]
    kept = set(drop_overlapping([miss for _, miss in misses]))
    findings: list[Finding] = []
    for name in dict.fromkeys(name for name, _ in misses):
        group = [miss for each, miss in misses if each == name and miss in kept]
        sites = [_location(match[-1]) for each in patterns if each.name == name for match in each.matches]
        findings += fold_misses(name, group, sites, lambda node: layer_of(node, dict))
    return sorted(findings, key=lambda each: (each.is_trivial, each.of - each.matched))


def _sorted_copy(graph: fx.Graph) -> fx.Graph:
    """Copy a graph in which a pass has left a call before its operands: Inductor sorts it later."""
    made, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    todo, waiting = [*reversed(graph.nodes)], set[fx.Node]()
    while todo:
        node = todo.pop()
        if missing := [each for each in node.all_input_nodes if each not in mapping]:
            if node in waiting:
                raise ValueError(f"the graph has a cycle at {node}")
            waiting.add(node)
            todo += [node, *reversed(missing)]
        elif node not in mapping:
            mapping[node] = made.node_copy(node, mapping.__getitem__)
            mapping[node].name = node.name
    return made


def _left_nodes(match: Sequence[fx.Node], nodes: dict[str, fx.Node]) -> list[fx.Node]:
    """Return the nodes of a match that are still in the graph, without those that other calls read."""
    left = [nodes[node.name] for node in match if node.name in nodes]
    return [node for node in left if node.name == match[-1].name or node.users.keys() <= set(left)]


def _refused(pattern: ObservedPattern, nodes: dict[str, fx.Node]) -> list[NearMiss]:
    made = []
    for (root, *names), reason in pattern.refusals:
        if root in nodes:
            covered = tuple(nodes[name] for name in names if name in nodes)
            at, size = nodes.get(reason.node.name, nodes[root]), len(names)
            cost = REFUSAL_COST * reason.cost
            made.append(NearMiss(nodes[root], at, reason.kind, reason.text, size, size, nodes=covered, cost=cost))
    return made


def _known_sites(pattern: ObservedPattern, taken: frozenset[fx.Node]) -> KnownSites:
    found = [list(map(_location, nodes)) for nodes in pattern.matches]
    locations = frozenset(each for places in found for each in places)
    return KnownSites(nodes=taken, locations=locations, sizes={places[-1]: len(places) for places in found})


def _location(node: fx.Node) -> CodeLocation:
    return meta_location(select_meta(node))
