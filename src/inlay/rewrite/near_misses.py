"""Where a rule almost matched, and what is different there. Slow and thorough: called only when somebody asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.program.graphs import all_graphs, operands, target_text
from inlay.rewrite.aligner import MOST_DIFFERENCES, Aligner, standing
from inlay.rewrite.differences import Difference, Partial, children, role
from inlay.rewrite.engine import alternatives_for, settle
from inlay.rewrite.reasons import Reason, reason_of
from inlay.rewrite.rule import Miss
from inlay.rewrite.trees import PATTERNS, Call, Tree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

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
    covered: int = 0
    """How many nodes of the program it accounts for, those that differ included."""
    alike: float = 0.0
    """How much of it stands where, in other layers, sites stand: 0 to 1."""


@dataclass(frozen=True, eq=False)
class Search:
    """What a rule matches in a program, and what it almost matches, best first."""

    sites: tuple[Site, ...]
    misses: tuple[NearMiss, ...]


def near_misses(program: Program, rule: Rule) -> Search:
    """Every place that starts like a rule and is none of its sites; `program` stays as it is."""
    alternatives = alternatives_for(program, rule)
    sites: list[Site] = []
    found: list[NearMiss] = []
    for _, graph in all_graphs(program.graph):
        accepted, misses = settle(program, graph, rule, alternatives)
        places = _Places(graph, rule, alternatives, accepted)
        refused = [miss for each in misses if each.refused for miss in places.refused(each)]
        found += _apart([*refused, *places.misses()])
        found += [miss for each in misses if reason_of(each.reason) is Reason.OVERLAPPED for miss in places.lost(each)]
        found += places.taken()
        sites += [site for site, _ in accepted]
    return Search(tuple(sites), tuple(sorted(found, key=_rank)))


def _rank(miss: NearMiss) -> tuple[float, ...]:
    overlapped = reason_of(miss.reason) is Reason.OVERLAPPED
    return (overlapped, -round(miss.alike, 1), miss.cost / max(miss.of, 1), -miss.matched)


def _apart(misses: Sequence[NearMiss]) -> list[NearMiss]:
    """One miss a place: of those that share nodes, the one that explains most for least."""
    taken: set[fx.Node] = set()
    kept = []
    for miss in sorted(misses, key=lambda each: (each.cost - each.alike / 2, -each.covered)):
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
        self.roles = {role(node) for node in self.claimed}
        self.outputs = {role(site.outputs[0]): len(site.nodes) for site in self.sites}
        trees: dict[Tree, Alternative] = {}
        for alternative in alternatives:
            trees.setdefault(PATTERNS.get(alternative.function, alternative.example), alternative)
        # Written the way that matches elsewhere in this program is the likelier way to be meant here.
        used = Counter(PATTERNS.get(each.function, each.example) for _, each in accepted)
        self.trees = sorted(trees.items(), key=lambda pair: -used[pair[0]])
        self.usual: dict[str, set[Any]] = {}
        for site in self.sites:
            for name, value in site.values.items():
                self.usual.setdefault(name, set()).add(standing(value))

    def misses(self) -> Iterator[NearMiss]:
        """The best explanation for each place that may have been meant."""
        best: dict[fx.Node, NearMiss] = {}
        for tree, alternative in self.trees:
            aligner = self._aligner(tree, alternative, self.claimed)
            for root in self._roots(tree):
                partial = aligner.best(root)
                if partial is None or not partial.differences:
                    continue
                miss = self._miss(tree, root, partial)
                if self._worth_telling(miss) and (root not in best or miss.cost < best[root].cost):
                    best[root] = miss
        yield from best.values()

    def _aligner(self, tree: Tree, alternative: Alternative, claimed: Collection[fx.Node] = ()) -> Aligner:
        def at_home(node: fx.Node) -> bool:
            return role(node) in self.roles

        return Aligner(tree, alternative.example, self.rule.loose, self.usual, at_home, claimed)

    def taken(self) -> Iterator[NearMiss]:
        """Where sites stand in other layers, and here another transform was first."""
        for node in self.graph.nodes:
            of = self.outputs.get(role(node))
            if of is not None and node not in self.claimed and target_text(node.target).startswith("inlay."):
                reason = f"overlapped by an earlier transform, which made it {target_text(node.target)}"
                difference = Difference(Reason.OVERLAPPED, reason, node)
                yield NearMiss(node, node, reason, 0, of, differences=(difference,), nodes=(node,), cost=1.0, alike=1.0)

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
            covered=len(nodes) + len(partial.beside),
            cost=partial.cost,
            alike=self._alike(root, [*nodes, *partial.beside]),
        )

    def _alike(self, root: fx.Node, nodes: Sequence[fx.Node]) -> float:
        """How much stands where sites stand elsewhere; that the output does counts as much as all the rest."""
        share = sum(role(node) in self.roles for node in nodes) / max(len(nodes), 1)
        return (share + (role(root) in self.outputs)) / 2

    def refused(self, miss: Miss) -> Iterator[NearMiss]:
        """A place where everything matched and a check said no: the operand that is odd is to blame.

        Not told is a place that matched only because a number stood for a tensor: that is a difference like others.
        """
        ways = [self._aligner(tree, each).best(miss.root) for tree, each in self.trees]
        exact = next((way for way in ways if way is not None and not way.differences), None)
        if exact is None and any(way is not None for way in ways):
            return
        nodes = tuple(sorted(exact.nodes.values())) if exact else (miss.root,)
        node = (self._odd_operand(miss, exact) if exact else None) or miss.node
        yield NearMiss(
            *(miss.root, node, miss.reason, miss.matched, miss.of, miss.refused),
            differences=(Difference(reason_of(miss.reason), miss.reason, node),),
            nodes=nodes,
            covered=len(nodes),
            cost=_REFUSED_COST,
            alike=self._alike(miss.root, nodes),
        )

    def lost(self, miss: Miss) -> Iterator[NearMiss]:
        """A place that matched and gave way to another site; told unless that site is the same place, and more."""
        yield from (each for each in self.refused(miss) if not self.claimed.issuperset(each.nodes))

    def _odd_operand(self, miss: Miss, partial: Partial) -> fx.Node | None:
        """The operand whose type is another than at the most similar site; none if the check named a node inside."""
        inputs = {name: value for name, value in partial.values.items() if hasattr(value, "meta")}
        if miss.node is not miss.root and miss.node not in inputs.values():
            return None
        odd = [
            [value for name, value in inputs.items() if (other := site.node(name)) and _type(value) != _type(other)]
            for site in self.sites
            if role(site.outputs[0]) == role(miss.root)
        ]
        fewest = min((each for each in odd if each), key=len, default=[])
        return fewest[0] if fewest else None

    def _roots(self, tree: Tree) -> list[fx.Node]:
        """Nodes that may be the pattern's output, found from the calls of it that stand outside the sites."""
        free: dict[Any, list[fx.Node]] = {}
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
        calls = Counter(call.target for call in readers)
        free_roots = (root for root in roots if root.op == "call_function" and root not in self.claimed)
        return sorted(root for root in free_roots if self._may_be(root, calls, _height(tree)))

    def _may_be(self, root: fx.Node, calls: Counter[Any], height: int) -> bool:
        """Whether enough of the pattern's calls stand near above `root` for a few differences to explain the rest."""
        near, reached = {root}, {root}
        for _ in range(height + 1):
            reached = {each for node in reached for each in operands(node) if each.op == "call_function"} - near
            near |= reached
        there: Counter[Any] = Counter(node.target for node in near if node not in self.claimed)
        wanted = calls.total()
        return (there & calls).total() >= max(wanted - MOST_DIFFERENCES, wanted / 2)


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


def _height(tree: Tree) -> int:
    heights: dict[Call, int] = {}

    def height(call: Call) -> int:
        if call not in heights:
            heights[call] = 1 + max((height(each) for each in children(call) if isinstance(each, Call)), default=0)
        return heights[call]

    return max(height(output) for output in tree.outputs)


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
