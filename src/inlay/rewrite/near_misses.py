"""Where a rule almost matched, and what is different there. Slow and thorough: called only when somebody asks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inlay.program.graphs import MODULE, SOURCE, all_graphs, target_text
from inlay.rewrite.aligner import Aligner
from inlay.rewrite.differences import Difference, Partial, children
from inlay.rewrite.engine import alternatives_for, settle
from inlay.rewrite.reasons import reason_of
from inlay.rewrite.rule import Miss
from inlay.rewrite.trees import PATTERNS, Call, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.rewrite.rule import Alternative, Rule, Site

_MOST_ANCHORS = 400
"""A call that stands more often than this beside the sites says nothing about where to look."""
_MOST_USERS = 16
_EVERYWHERE = ("add", "mul", "sub", "div", "view", "slice", "transpose", "clone", "_to_copy", "expand", "unsqueeze")
_ALWAYS_TOLD = 0.5
_REFUSED_COST = 0.25


@dataclass(frozen=True, eq=False)
class NearMiss(Miss):
    """A place that is almost a site: everything that differs, the first first."""

    differences: tuple[Difference, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    """The nodes of the program that the pattern was laid over."""
    cost: float = 0.0
    alike: float = 0.0
    """How much of it stands where, in other layers, sites stand: 0 to 1."""


@dataclass(frozen=True, eq=False)
class Search:
    """What a rule matches in a program, and what it almost matches, best first."""

    sites: tuple[Site, ...]
    misses: tuple[NearMiss, ...]


def role(node: fx.Node) -> tuple[str, str]:
    """Where in the model a node stands, the same for each layer: module without numbers, and source line."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", str(node.meta.get(MODULE, ""))), str(node.meta.get(SOURCE, ""))


def near_misses(program: Program, rule: Rule) -> Search:
    """Every place that starts like a rule and is none of its sites; `program` stays as it is."""
    alternatives = alternatives_for(program, rule)
    sites: list[Site] = []
    found: list[NearMiss] = []
    for _, graph in all_graphs(program.graph):
        accepted, misses = settle(program, graph, rule, alternatives)
        places = _Places(graph, rule, alternatives, accepted)
        settled = [miss for miss in misses if miss.refused or miss.reason.startswith("overlapped")]
        found += _apart([*(places.refused(miss) for miss in settled), *places.misses()])
        sites += [site for site, _ in accepted]
    return Search(tuple(sites), tuple(sorted(found, key=_rank)))


def _rank(miss: NearMiss) -> tuple[float, ...]:
    return (-round(miss.alike, 1), miss.cost / max(miss.of, 1), -miss.matched)


def _apart(misses: Sequence[NearMiss]) -> list[NearMiss]:
    """One miss a place: of those that share nodes, the one that explains most for least."""
    taken: set[fx.Node] = set()
    kept = []
    for miss in sorted(misses, key=lambda each: (each.cost - each.alike / 2, -each.matched)):
        if not taken.intersection(miss.nodes):
            taken.update(miss.nodes)
            kept.append(miss)
    return kept


