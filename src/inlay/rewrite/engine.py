"""Find the sites of a rule, resolve overlaps, replace, and keep every miss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import ProgramError, one_line
from inlay.program.graphs import TOLD_BY_OFFSET, all_graphs, is_returned, mutates, provenance, subgraphs
from inlay.program.stated import difference
from inlay.program.symbols import FakeValues, symbolic_sizes
from inlay.program.trace import traced
from inlay.program.types import settle as settle_types
from inlay.rewrite.reasons import Reason
from inlay.rewrite.rule import Alternative, Miss, Refusal, Rule, Site
from inlay.rewrite.trees import PATTERNS, Tree
from inlay.rewrite.walker import Found, Walker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inlay.program.graphs import Types
    from inlay.program.program import Program

_WORTH_TELLING = 0.5
"""A place that matched less of a pattern than this does not start like it."""


@dataclass
class Outcome:
    """What a rule did to a program."""

    sites: list[Site] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)


def rewrite(program: Program, rule: Rule) -> Outcome:
    """Apply a rule wherever it matches, in `program` itself and in its nested graphs."""
    outcome = Outcome()
    alternatives = alternatives_for(program, rule)
    replacements = Replacements(rule)
    for _, graph in all_graphs(program.graph):
        accepted, misses = settle(program, graph, rule, alternatives, replacements)
        replaced: dict[fx.Node, fx.Node] = {}
        moved: set[fx.Node] = set()
        for site, alternative in sorted(accepted, key=lambda pair: pair[0].nodes[-1]):
            if not rule.takes(site.outputs[0]):
                continue
            try:
                moved |= _replace(site, alternative, replacements, replaced)
            except Refusal as refusal:
                misses.append(_refused(site, refusal))
                continue
            outcome.sites.append(site)
        if moved:
            returned = {each: each.meta["val"] for each in graph.output_node().all_input_nodes}
            settle_types(graph, moved, FakeValues.of(program.graph))
            _keep_layout(program, graph, returned)
        outcome.misses.extend(misses)
    return outcome


def alternatives_for(program: Program, *rules: Rule) -> list[Alternative]:
    """Every pattern of the rules, in every dtype that the program uses; they are traced together."""
    dtypes = {
        value.dtype
        for _, graph in all_graphs(program.graph)
        for node in graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_floating_point()
    }
    found = [each for rule in rules for each in rule.alternatives(dtypes)]
    PATTERNS.trace((each.function, each.example) for each in found)
    return found


def settle(
    program: Program,
    graph: fx.Graph,
    rule: Rule,
    alternatives: list[Alternative],
    replacements: Replacements | None = None,
) -> tuple[list[tuple[Site, Alternative]], list[Miss]]:
    """The sites of one graph that may be replaced together, and every miss; the graph stays as it is."""
    found, misses = _search(program, graph, rule, alternatives, replacements or Replacements(rule))
    claimed: dict[fx.Node, Site] = {}
    accepted: list[tuple[Site, Alternative]] = []
    for site, alternative in found:
        other = next((claimed[node] for node in site.nodes if node in claimed), None)
        if other is not None:
            reason = f"overlapped by the site at {other.outputs[0]}"
            misses.append(Miss(site.outputs[0], site.outputs[0], reason, len(site.nodes), len(site.nodes)))
            continue
        claimed.update(dict.fromkeys(site.nodes, site))
        accepted.append((site, alternative))
    return accepted, misses


def _search(
    program: Program, graph: fx.Graph, rule: Rule, alternatives: list[Alternative], replacements: Replacements
) -> tuple[list[tuple[Site, Alternative]], list[Miss]]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in order if mutates(node)]
    sites: dict[fx.Node, tuple[Site, Alternative]] = {}
    misses: dict[fx.Node, Miss] = {}
    for alternative in alternatives:
        tree = PATTERNS.get(alternative.function, alternative.example)
        walker = Walker(tree, rule.loose)
        for root in graph.nodes:
            if root.target is not tree.outputs[0].target or root in sites:
                continue
            result = walker.match(root)
            if isinstance(result, Found):
                site = _site(program, graph, tree, result, order)
                miss = _refusal(site, replacements, alternative, order, writes)
                if miss is None:
                    sites[root] = (site, alternative)
                    misses.pop(root, None)
                    continue
            elif result.matched < max(2, tree.calls * _WORTH_TELLING):
                continue
            else:
                miss = Miss(root, result.node or root, result.reason, result.matched, tree.calls)
            if root not in misses or (miss.refused, miss.matched) > (misses[root].refused, misses[root].matched):
                misses[root] = miss
    # Where two sites overlap, the one that explains more wins, then the earlier one.
    ordered = sorted(sites.values(), key=lambda pair: (-len(pair[0].nodes), order[pair[0].outputs[0]]))
    return ordered, [miss for root, miss in misses.items() if root not in sites]


def _site(program: Program, graph: fx.Graph, tree: Tree, found: Found, order: dict[fx.Node, int]) -> Site:
    nodes = tuple(sorted(found.nodes.values(), key=order.__getitem__))
    return Site(program, graph, found.values, nodes, tuple(found.nodes[call] for call in tree.outputs))


def _refusal(
    site: Site, replacements: Replacements, alternative: Alternative, order: dict[fx.Node, int], writes: list[fx.Node]
) -> Miss | None:
    """Why a matched site must be left alone, if it must."""
    first, last = order[site.nodes[0]], order[site.nodes[-1]]
    try:
        for write in writes:
            between = first < order[write] < last
            site.require(not between, f"mutation between: {write} writes in place inside the pattern", write)
        for name, held in site.values.items():
            expected = alternative.example.get(name)
            if isinstance(expected, torch.Tensor):
                site.require(isinstance(site.value(name), torch.Tensor), f"shape: {name} is not a tensor")
            elif isinstance(expected, (int, float)):
                constant = not isinstance(held, fx.Node)
                site.require(constant, f"constant differs: {name} is computed, not a constant", site.node(name))
        _place(site, [held for held in site.values.values() if isinstance(held, fx.Node)])
        _check_types(site, alternative)
        replacements.rule.check(site)
        replacements.check(site, alternative)
    except Refusal as refusal:
        return _refused(site, refusal)
    return None


def _refused(site: Site, refusal: Refusal) -> Miss:
    node = refusal.node or site.outputs[0]
    return Miss(site.outputs[0], node, refusal.reason, len(site.nodes), len(site.nodes), refused=True)


def _place(site: Site, inputs: Iterable[fx.Node]) -> fx.Node:
    """The node before which a replacement may stand: after all that it reads, before all that read it."""
    inside = set(site.nodes)
    readers = [user for output in site.outputs for user in output.users if user not in inside]
    place = min([site.nodes[-1], *readers])
    for node in inputs:
        late = f"another consumer: {place} reads a result before {node}, which the pattern needs, is computed"
        site.require(node < place, late, place)
    return place


def _arguments(site: Site, names: Iterable[str]) -> dict[str, Any]:
    return {name: site.value(name) for name in names}


def _check_types(site: Site, alternative: Alternative) -> None:
    """The pattern, computed on the site's own inputs, must give what the site gives: else it matched by accident."""
    try:
        with symbolic_sizes():
            made = tree_leaves(alternative.function(**_arguments(site, alternative.example)))
    except Exception as error:
        raise Refusal(f"shape: the pattern cannot be computed here: {one_line(error)}", None) from error
    for node, value in zip(site.outputs, made, strict=True):
        held = node.meta["val"]
        kind = "dtype" if held.dtype != value.dtype else "shape"
        same = _text(held) == _text(value)
        site.require(same, f"{kind}: the pattern gives {_text(value)}, {node} is {_text(held)}", node)


