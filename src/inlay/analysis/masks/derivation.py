"""Derive the value of a tensor at every index, for every length, from its graph instead of computing it.

`arange(length)[:, None] - 3` is the index function `row - 3`; `where(row >= column, 0, -inf)` has two cases. The
derivation fails for an operator that is not in the table, for a value that comes from an input, and for a number that
its dtype cannot represent exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.masks.index_function import (
    MAX_SIZE,
    SCALARS,
    IndexFunction,
    OperatorCall,
    UnknownIndexFunctionError,
)
from inlay.analysis.masks.inequalities import AffineExpr, UndecidedError
from inlay.analysis.masks.operators import OPERATORS, SHAPE_ONLY
from inlay.program.graphs import is_mutation, reachable, subgraphs, target_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.program import Symbol

aten = torch.ops.aten


class IndexAnalysis:
    """The index functions of the tensors of a graph, each derived once. `symbols` state the largest sizes."""

    def __init__(self, graph: fx.Graph, symbols: Mapping[str, Symbol] | None = None) -> None:
        self._most = {raw: each.high or MAX_SIZE for raw, each in (symbols or {}).items()}
        self._results: dict[fx.Node, IndexFunction | str] = {}
        self._writes = _writes(graph)
        self._sizes = _size_names(graph)

    def derive(self, node: fx.Node, reader: fx.Node) -> IndexFunction:
        """Return the index function of `node` when `reader` reads it; raise UnknownIndexFunctionError if it is unknown.

        >>> graph = fx.Graph()
        >>> node = graph.call_function(aten.arange.default, (5,))
        >>> node.meta["val"] = torch.arange(5)
        >>> print(IndexAnalysis(graph).derive(node, graph.output(node)).cases[0][1])
        column
        """
        form = self._derive_node(node)
        if isinstance(form, str):
            raise UnknownIndexFunctionError(form)
        first = min(reachable([node], _tensors)) if self._writes else node
        write = next((each for each in self._writes if first < each < reader), None)
        if write is not None:
            raise UnknownIndexFunctionError(
                f"{write} writes in place after {first} and before {reader}, possibly to the mask"
            )
        return form

    def _derive_node(self, node: fx.Node) -> IndexFunction | str:
        todo = [node]
        while todo:
            at = todo[-1]
            missing = [] if at.target not in OPERATORS else [each for each in _tensors(at) if each not in self._results]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if at not in self._results:
                self._results[at] = self._derive_call(at)
        return self._results[node]

    def _derive_call(self, node: fx.Node) -> IndexFunction | str:
        if node.op != "call_function":
            return f"it depends on the values of {node}"
        if node.target not in OPERATORS:
            return f"it is computed with {target_text(node.target)}, which is not supported"
        refused = next((known for each in _tensors(node) if isinstance(known := self._results[each], str)), None)
        if refused is not None:
            return refused
        try:
            return OPERATORS[node.target](OperatorCall(self, node))
        except UnknownIndexFunctionError as reason:
            return f"{node}: {reason}"
        except (UndecidedError, RecursionError):
            return f"{node}: it has too many cases"

    def lookup(self, node: fx.Node) -> IndexFunction:
        """Return the index function of an operand that was already derived."""
        form = self._results[node]
        assert isinstance(form, IndexFunction)
        return form

    def bounds(self, total: AffineExpr, shape: Sequence[AffineExpr]) -> tuple[float, float]:
        """Return the smallest and the largest value of a sum of indices and sizes, at any length."""
        low = high = AffineExpr((), total.constant)
        for variable, factor in total.terms:
            if isinstance(variable, int):
                most = (shape[variable] - 1) * factor
                low, high = (low, high + most) if factor > 0 else (low + most, high)
            else:
                low, high = (
                    low + AffineExpr.from_variable(variable) * factor,
                    high + AffineExpr.from_variable(variable) * factor,
                )
        return self._bound(low, -1), self._bound(high, 1)

    def _bound(self, total: AffineExpr, sign: int) -> float:
        value: float = total.constant
        for variable, factor in total.terms:
            if variable not in self._sizes:
                return sign * math.inf
            most = min(MAX_SIZE, self._most.get(str(variable), MAX_SIZE))
            value += factor * most if factor * sign > 0 else 0
        return value


def _size_names(graph: fx.Graph) -> set[str]:
    """Return the symbols that are the size of an axis of an input. They are at least 0, unlike a scalar input."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    found: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return {str(size) for size in found if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}


def _writes(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls that write in place, directly or in a nested graph."""
    nested = {name for name, module in subgraphs(graph) if _writes(module.graph)}
    return [
        node
        for node in graph.nodes
        if is_mutation(node) or any(each.op == "get_attr" and each.target in nested for each in node.all_input_nodes)
    ]


def _tensors(node: fx.Node) -> list[fx.Node]:
    """Return the tensors whose values a call reads."""
    if node.target in SHAPE_ONLY:
        return []
    return [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), SCALARS)]
