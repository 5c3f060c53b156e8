"""Align a pattern with a graph where it does not match, with the fewest differences.

The matcher stops at the first difference, which may not be the cause: an extra node shifts everything after it. The
aligner records a difference and tries every way to continue: the program has an extra node, lacks one, has another
operator or another constant. The alignment of lowest cost is the explanation. This is slower than matching, and runs
only when an explanation is requested.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.call_arguments import COMMUTATIVE, normalize_args
from inlay.program.graphs import operands
from inlay.rewrite.differences import (
    PartialMatch,
    PatternDifference,
    code_location,
    constant_difference,
    extra_node,
    missing_node,
    missing_node_between,
)
from inlay.rewrite.matcher import argument_orders, is_same_constant
from inlay.rewrite.pattern_trees import PatternCall, PatternTree, PatternVariable, children, subtree_calls
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

_MAX_STEPS = 4000
"""After this many steps at a site, the best alignment found so far is used."""
MAX_DIFFERENCES = 3
"""A site with more differences is not a near miss."""
_CONFLICT_COST = 1.5
_MIN_COST = 1.0
"""The minimum cost of a difference."""
_UNUSUAL_COST = 0.01
_OPERAND_COUNT_COST = 0.5


class Aligner:
    """Aligns one pattern with sites of a graph."""

    budgets: tuple[float, ...] = (1.1, 2.1, MAX_DIFFERENCES + 0.6)
    """Costs up to which an alignment is searched, one after the other until one is found."""
    is_commutative = True
    """Whether the operands of an addition or multiplication may be swapped."""
    missing_output_cost = 0.0
    """Added to the cost of an alignment in which the output of the pattern is missing."""

    def __init__(
        self,
        tree: PatternTree,
        example: Mapping[str, Any],
        ignored_args: frozenset[str] = frozenset(),
        site_values: Mapping[str, set[Any]] | None = None,
        is_site_location: Callable[[fx.Node], bool] = lambda node: False,
        site_nodes: Collection[fx.Node] = (),
    ) -> None:
        """Set up an aligner.

        `site_values` are the values of variables at matched sites; an alignment with such values is preferred.
        `is_site_location` returns whether a node is where other layers have nodes of sites; it is then reported as
        found instead of a missing node.
        `site_nodes` are the nodes of matched sites; they cannot be part of another site.
        """
        self.tree, self.example, self.ignored_args = tree, example, ignored_args
        self.site_values, self.is_site_location, self.site_nodes = site_values or {}, is_site_location, site_nodes
        self.budget, self.steps = 0.0, 0

    def best_match(self, root: fx.Node) -> PartialMatch | None:
        """Return the cheapest alignment with the first output at `root`; None if there are too many differences."""
        for budget in self.budgets:
            self.budget, self.steps = budget, 0
            best: PartialMatch | None = None
            for partial in self._align(self.tree.outputs[0], root, root, PartialMatch()):
                complete = self._check_consumers(self._align_other_outputs(partial, root), root)
                better = best is None or (complete.cost, -len(complete.nodes)) < (best.cost, -len(best.nodes))
                if complete.cost <= self.budget and better:
                    best, self.budget = complete, complete.cost
                if self.steps > _MAX_STEPS:
                    break
            if best is not None:
                return best
        return None

    def _align(
        self, pattern: Any, value: Any, reader: fx.Node, state: PartialMatch, name: str = ""
    ) -> Iterator[PartialMatch]:
        """Yield every way to align `pattern` with `value`, which `reader` reads as argument `name`."""
        self.steps += 1
        if state.cost > self.budget or self.steps > _MAX_STEPS:
            return
        if isinstance(pattern, PatternVariable):
            yield from self._align_variable(pattern, value, reader, state)
        elif isinstance(pattern, PatternCall):
            yield from self._align_call(pattern, value, reader, state)
        elif isinstance(pattern, list):
            yield from self._align_list(pattern, value, reader, state, name)
        elif is_same_constant(pattern, value):
            yield state
        else:
            yield state.with_difference(constant_difference(name, pattern, value, reader))

    def _align_list(
        self, pattern: list[Any], value: Any, reader: fx.Node, state: PartialMatch, name: str
    ) -> Iterator[PartialMatch]:
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            pairs = [(name, one, two) for one, two in zip(pattern, value, strict=True)]
            if any(isinstance(each, (PatternCall, PatternVariable)) for each in pattern):
                yield from self._align_all(pairs, reader, state)
                if len(pattern) == 2:
                    yield from self._align_swapped(pairs, reader, state)
                return
            if all(is_same_constant(one, two) for _, one, two in pairs):
                yield state
                return
            if any(isinstance(each, fx.Node) for each in value):
                yield from self._align_all(pairs, reader, state)
                return
        lost = sum(len(subtree_calls(each) - state.nodes.keys()) for each in pattern)
        yield state.with_difference(constant_difference(name, pattern, value, reader), extra_cost=lost)

    def _align_swapped(
        self, pairs: list[tuple[str, Any, Any]], reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        (name, one, first), (other, two, second) = pairs
        difference = PatternDifference(Reason.MISSING, f"the operands of {reader} are swapped", reader)
        yield from self._align_all(
            [(name, one, second), (other, two, first)], reader, state.with_difference(difference)
        )

    def _align_variable(
        self, pattern: PatternVariable, value: Any, reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        name = pattern.name
        known = state.values.get(name, state)
        if known is state:
            yield from self._bind_variable(name, value, reader, state)
            return
        if known is value or is_same_constant(known, value):
            yield state
            return
        if isinstance(value, fx.Node) and isinstance(known, fx.Node):
            for node in _connecting_call(value, known):
                yield state.with_difference(extra_node(node), node)
            for node in _connecting_call(known, value):
                yield state.bind(name, value).with_difference(extra_node(node), node)
        node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
        text = f"{name} is {known} in one place and {value} in another"
        yield state.with_difference(PatternDifference(Reason.MISSING, text, node, _CONFLICT_COST))

    def _bind_variable(self, name: str, value: Any, reader: fx.Node, state: PartialMatch) -> Iterator[PartialMatch]:
        bound, expected = state.bind(name, value), self.example.get(name)
        computed, tensor = isinstance(value, fx.Node), isinstance(expected, torch.Tensor)
        if tensor == computed:
            odd = name in self.site_values and value_signature(value) not in self.site_values[name]
            yield replace(bound, cost=bound.cost + _UNUSUAL_COST) if odd else bound
        elif tensor:
            text = f"{name} is {value} in {reader}; expected a tensor"
            yield bound.with_difference(PatternDifference(Reason.CONSTANT, text, reader))
        else:
            yield bound.with_difference(
                PatternDifference(Reason.CONSTANT, f"{name} is computed, not a constant", value)
            )

    def _align_call(
        self, pattern: PatternCall, value: Any, reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        if pattern in state.nodes:
            yield from self._align_repeated_call(pattern, state.nodes[pattern], value, reader, state)
            return
        free = (
            value not in self.site_nodes and value not in state.nodes.values() if isinstance(value, fx.Node) else False
        )
        if free and pattern.accepts(value.target):
            yield from self._align_same_operator(pattern, value, state)
            if not any(pattern.accepts(each.target) for each in operands(value)):
                return
        if not self._is_affordable(state):
            return
        unseen = len(subtree_calls(pattern) - state.nodes.keys())
        if isinstance(value, fx.Node) and value.op == "call_function":
            for each in dict.fromkeys(operands(value)):
                yield from self._align(pattern, each, value, state.with_difference(extra_node(value), value))
            yield from self._align_other_operator(pattern, value, reader, state)
        for child in children(pattern):
            lost = unseen - 1.0 - len(subtree_calls(child) - state.nodes.keys())
            lost += self.missing_output_cost if value is reader else 0.0
            if not self._is_affordable(state, lost):
                continue
            instead = isinstance(child, PatternVariable) and isinstance(value, fx.Node) and self.is_site_location(value)
            left_out = missing_node(pattern, value, reader) if instead else missing_node_between(pattern, value, reader)
            yield from self._align(child, value, reader, state.with_difference(left_out, extra_cost=lost))
        if self._is_affordable(state, unseen - 1):
            yield state.with_difference(missing_node(pattern, value, reader), extra_cost=unseen - 1)

    def _is_affordable(self, state: PartialMatch, extra_cost: float = 0.0) -> bool:
        """Return whether one more difference is within the budget."""
        return state.cost + _MIN_COST + extra_cost <= self.budget

    def _align_repeated_call(
        self, pattern: PatternCall, known: fx.Node, value: Any, reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        """Align a call that the pattern reads more than once: it must be one node."""
        if known is value:
            yield state
            return
        if isinstance(value, fx.Node):
            for node in _connecting_call(value, known):
                yield state.with_difference(extra_node(node), node)
        node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
        yield state.with_difference(
            PatternDifference(Reason.MISSING, f"{known} expected, {value} found", node, _CONFLICT_COST)
        )

    def _align_same_operator(self, pattern: PatternCall, value: fx.Node, state: PartialMatch) -> Iterator[PartialMatch]:
        found, actual = state.with_node(pattern, value), self._arguments(value)
        for arguments in self._argument_orders(pattern):
            pairs = [(name, each, actual.get(name)) for name, each in arguments if name not in self.ignored_args]
            yield from self._align_all(pairs, value, found)
        inputs = [
            (name, each, actual.get(name))
            for name, each in pattern.args
            if isinstance(each, (PatternCall, PatternVariable))
        ]
        if len(inputs) == 2 and (pattern.target not in COMMUTATIVE or not self.is_commutative):
            rest = [
                (name, each, actual.get(name))
                for name, each in pattern.args
                if not isinstance(each, (PatternCall, PatternVariable)) and name not in self.ignored_args
            ]
            for swapped in self._align_swapped(inputs, value, found):
                yield from self._align_all(rest, value, swapped)

    def _arguments(self, value: fx.Node) -> dict[str, Any]:
        return dict(normalize_args(value))

    def _argument_orders(self, pattern: PatternCall) -> Iterator[tuple[tuple[str, Any], ...]]:
        return argument_orders(pattern) if self.is_commutative else iter([pattern.args])

    def _align_other_operator(
        self, pattern: PatternCall, value: fx.Node, reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        """Align another operator with a call of the pattern; its operands may still match."""
        wanted, given = children(pattern), operands(value)
        more = 0.0 if len(wanted) == len(given) else _OPERAND_COUNT_COST
        for order in [given, given[::-1]] if len(given) == 2 else [given]:
            lost = sum(len(subtree_calls(each) - state.nodes.keys()) for each in wanted[len(order) :])
            if not self._is_affordable(state, more + lost):
                continue
            changed = state.with_difference(missing_node(pattern, value, reader), value, extra_cost=more + lost)
            yield from self._align_all(
                [("", one, two) for one, two in zip(wanted, order, strict=False)], value, changed
            )

    def _align_all(
        self, pairs: list[tuple[str, Any, Any]], reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        if not pairs:
            yield state
            return
        (name, pattern, value), *rest = pairs
        for each in self._align(pattern, value, reader, state, name):
            yield from self._align_all(rest, reader, each)

    def _align_other_outputs(self, partial: PartialMatch, root: fx.Node) -> PartialMatch:
        for output in self.tree.outputs[1:]:
            if output in partial.nodes:
                continue
            near = [each for each in (*partial.nodes.values(), *partial.values.values()) if isinstance(each, fx.Node)]
            users = sorted({user for node in near for user in node.users} - set(partial.nodes.values()))
            ways = [
                way for node in users if output.accepts(node.target) for way in self._align(output, node, node, partial)
            ]
            lost = len(subtree_calls(output) - set(partial.nodes))
            none = partial.with_difference(
                missing_node(output, None, next(iter(partial.nodes.values()), root)), extra_cost=lost - 1
            )
            partial = min([*ways, none], key=lambda way: way.cost)
        return partial

    def _check_consumers(self, partial: PartialMatch, root: fx.Node) -> PartialMatch:
        """Record a difference for every inner value that is read outside the match."""
        inside = set(partial.nodes.values())
        known = inside | partial.extra_nodes
        outputs = {root, *(partial.nodes[call] for call in self.tree.outputs if call in partial.nodes)}
        for name, value in partial.values.items():
            if isinstance(value, fx.Node) and value in inside:
                text = f"{value} is both {name} and inside the pattern"
                partial = partial.with_difference(PatternDifference(Reason.ANOTHER_CONSUMER, text, value))
        for node in sorted(inside - outputs):
            other = next((user for user in node.users if user not in known), None)
            if other is not None:
                text = f"{node} is also read by {other}"
                partial = partial.with_difference(PatternDifference(Reason.ANOTHER_CONSUMER, text, node))
        return partial


def value_signature(value: Any) -> Any:
    """Return an identity of a variable's value, equal for all layers: a number, or operator and code location."""
    if not isinstance(value, fx.Node):
        return value
    return (value.target, code_location(value)) if value.op == "call_function" else value.op


def _connecting_call(start: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """Yield `start` if it is a call that reads `end` directly."""
    if start.op == "call_function" and end in operands(start):
        yield start