def _text(value: torch.Tensor) -> str:
    return f"{value.dtype}{[str(size) for size in value.shape]}"


class Replacements:
    """The replacement of a rule as a graph, traced once for all sites whose inputs are of the same types."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._traces: dict[Any, fx.Graph] = {}

    def trace(self, site: Site, alternative: Alternative) -> fx.Graph:
        """The replacement over the site's own inputs: a placeholder for each that is a tensor, in order."""
        arguments = {**_arguments(site, alternative.example), **alternative.fixed}
        key = tuple((name, _key(value)) for name, value in arguments.items())
        if key not in self._traces:
            self._traces[key] = _trace(self.rule, arguments)
        return self._traces[key]

    def check(self, site: Site, alternative: Alternative) -> None:
        """What replaces a value must be of its dtype and shape, and lie in memory as it did where that is visible."""
        made, wrong = _results(self.trace(site, alternative)), Reason.REPLACEMENT.value
        found, wanted = len(made), len(site.outputs)
        site.require(found == wanted, f"{wrong}: it gives {found} values, and the pattern {wanted}")
        for old, new in zip(site.outputs, made, strict=True):
            value = new.meta["val"] if isinstance(new, fx.Node) else new
            gives, was = difference(value, old.meta["val"], site.program.types)
            kept = _only_moved(value, old.meta["val"]) and (
                not _layout_is_seen(site, old) or _same_when_copied(value, old.meta["val"], site.program.types)
            )
            site.require(gives == was or kept, f"{wrong}: it gives {gives}, and {old} is {was}", old)


