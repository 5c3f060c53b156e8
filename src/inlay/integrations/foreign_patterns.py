"""Patterns of Inductor's matcher and of `torch.fx`'s, as pattern trees that are aligned by the rules of each matcher.

Both compare arguments as they are written: operands are not swapped, and axes are not normalized. Inductor also counts
positional arguments, and `_users` is the number of readers that a value must have. In a pattern of torch.fx, defaults
are arguments, and an inner value may be read only inside the pattern.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.graphs import find_write_between, is_mutation, operands, target_text
from inlay.rewrite.differences import PartialMatch, PatternDifference, constant_difference
from inlay.rewrite.matcher import is_same_constant
from inlay.rewrite.partial_match import MAX_DIFFERENCES, Aligner
from inlay.rewrite.pattern_trees import PatternCall, PatternTree, PatternVariable, children, inductor
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator


_CALLS_PER_DIFFERENCE = 5


@dataclass(frozen=True, eq=False)
class InductorCall(PatternCall):
    """A call in one of Inductor's patterns."""

    users: int | None = 1
    """Number of readers of the value; None if any number may read it."""
    num_positional: int | None = None
    """Number of positional arguments; None if arguments are not compared."""


@dataclass(frozen=True, eq=False)
class InductorTree(PatternTree):
    """One of Inductor's patterns."""

    pattern: Any = None
    """The pattern as Inductor has it."""


def convert_pattern(pattern: Any) -> InductorTree | None:
    """Return the tree of one of Inductor's patterns, or None if its output is not a call of an operator.

    Parts that have no counterpart, such as a list of any length, match everything.
    """
    return _InductorConverter().tree(pattern)


class _InductorConverter:
    def __init__(self) -> None:
        self.matcher = inductor()
        self.calls: dict[int, InductorCall] = {}
        self.variables: dict[int, PatternVariable] = {}
        self.numbers = count(1)

    def tree(self, pattern: Any) -> InductorTree | None:
        outputs = pattern.outputs if isinstance(pattern, self.matcher.MultiOutputPattern) else [pattern]
        converted = [self.value(each) for each in outputs if each is not None]
        calls = tuple(each for each in converted if isinstance(each, InductorCall))
        if not calls or calls[0] is not converted[0]:
            return None
        return InductorTree(calls, len(self.calls), tuple(each.name for each in self.variables.values()), pattern)

    def value(self, value: Any) -> Any:
        matcher = self.matcher
        if isinstance(value, matcher.RepeatedExpr):
            return self.value(value.inner_pattern)
        if isinstance(value, (matcher.CallFunction, matcher.CallFunctionVarArgs)):
            if id(value) not in self.calls:
                self.calls[id(value)] = self._call(value)
            return self.calls[id(value)]
        if isinstance(value, getattr(matcher, "CanonicalDims", ())):  # torch 2.15
            return WrittenAxes(value)
        if isinstance(value, matcher.PatternExpr):
            if id(value) not in self.variables:
                name = getattr(value, "name", "") or f"_{next(self.numbers)}"
                if any(each.name == name for each in self.variables.values()):
                    name = f"{name}_{next(self.numbers)}"  # two objects of one name may be two values
                self.variables[id(value)] = PatternVariable(name)
            return self.variables[id(value)]
        return [self.value(each) for each in value] if isinstance(value, (list, tuple)) else value

    def _call(self, call: Any) -> InductorCall:
        first, *others = call.fns
        users = None if call.users is self.matcher.MULTIPLE else int(call.users)
        if isinstance(call, self.matcher.CallFunctionVarArgs):
            return InductorCall(first, (), frozenset(others), users)
        named = given_arguments(first, call.args, call.kwargs)
        args = tuple((name, self.value(each)) for name, each in named.items())
        return InductorCall(first, args, frozenset(others), users, len(call.args))


