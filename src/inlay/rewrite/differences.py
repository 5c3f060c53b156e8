"""What a partial match holds: which nodes were found, and everything that differs, with what it costs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.graphs import MODULE, SOURCE, operands, target_text
from inlay.rewrite.pattern_trees import PatternCall, PatternVariable
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AXES = {"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"}


@dataclass(frozen=True, eq=False)
class PatternDifference:
    """One disagreement between a pattern and a program, and the node to look at."""

    kind: Reason
    text: str
    node: fx.Node
    cost: float = 1.0

    @property
    def reason(self) -> str:
        """The reason in words, its kind first."""
        return self.kind.sentence(self.text)


@dataclass(frozen=True, eq=False)
class PartialMatch:
    """A pattern laid over a graph as well as it can be: what it found, what differs."""

    nodes: Mapping[PatternCall, fx.Node] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    extra_nodes: frozenset[fx.Node] = frozenset()
    """Nodes that stand where the pattern has none, or another one."""
    differences: tuple[PatternDifference, ...] = ()
    cost: float = 0.0

    def bind(self, name: str, value: Any) -> PartialMatch:
        """A variable stands for this value."""
        return replace(self, values={**self.values, name: value})

    def with_node(self, call: PatternCall, node: fx.Node) -> PartialMatch:
        """A call of the pattern is this node."""
        return replace(self, nodes={**self.nodes, call: node})

    def with_difference(
        self, difference: PatternDifference, *extra_nodes: fx.Node, extra_cost: float = 0.0
    ) -> PartialMatch:
        """One more difference, which costs `extra_cost` more than it does by itself."""
        return replace(
            self,
            differences=(*self.differences, difference),
            extra_nodes=self.extra_nodes | set(extra_nodes),
            cost=self.cost + difference.cost + extra_cost,
        )


def code_location(node: fx.Node) -> tuple[str, str]:
    """Where in the model a node stands, the same for each layer: module without numbers, and source line."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", str(node.meta.get(MODULE, ""))), str(node.meta.get(SOURCE, ""))


def constant_difference(name: str, expected: Any, found: Any, node: fx.Node) -> PatternDifference:
    """An argument that is no value of the program: an axis, a dtype, or another constant."""
    kind = Reason.AXIS if name in _AXES else Reason.DTYPE if name == "dtype" else Reason.CONSTANT
    return PatternDifference(kind, f"{name} of {node} is {found}, {expected} expected", node)


def extra_node(node: fx.Node) -> PatternDifference:
    """A node the pattern does not have; if it only changes the type of numbers, that is what differs."""
    value = node.meta.get("val")
    before = operands(node)[0].meta.get("val") if operands(node) else None
    cast = "_to_copy" in target_text(node.target) and getattr(before, "dtype", None) != getattr(value, "dtype", None)
    if cast:
        return PatternDifference(Reason.DTYPE, f"{node} casts {before.dtype} to {value.dtype}", node)  # type: ignore[union-attr]
    return PatternDifference(Reason.EXTRA, f"{node} ({target_text(node.target)}) stands in between", node)


def missing_node(call: PatternCall, value: Any, reader: fx.Node) -> PatternDifference:
    """A node of the pattern that is not there; what is there instead is named, or who reads it."""
    text = target_text(value.target) if isinstance(value, fx.Node) else repr(value)
    node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
    return PatternDifference(Reason.MISSING, f"{target_text(call.target)} expected, {text} found", node)


def missing_node_between(call: PatternCall, value: Any, reader: fx.Node) -> PatternDifference:
    """A node of the pattern is left out: `reader` reads at once what should have gone through it."""
    return PatternDifference(
        Reason.MISSING, f"{target_text(call.target)} expected between {value} and {reader}", reader
    )


@lru_cache(maxsize=4096)
def children(call: PatternCall) -> tuple[PatternCall | PatternVariable, ...]:
    """The values that a call of a pattern reads, in order."""
    return tuple(_values([value for _, value in call.args]))


def _values(values: Any) -> Iterator[PatternCall | PatternVariable]:
    for value in values:
        if isinstance(value, (PatternCall, PatternVariable)):
            yield value
        elif isinstance(value, list):
            yield from _values(value)


def subtree_calls(pattern: Any) -> frozenset[PatternCall]:
    """A call and every call it reads from, directly or not."""
    return _subtree_of_call(pattern) if isinstance(pattern, PatternCall) else frozenset()


@lru_cache(maxsize=4096)
def _subtree_of_call(call: PatternCall) -> frozenset[PatternCall]:
    return frozenset({call}).union(*map(subtree_calls, children(call)))