def _key(value: Any) -> Any:
    """1, 1.0 and True are equal and not the same, as 0.0 and -0.0."""
    return (_text(value), str(value.stride())) if isinstance(value, torch.Tensor) else (type(value), repr(value))


def _results(trace: fx.Graph) -> list[Any]:
    return tree_leaves(trace.output_node().args[0])


def _replace(
    site: Site, alternative: Alternative, replacements: Replacements, replaced: dict[fx.Node, fx.Node]
) -> set[fx.Node]:
    """Put the replacement in; which of its values lie in memory in another way than what they replace.

    `replaced` knows what became of the outputs of sites before, which this one may read.
    """
    trace = replacements.trace(site, alternative)
    placeholders = [node for node in trace.nodes if node.op == "placeholder"]
    read = [site.values[name] for name in alternative.example if isinstance(site.value(name), torch.Tensor)]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders, (replaced.get(node, node) for node in read), strict=True))
    with site.graph.inserting_before(_place(site, mapping.values())):
        for node in trace.nodes:
            if node.op == "call_function":
                mapping[node] = site.graph.node_copy(node, mapping.__getitem__)
                kept = {"val": node.meta.get("val")}
                mapping[node].meta = kept | provenance(site.outputs[0])
    moved = set()
    for old, new in zip(site.outputs, _results(trace), strict=True):
        made = mapping[new]
        if difference(new.meta["val"], old.meta["val"], site.program.types) != ("", ""):
            if _layout_is_seen(site, old):
                made = _copied(made, old)
            else:
                moved.add(made)
        old.replace_all_uses_with(made)
        replaced[old] = made
    for node in reversed(site.nodes):
        if node.users:
            raise ProgramError(f"{replacements.rule.name}: {node} is still read after its replacement.")
        site.graph.erase_node(node)
    return moved


def _only_moved(one: Any, two: torch.Tensor) -> bool:
    """Whether two values differ in their strides at most."""
    return isinstance(one, torch.Tensor) and _text(one) == _text(two)


def _same_when_copied(value: torch.Tensor, old: torch.Tensor, types: Types) -> bool:
    """Whether a contiguous copy of a value lies in memory as `old` does."""
    with symbolic_sizes():
        return difference(_contiguous(value), old, types) == ("", "")


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = torch.ops.aten.clone.default(value, memory_format=torch.contiguous_format)
    return copy


def _copied(made: fx.Node, old: fx.Node) -> fx.Node:
    """A contiguous copy, for those who see how the value lies in memory."""
    with made.graph.inserting_after(made):
        copy = made.graph.call_function(
            torch.ops.aten.clone.default, (made,), {"memory_format": torch.contiguous_format}
        )
    with symbolic_sizes():
        copy.meta = {"val": _contiguous(made.meta["val"])} | provenance(old)
    return copy


def _layout_is_seen(site: Site, value: fx.Node) -> bool:
    """Whether strides matter elsewhere: the value is returned, a nested graph may read what is computed from it, or a
    view says where in memory each of its elements lies."""
    return is_returned(value) or any(subgraphs(site.program.graph)) or _is_told_by_offset(value)


def _keep_layout(program: Program, graph: fx.Graph, returned: Mapping[fx.Node, Any]) -> None:
    """What a graph returns lies in memory as it did; the caller may view it."""
    output = graph.output_node()
    for node, value in returned.items():
        now = node.meta["val"]
        if difference(now, value, program.types) != ("", "") and _same_when_copied(now, value, program.types):
            output.replace_input_with(node, _copied(node, node))


def _is_told_by_offset(value: fx.Node) -> bool:
    """Whether `as_strided` reads a value, or something that is computed from it and may lie in memory as it does."""
    find = value.graph.find_nodes
    last = max((node for target in TOLD_BY_OFFSET for node in find(op="call_function", target=target)), default=value)
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop()
        if node.target in TOLD_BY_OFFSET and node is not value:
            return True
        users = [user for user in node.users if user not in seen and user <= last]
        todo += users
        seen.update(users)
    return False


def _trace(rule: Rule, arguments: dict[str, Any]) -> fx.Graph:
    """The replacement as a graph over the site's own inputs."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in arguments.items() if name not in tensors}

    def run(*values: torch.Tensor) -> Any:
        return rule.replacement(**dict(zip(tensors, values, strict=True)), **numbers)

    try:
        with symbolic_sizes():
            # Two arguments that are one value here may be two at the next site: each gets a tensor of its own.
            return traced(run, [value.detach() for value in tensors.values()]).graph
    except Exception as error:
        raise ProgramError(f"The replacement of {rule.name} cannot be traced: {one_line(error)}.") from error
