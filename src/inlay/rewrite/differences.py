"""What a partial match holds: which nodes were found, and everything that differs, with what it costs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.graphs import MODULE, SOURCE, operands, target_text
from inlay.rewrite.reasons import Reason
from inlay.rewrite.trees import Call, Variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AXES = {"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"}


@dataclass(frozen=True, eq=False)
class Difference:
    """One disagreement between a pattern and a program, and the node to look at."""

    kind: Reason
    text: str
    node: fx.Node
    cost: float = 1.0

    @property
    def reason(self) -> str:
        """The reason in words, its kind first."""
        return f"{self.kind.value}: {self.text}"


@dataclass(frozen=True, eq=False)
class Partial:
    """A pattern laid over a graph as well as it can be: what it found, what differs."""

    nodes: Mapping[Call, fx.Node] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    beside: frozenset[fx.Node] = frozenset()
    """Nodes that stand where the pattern has none, or another one."""
    differences: tuple[Difference, ...] = ()
    cost: float = 0.0

    def bind(self, name: str, value: Any) -> Partial:
        """A variable stands for this value."""
        return replace(self, values={**self.values, name: value})

    def found(self, call: Call, node: fx.Node) -> Partial:
        """A call of the pattern is this node."""
        return replace(self, nodes={**self.nodes, call: node})

    def differs(self, difference: Difference, *beside: fx.Node, more: float = 0.0) -> Partial:
        """One more difference, which costs `more` than it does by itself."""
        return replace(
            self,
            differences=(*self.differences, difference),
            beside=self.beside | set(beside),
            cost=self.cost + difference.cost + more,
        )


def role(node: fx.Node) -> tuple[str, str]:
    """Where in the model a node stands, the same for each layer: module without numbers, and source line."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", str(node.meta.get(MODULE, ""))), str(node.meta.get(SOURCE, ""))


def constant_differs(name: str, expected: Any, found: Any, node: fx.Node) -> Difference:
    """An argument that is no value of the program: an axis, a dtype, or another constant."""
    kind = Reason.AXIS if name in _AXES else Reason.DTYPE if name == "dtype" else Reason.CONSTANT
    return Difference(kind, f"{name} of {node} is {found}, {expected} expected", node)


def extra(node: fx.Node) -> Difference:
    """A node the pattern does not have; if it only changes the type of numbers, that is what differs."""
    value = node.meta.get("val")
    before = operands(node)[0].meta.get("val") if operands(node) else None
    cast = "_to_copy" in target_text(node.target) and getattr(before, "dtype", None) != getattr(value, "dtype", None)
    if cast:
        return Difference(Reason.DTYPE, f"{node} casts {before.dtype} to {value.dtype}", node)  # type: ignore[union-attr]
    return Difference(Reason.EXTRA, f"{node} ({target_text(node.target)}) stands in between", node)


def missing(call: Call, value: Any, reader: fx.Node) -> Difference:
    """A node of the pattern that is not there; what is there instead is named, or who reads it."""
    text = target_text(value.target) if isinstance(value, fx.Node) else repr(value)
    node = value if isinstance(value, fx.Node) and value.op == "call_function" else reader
    return Difference(Reason.MISSING, f"{target_text(call.target)} expected, {text} found", node)


def lacking(call: Call, value: Any, reader: fx.Node) -> Difference:
    """A node of the pattern is left out: `reader` reads at once what should have gone through it."""
    return Difference(Reason.MISSING, f"{target_text(call.target)} expected between {value} and {reader}", reader)


@lru_cache(maxsize=4096)
def children(call: Call) -> tuple[Call | Variable, ...]:
    """The values that a call of a pattern reads, in order."""
    return tuple(_values([value for _, value in call.args]))


def _values(values: Any) -> Iterator[Call | Variable]:
    for value in values:
        if isinstance(value, (Call, Variable)):
            yield value
        elif isinstance(value, list):
            yield from _values(value)


def calls_below(pattern: Any) -> frozenset[Call]:
    """A call and every call it reads from, directly or not."""
    return _below(pattern) if isinstance(pattern, Call) else frozenset()


@lru_cache(maxsize=4096)
def _below(call: Call) -> frozenset[Call]:
    return frozenset({call}).union(*map(calls_below, children(call)))