class _Places:
    """The places of one graph where a pattern may be laid over."""

    def __init__(
        self,
        graph: fx.Graph,
        rule: Rule,
        alternatives: list[Alternative],
        accepted: list[tuple[Site, Alternative]],
    ) -> None:
        self.graph, self.rule = graph, rule
        self.sites = [site for site, _ in accepted]
        self.claimed = {node for site in self.sites for node in site.nodes}
        self.roles = Counter(role(node) for node in self.claimed)
        trees: dict[Tree, Alternative] = {}
        for alternative in alternatives:
            trees.setdefault(PATTERNS.get(alternative.function, alternative.example), alternative)
        # Written the way that matches elsewhere in this program is the likelier way to be meant here.
        used = Counter(PATTERNS.get(each.function, each.example) for _, each in accepted)
        self.trees = sorted(trees.items(), key=lambda pair: -used[pair[0]])

    def misses(self) -> Iterator[NearMiss]:
        """The best explanation for each place that may have been meant."""
        best: dict[fx.Node, NearMiss] = {}
        for tree, alternative in self.trees:
            aligner = Aligner(tree, alternative.example, self.rule.loose)
            for root in self._roots(tree):
                partial = aligner.best(root)
                if partial is None or not partial.differences:
                    continue
                miss = self._miss(tree, root, partial)
                if self._worth_telling(miss) and (root not in best or miss.cost < best[root].cost):
                    best[root] = miss
        yield from best.values()

    def _worth_telling(self, miss: NearMiss) -> bool:
        if not miss.nodes or any(node in self.claimed for node in miss.nodes):
            return False
        if miss.alike >= _ALWAYS_TOLD:
            return True
        telling = any(not _is_everywhere(node) for node in miss.nodes)
        return 2 * miss.matched >= miss.of and (telling or miss.matched > 2)

    def _miss(self, tree: Tree, root: fx.Node, partial: Partial) -> NearMiss:
        first = min(partial.differences, key=lambda each: each.node)
        nodes = tuple(sorted(partial.nodes.values()))
        return NearMiss(
            *(root, first.node, first.reason, len(nodes), tree.calls),
            differences=partial.differences,
            nodes=nodes,
            cost=partial.cost,
            alike=self._alike([*nodes, *partial.beside]),
        )

    def _alike(self, nodes: Sequence[fx.Node]) -> float:
        return sum(role(node) in self.roles for node in nodes) / max(len(nodes), 1)

    def refused(self, miss: Miss) -> NearMiss:
        """A place where everything matched and a check said no; the operand that is another than elsewhere is to blame."""
        nodes, node = (miss.root,), miss.node
        for tree, alternative in self.trees:
            partial = Aligner(tree, alternative.example, self.rule.loose).best(miss.root)
            if partial is not None and not partial.differences:
                nodes = tuple(sorted(partial.nodes.values()))
                node = self._odd_operand(miss, partial) or node
                break
        difference = Difference(reason_of(miss.reason), miss.reason, node)
        return NearMiss(
            *(miss.root, node, miss.reason, miss.matched, miss.of, miss.refused),
            differences=(difference,),
            nodes=nodes,
            cost=_REFUSED_COST,
            alike=self._alike(nodes),
        )

    def _odd_operand(self, miss: Miss, partial: Partial) -> fx.Node | None:
        """If the check named only the place: the first operand whose type differs from that of a site alike."""
        if miss.node is not miss.root:
            return None
        alike = next((site for site in self.sites if role(site.outputs[0]) == role(miss.root)), None)
        if alike is None:
            return None
        for name, value in partial.values.items():
            other = alike.node(name)
            if other is not None and not isinstance(value, (int, float)) and _type(value) != _type(other):
                odd: fx.Node = value
                return odd
        return None

    def _roots(self, tree: Tree) -> list[fx.Node]:
        """Nodes that may be the pattern's output, found from the calls of it that stand outside the sites."""
        free: dict[object, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in self.claimed:
                free.setdefault(node.target, []).append(node)
        readers = _readers(tree)
        roots: set[fx.Node] = set()
        for call in readers:
            standing = free.get(call.target, [])
            if len(standing) > _MOST_ANCHORS:
                standing = [node for node in standing if role(node) in self.roles]
            for node in standing:
                roots |= _climb(tree, readers, call, node)
        return sorted(root for root in roots if root.op == "call_function" and root not in self.claimed)


def _readers(tree: Tree) -> dict[Call, list[Call]]:
    """Call of a pattern → the calls that read it."""
    readers: dict[Call, list[Call]] = {}
    todo = list(tree.outputs)
    while todo:
        call = todo.pop()
        readers.setdefault(call, [])
        for child in children(call):
            if isinstance(child, Call):
                if child not in readers:
                    todo.append(child)
                if call not in readers.setdefault(child, []):
                    readers[child].append(call)
    return readers


def _climb(tree: Tree, readers: dict[Call, list[Call]], call: Call, node: fx.Node) -> set[fx.Node]:
    """From a node that is this call, to where the pattern's output would be, one difference on the way allowed."""
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
        users = list(at.users) if len(at.users) <= _MOST_USERS else []
        for reader in readers[standing_for]:
            for user in users:
                if user.target is reader.target:
                    todo.append((user, reader, differences))
                elif not differences and user.op == "call_function":
                    todo += [(user, reader, 1), (user, standing_for, 1)]
            if not differences:
                todo.append((at, reader, 1))
    return roots


def _is_everywhere(node: fx.Node) -> bool:
    return target_text(node.target).split(".")[1] in _EVERYWHERE


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype}{[str(size) for size in value.shape]}" if isinstance(value, torch.Tensor) else str(value)
