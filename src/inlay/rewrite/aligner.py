"""Lay a pattern over a graph where it does not match: the way with the fewest differences.

The walker stops at the first disagreement, which may be the wrong one to blame: a node too many shifts everything after
it. Here a disagreement is noted, with every way to go on after it: the program has a node too many, lacks one, has
another operator, another constant. Of all ways the cheapest is the explanation. That takes longer than matching does,
and runs only when somebody asks why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import operands
from inlay.rewrite.differences import (
    Difference,
    Partial,
    calls_below,
    children,
    constant_differs,
    extra,
    lacking,
    missing,
    role,
)
from inlay.rewrite.reasons import Reason
from inlay.rewrite.schema import COMMUTATIVE, normalised
from inlay.rewrite.trees import Call, Tree, Variable
from inlay.rewrite.walker import orders, same_constant

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

_MOST_STEPS = 4000
"""A place where more than this was tried is explained by the best found until then."""
MOST_DIFFERENCES = 3
"""A place that differs by more is not almost a site."""
_BUDGETS = (1.1, 2.1, MOST_DIFFERENCES + 0.6)
_CONFLICT = 1.5
_LEAST = 1.0
"""What any difference costs at least."""
_UNUSUAL = 0.01
_FEWER_OPERANDS = 0.5


class Aligner:
    """Lays one pattern over places of a graph."""

    def __init__(
        self,
        tree: Tree,
        example: Mapping[str, Any],
        loose: frozenset[str] = frozenset(),
        usual: Mapping[str, set[Any]] | None = None,
        at_home: Callable[[fx.Node], bool] = lambda node: False,
        claimed: Collection[fx.Node] = (),
    ) -> None:
        """`usual` says what variables stand for where the pattern matched: of two ways that is the better.
        `at_home` says whether a node stands where, in other layers, nodes of sites do: then it is there instead of one.
        `claimed` are nodes of sites: they cannot be part of another one.
        """
        self.tree, self.example, self.loose = tree, example, loose
        self.usual, self.at_home, self.claimed = usual or {}, at_home, claimed
        self.budget, self.steps = 0.0, 0

    def best(self, root: fx.Node) -> Partial | None:
        """The pattern with its first output at `root`, differing as little as it can; none when it differs much."""
        for budget in _BUDGETS:
            self.budget, self.steps = budget, 0
            best: Partial | None = None
            for partial in self._align(self.tree.outputs[0], root, root, Partial()):
                complete = self._consumers(self._other_outputs(partial), root)
                better = best is None or (complete.cost, -len(complete.nodes)) < (best.cost, -len(best.nodes))
                if complete.cost <= self.budget and better:
                    best, self.budget = complete, complete.cost
                if self.steps > _MOST_STEPS:
                    break
            if best is not None:
                return best
        return None

    def _align(self, pattern: Any, value: Any, reader: fx.Node, state: Partial, name: str = "") -> Iterator[Partial]:
        """Every way to lay `pattern` over `value`, which `reader` reads under `name`."""
        self.steps += 1
        if state.cost > self.budget or self.steps > _MOST_STEPS:
            return
        if isinstance(pattern, Variable):
            yield from self._variable(pattern, value, reader, state)
        elif isinstance(pattern, Call):
            yield from self._call(pattern, value, reader, state)
        elif isinstance(pattern, list):
            yield from self._list(pattern, value, reader, state, name)
        elif same_constant(pattern, value):
            yield state
        else:
            yield state.differs(constant_differs(name, pattern, value, reader))

    def _list(self, pattern: list[Any], value: Any, reader: fx.Node, state: Partial, name: str) -> Iterator[Partial]:
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            pairs = [(name, one, two) for one, two in zip(pattern, value, strict=True)]
            if any(isinstance(each, (Call, Variable)) for each in pattern):
                yield from self._all(pairs, reader, state)
                if len(pattern) == 2:
                    yield from self._swapped(pairs, reader, state)
                return
            if all(same_constant(one, two) for _, one, two in pairs):
                yield state
                return
            if any(isinstance(each, fx.Node) for each in value):
                yield from self._all(pairs, reader, state)
                return
        lost = sum(len(calls_below(each) - state.nodes.keys()) for each in pattern)
        yield state.differs(constant_differs(name, pattern, value, reader), more=lost)

    def _swapped(self, pairs: list[tuple[str, Any, Any]], reader: fx.Node, state: Partial) -> Iterator[Partial]:
        (name, one, first), (other, two, second) = pairs
        difference = Difference(Reason.MISSING, f"the operands of {reader} stand the other way round", reader)
        yield from self._all([(name, one, second), (other, two, first)], reader, state.differs(difference))

    def _variable(self, pattern: Variable, value: Any, reader: fx.Node, state: Partial) -> Iterator[Partial]:
        name = pattern.name
        known = state.values.get(name, state)
        if known is state:
            yield from self._bind(name, value, reader, state)
            return
        if known is value or same_constant(known, value):
            yield state
            return
        if isinstance(value, fx.Node) and isinstance(known, fx.Node):
            for node in _steps(value, known):
                yield state.differs(extra(node), node)
            for node in _steps(known, value):
                yield state.bind(name, value).differs(extra(node), node)
        node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
        text = f"{name} is {known} in one place and {value} in another"
        yield state.differs(Difference(Reason.MISSING, text, node, _CONFLICT))

    def _bind(self, name: str, value: Any, reader: fx.Node, state: Partial) -> Iterator[Partial]:
        bound, expected = state.bind(name, value), self.example.get(name)
        computed, tensor = isinstance(value, fx.Node), isinstance(expected, torch.Tensor)
        if tensor == computed:
            odd = name in self.usual and standing(value) not in self.usual[name]
            yield replace(bound, cost=bound.cost + _UNUSUAL) if odd else bound
        elif tensor:
            text = f"{name} is {value} in {reader}, a tensor expected"
            yield bound.differs(Difference(Reason.CONSTANT, text, reader))
        else:
            yield bound.differs(Difference(Reason.CONSTANT, f"{name} is computed, not a constant", value))

    def _call(self, pattern: Call, value: Any, reader: fx.Node, state: Partial) -> Iterator[Partial]:
        if pattern in state.nodes:
            yield from self._again(pattern, state.nodes[pattern], value, reader, state)
            return
        free = value not in self.claimed and value not in state.nodes.values() if isinstance(value, fx.Node) else False
        if free and value.target is pattern.target:
            yield from self._same_operator(pattern, value, state)
            if not any(each.target is pattern.target for each in operands(value)):
                return
        if state.cost + _LEAST > self.budget:
            return
        unseen = len(calls_below(pattern) - state.nodes.keys())
        if isinstance(value, fx.Node) and value.op == "call_function":
            for each in dict.fromkeys(operands(value)):
                yield from self._align(pattern, each, value, state.differs(extra(value), value))
            yield from self._other_operator(pattern, value, reader, state)
        for child in children(pattern):
            lost = unseen - 1 - len(calls_below(child) - state.nodes.keys())
            instead = isinstance(child, Variable) and isinstance(value, fx.Node) and self.at_home(value)
            left_out = missing(pattern, value, reader) if instead else lacking(pattern, value, reader)
            yield from self._align(child, value, reader, state.differs(left_out, more=lost))
        yield state.differs(missing(pattern, value, reader), more=unseen - 1)

    def _again(self, pattern: Call, known: fx.Node, value: Any, reader: fx.Node, state: Partial) -> Iterator[Partial]:
        """A call that the pattern reads twice must be one node."""
        if known is value:
            yield state
            return
        if isinstance(value, fx.Node):
            for node in _steps(value, known):
                yield state.differs(extra(node), node)
        node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
        yield state.differs(Difference(Reason.MISSING, f"{known} expected, {value} found", node, _CONFLICT))

    def _same_operator(self, pattern: Call, value: fx.Node, state: Partial) -> Iterator[Partial]:
        found, actual = state.found(pattern, value), dict(normalised(value))
        for arguments in orders(pattern):
            pairs = [(name, each, actual.get(name)) for name, each in arguments if name not in self.loose]
            yield from self._all(pairs, value, found)
        inputs = [(name, each, actual.get(name)) for name, each in pattern.args if isinstance(each, (Call, Variable))]
        if len(inputs) == 2 and pattern.target not in COMMUTATIVE:
            rest = [
                (name, each, actual.get(name))
                for name, each in pattern.args
                if not isinstance(each, (Call, Variable)) and name not in self.loose
            ]
            for swapped in self._swapped(inputs, value, found):
                yield from self._all(rest, value, swapped)

    def _other_operator(self, pattern: Call, value: fx.Node, reader: fx.Node, state: Partial) -> Iterator[Partial]:
        """Another operator in the place of the pattern's, its operands perhaps the pattern's."""
        wanted, given = children(pattern), operands(value)
        more = 0.0 if len(wanted) == len(given) else _FEWER_OPERANDS
        for order in [given, given[::-1]] if len(given) == 2 else [given]:
            lost = sum(len(calls_below(each) - state.nodes.keys()) for each in wanted[len(order) :])
            changed = state.differs(missing(pattern, value, reader), value, more=more + lost)
            yield from self._all([("", one, two) for one, two in zip(wanted, order, strict=False)], value, changed)

    def _all(self, pairs: list[tuple[str, Any, Any]], reader: fx.Node, state: Partial) -> Iterator[Partial]:
        if not pairs:
            yield state
            return
        (name, pattern, value), *rest = pairs
        for each in self._align(pattern, value, reader, state, name):
            yield from self._all(rest, reader, each)

    def _other_outputs(self, partial: Partial) -> Partial:
        for output in self.tree.outputs[1:]:
            if output in partial.nodes:
                continue
            near = [each for each in (*partial.nodes.values(), *partial.values.values()) if isinstance(each, fx.Node)]
            users = sorted({user for node in near for user in node.users} - set(partial.nodes.values()))
            ways = [
                way
                for node in users
                if node.target is output.target
                for way in self._align(output, node, node, partial)
            ]
            lost = len(calls_below(output) - set(partial.nodes))
            none = partial.differs(missing(output, None, next(iter(partial.nodes.values()), near[0])), more=lost - 1)
            partial = min([*ways, none], key=lambda way: way.cost)
        return partial

    def _consumers(self, partial: Partial, root: fx.Node) -> Partial:
        """Nothing outside may read a value that disappears."""
        inside = set(partial.nodes.values())
        known = inside | partial.beside
        outputs = {root, *(partial.nodes[call] for call in self.tree.outputs if call in partial.nodes)}
        for name, value in partial.values.items():
            if isinstance(value, fx.Node) and value in inside:
                text = f"{value} is both {name} and inside the pattern"
                partial = partial.differs(Difference(Reason.ANOTHER_CONSUMER, text, value))
        for node in sorted(inside - outputs):
            other = next((user for user in node.users if user not in known), None)
            if other is not None:
                text = f"{node} is also read by {other}"
                partial = partial.differs(Difference(Reason.ANOTHER_CONSUMER, text, node))
        return partial


def standing(value: Any) -> Any:
    """What a variable stands for, the same for each layer: a number, or an operator and where it is called."""
    if not isinstance(value, fx.Node):
        return value
    return (value.target, role(value)) if value.op == "call_function" else value.op


def _steps(start: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """The call that `start` is, if one step leads from it to `end`."""
    if start.op == "call_function" and end in operands(start):
        yield start