def given_arguments(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, without defaults."""
    names = _argument_names(target)
    named = {names[index] if index < len(names) else f"_{index}": value for index, value in enumerate(args)}
    return named | dict(kwargs)


def _argument_names(target: Any) -> list[str]:
    schema = getattr(target, "_schema", None)
    return [each.name for each in schema.arguments] if schema is not None else []


class _WrittenAligner(Aligner):
    """Aligns patterns whose arguments are compared as they are written."""

    is_commutative = False
    missing_output_cost = 0.6

    @property
    def budgets(self) -> tuple[float, ...]:  # type: ignore[override]
        """Also more differences in a large pattern, of which nearly all is there all the same."""
        more = self.tree.num_calls // _CALLS_PER_DIFFERENCE
        return (*Aligner.budgets, more + 0.6) if more > MAX_DIFFERENCES else Aligner.budgets

    def _bind_variable(self, name: str, value: Any, reader: fx.Node, state: PartialMatch) -> Iterator[PartialMatch]:
        yield state.bind(name, value)

    def best_match(self, root: fx.Node) -> PartialMatch | None:
        """Return the cheapest alignment. One without a difference gets the reason why it is not a match."""
        found = super().best_match(root)
        if found is not None and not found.differences:
            return found.with_difference(self._refusal(root, found))
        return found

    def _refusal(self, root: fx.Node, found: PartialMatch) -> PatternDifference:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class WrittenAxes:
    """Axes of an argument, from the front or from the back: a pattern of torch 2.15."""

    pattern: Any

    def __str__(self) -> str:
        return str([axis - self.pattern.rank for axis in self.pattern.dims])

    def accepts(self, value: Any) -> bool:
        """Return whether an argument is these axes."""
        axes = value if isinstance(value, (list, tuple)) and all(type(axis) is int for axis in value) else ()
        return bool(tuple(axis % self.pattern.rank for axis in axes) == self.pattern.dims)


class InductorAligner(_WrittenAligner):
    """Aligns one of Inductor's patterns."""

    tree: InductorTree

    def _align(
        self, pattern: Any, value: Any, reader: fx.Node, state: PartialMatch, name: str = ""
    ) -> Iterator[PartialMatch]:
        if not isinstance(pattern, WrittenAxes):
            yield from super()._align(pattern, value, reader, state, name)
        elif pattern.accepts(value):
            yield state
        else:
            yield state.with_difference(constant_difference(name, pattern, value, reader))

    def _align_call(
        self, pattern: PatternCall, value: Any, reader: fx.Node, state: PartialMatch
    ) -> Iterator[PartialMatch]:
        """Align a call. Other operators instead of the parts of one result, such as slices for a split, differ once."""
        source = next((each for each in children(pattern) if isinstance(each, PatternCall)), None)
        is_part = pattern.target is operator.getitem and source is not None and source not in state.nodes
        if is_part and isinstance(value, fx.Node) and value.target is not operator.getitem and operands(value):
            assert source is not None
            key, given = f"parts of {id(source)}", operands(value)[0]
            if state.values.get(key) is given:
                yield replace(state, extra_nodes=state.extra_nodes | {value})
            elif key not in state.values and self._is_affordable(state):
                text = f"{target_text(source.target)} expected, {value} ({target_text(value.target)}) found"
                found = state.bind(key, given).with_difference(PatternDifference(Reason.MISSING, text, value), value)
                yield from self._align(next(iter(children(source)), None), given, value, found)
        yield from super()._align_call(pattern, value, reader, state)

    def _refusal(self, root: fx.Node, found: PartialMatch) -> PatternDifference:
        matched = self.tree.pattern.match(root)
        if not matched:
            return PatternDifference(Reason.REFUSED, f"Inductor's matcher says: {matched}", root)
        nodes = sorted(found.nodes.values())
        if (node := find_write_between(nodes[0], nodes[-1])) is not None:
            text = f"{node} ({target_text(node.target)}) writes in place between the nodes of the pattern"
            return PatternDifference(Reason.MUTATION, text, node)
        if is_mutation(nodes[-1]):
            text = f"{nodes[-1]} ({target_text(nodes[-1].target)}) writes in place, and the pattern begins before it"
            return PatternDifference(Reason.MUTATION, text, nodes[-1])
        streams = {str((node.meta.get("custom") or {}).get("stream", 0)) for node in nodes}
        if len(streams) > 1:
            text = f"the nodes are on different streams: {', '.join(sorted(streams))}"
            return PatternDifference(Reason.REFUSED, text, root)
        text = "the pattern matches the graph that the pass left, and Inductor did not apply it"
        return PatternDifference(Reason.REFUSED, text, root)

    def _arguments(self, value: fx.Node) -> dict[str, Any]:
        schema = getattr(value.target, "_schema", None)
        keywords = {each.name for each in schema.arguments if each.kwarg_only} if schema is not None else set()
        given = given_arguments(value.target, value.args, value.kwargs)
        named = _with_defaults(value.target, value.args, value.kwargs)
        return {name: each for name, each in named.items() if name in given or name in keywords}

    def _align_same_operator(self, pattern: PatternCall, value: fx.Node, state: PartialMatch) -> Iterator[PartialMatch]:
        assert isinstance(pattern, InductorCall)
        expected = pattern.num_positional
        declared = {name for name, _ in pattern.args}
        for name, default in self._undeclared(value) if expected is not None else ():
            if name not in declared:
                state = state.with_difference(constant_difference(name, default, value.kwargs[name], value))
        if expected is None:
            yield state.with_node(pattern, value)
            return
        if len(value.args) != expected:
            state = state.with_difference(self._count_difference(pattern, value, expected))
        yield from super()._align_same_operator(pattern, value, state)

    def _undeclared(self, value: fx.Node) -> list[tuple[str, Any]]:
        """Return the keyword arguments that are not the default, and the default: torch 2.15 refuses them."""
        if not hasattr(inductor(), "_has_undeclared_non_default_kwarg"):
            return []
        defaults = _with_defaults(value.target, (), {})
        # not by !=, which would add a guard for a symbolic size
        return [
            (name, defaults.get(name))
            for name, given in value.kwargs.items()
            if not is_same_constant(defaults.get(name), given)
        ]

    def _count_difference(self, pattern: PatternCall, value: fx.Node, expected: int) -> PatternDifference:
        """Return the difference of a call with more or fewer positional arguments: the first one that differs."""
        given, wanted = self._arguments(value), dict(pattern.args)
        names = _argument_names(value.target)
        index = min(len(value.args), expected)
        name = names[index] if index < len(names) else f"argument {index}"
        if len(value.args) > expected:
            return constant_difference(name, "none", given.get(name, value.args[index]), value)
        held = wanted.get(name)
        shown = "an argument" if isinstance(held, (PatternCall, PatternVariable)) else held
        return constant_difference(name, shown, "not given", value)

    def _check_consumers(self, partial: PartialMatch, root: fx.Node) -> PartialMatch:
        known = {*partial.nodes.values(), *partial.extra_nodes}
        for call, node in partial.nodes.items():
            assert isinstance(call, InductorCall)
            if call.users in (None, len(node.users)) or call in self.tree.outputs or node is root:
                continue
            other = next((user for user in node.users if user not in known), None)
            if other is not None:
                text = f"{node} is also read by {other}"
            elif partial.differences:
                continue  # the difference changes the number of readers
            else:
                text = f"{node} is read by {len(node.users)} nodes; expected {call.users}"
            partial = partial.with_difference(PatternDifference(Reason.ANOTHER_CONSUMER, text, node))
        return partial


def convert_graph(pattern: fx.Graph, ignore_literals: bool = False) -> PatternTree | None:
    """Return the tree of a pattern of torch.fx, or None if its outputs are not calls of functions."""
    values: dict[fx.Node, Any] = {}
    numbers = count(1)

    def value(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, (list, tuple)):
            return [value(each) for each in argument]
        return PatternVariable(f"_{next(numbers)}") if ignore_literals else argument

    outputs: list[Any] = []
    for node in pattern.nodes:
        if node.op == "call_function":
            named = _with_defaults(node.target, node.args, node.kwargs)
            values[node] = PatternCall(node.target, tuple((name, value(each)) for name, each in named.items()))
        elif node.op == "output":
            outputs = [values[each] for each in node.all_input_nodes]
        else:
            values[node] = PatternVariable(node.name)
    calls = tuple(each for each in outputs if isinstance(each, PatternCall))
    made = [each for each in values.values() if isinstance(each, PatternCall)]
    variables = tuple(each.name for each in values.values() if isinstance(each, PatternVariable))
    return PatternTree(calls, len(made), variables) if calls else None


def _with_defaults(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    schema = getattr(target, "_schema", None)
    known = [] if schema is None else [each for each in schema.arguments if each.has_default_value()]
    return {each.name: each.default_value for each in known} | given_arguments(target, args, kwargs)


class GraphAligner(_WrittenAligner):
    """Aligns a pattern of torch.fx."""

    def _arguments(self, value: fx.Node) -> dict[str, Any]:
        return _with_defaults(value.target, value.args, value.kwargs)

    def _refusal(self, root: fx.Node, found: PartialMatch) -> PatternDifference:
        return PatternDifference(Reason.OVERLAP, "another match, or torch.fx does not try it", root)
