"""Find the position ids of a program: nodes that count up along the length, computed from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from inlay.analysis.sequence_axis import MixingCall, axes_with_symbol
from inlay.errors import ProgramError, one_line
from inlay.program.graphs import ancestors
from inlay.program.symbols import FakeValues, symbolic_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

aten = torch.ops.aten
_COUNTING_OPS = {
    *(aten.arange.default, aten.arange.start, aten.ones.default, aten.zeros.default, aten.full.default),
    *(aten.cumsum.default, aten.unsqueeze.default, aten.expand.default),
}
_SIZES = ((2, 5), (3, 9))
"""Batch and length to evaluate with: linear functions of positions that agree at both agree everywhere."""

_UNLIKELY = 10007
"""A size that no constant of a model equals; the same holds for the next few integers."""


@dataclass(frozen=True)
class PositionIds:
    """A node whose value is the position of each token plus an offset."""

    node: fx.Node
    offset: int


@dataclass(frozen=True)
class PositionSources:
    """All position ids of a graph, and the nodes that have the same value at every position."""

    position_ids: tuple[PositionIds, ...]
    uniform_nodes: frozenset[fx.Node]

    @property
    def nodes(self) -> set[fx.Node]:
        """Every node of both kinds."""
        return {each.node for each in self.position_ids} | self.uniform_nodes


def find_position_sources(graph: fx.Graph, batch: str, length: str) -> PositionSources | MixingCall:
    """Return the sources of positions, or the first node computed from sizes that is neither a position nor uniform."""
    counting: list[PositionIds] = []
    uniform: set[fx.Node] = set()
    of_sizes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not all(each in of_sizes for each in node.all_input_nodes):
            if isinstance(node.meta.get("val"), torch.SymInt):
                of_sizes.add(node)  # the size of an input does not depend on its values
            continue
        of_sizes.add(node)
        known = {each.node for each in counting}
        value = node.meta.get("val")
        if not (axes_with_symbol(value, length) or axes_with_symbol(value, batch)) or not known.isdisjoint(
            ancestors(node)
        ):
            continue
        offset = _offset(node, batch, length)
        if offset is None and axes_with_symbol(value, length):
            return MixingCall(
                node, "it is computed from sizes alone, and is neither a position nor the same at every position"
            )
        if offset is None:
            return MixingCall(node, "it is computed from sizes alone, and is not the same for every sequence")
        if isinstance(offset, int):
            counting.append(PositionIds(node, offset))
        else:
            uniform.add(node)
    return PositionSources(tuple(counting), frozenset(uniform))


def _offset(node: fx.Node, batch: str, length: str) -> int | str | None:
    """Return a node's offset from the position, "uniform" if it has one value everywhere, None otherwise."""
    found: set[Any] = set()
    axes = axes_with_symbol(node.meta["val"], length)
    for rows, columns in _SIZES:
        value = _evaluate(node, {batch: rows, length: columns})
        if value is None:
            return None
        found.add((_constant(value), _rest(value, axes, columns)))
    uniform, offset = found.pop() if len(found) == 1 else (None, None)
    if uniform is not None:
        return "uniform"
    return int(offset) if offset is not None and offset == int(offset) else None


def _rest(value: torch.Tensor, axes: list[int], columns: int) -> float | None:
    """Return the difference between a value and the position, if it is the same everywhere."""
    if len(axes) != 1 or value.shape[axes[0]] != columns or value.dtype == torch.bool:
        return None
    shape = [-1 if axis == axes[0] else 1 for axis in range(value.dim())]
    return _constant(value - torch.arange(columns).reshape(shape))


def _constant(value: torch.Tensor) -> float | None:
    """Return the number that all elements of a value are, if they are equal."""
    if not value.numel():
        return None
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else None


def _evaluate(node: fx.Node, sizes: Mapping[str, int]) -> torch.Tensor | None:
    """Return the value of a node that depends on sizes alone, for these sizes."""
    values: dict[fx.Node, Any] = {}
    for each in ancestors(node):
        held = each.meta.get("val")
        if isinstance(held, torch.SymInt):
            if str(held) not in sizes:
                return None
            values[each] = sizes[str(held)]
        elif each.op == "call_function" and each.target in _COUNTING_OPS:
            try:
                args, kwargs = fx.map_arg((each.args, dict(each.kwargs)), values.__getitem__)
                values[each] = each.target(*args, **kwargs)
            except (KeyError, RuntimeError, IndexError):  # an operand is not a counting call, or the call fails
                return None
    result = values.get(node)
    return result if isinstance(result, torch.Tensor) else None


@dataclass(frozen=True)
class SharedPositions:
    """Values of shape [length], the same for all sequences: pointwise functions of the positions."""

    pointwise: tuple[fx.Node, ...]
    """The calls that compute them, in order."""
    ends: tuple[fx.Node, ...]
    """The calls that add an axis for the sequences, of size 1."""


def follow_shared_positions(source: fx.Node) -> SharedPositions | fx.Node:
    """Return the readers of positions of shape [length], or one that reads them in another way.

    Each of the pointwise calls has one operand that is a tensor, so it could compute [1, length] just as well.
    """
    pointwise, ends = [source], list[fx.Node]()
    for node in pointwise:
        for user in node.users:
            if _adds_sequence_axis(user):
                ends.append(user)
            elif torch.Tag.pointwise in getattr(user.target, "tags", ()) or user.target is aten._to_copy.default:
                if user.all_input_nodes != [node] or user.meta["val"].dim() != 1:
                    return user
                pointwise.append(user)
            else:
                return user
    return SharedPositions(tuple(pointwise[1:]), tuple(ends))


def _adds_sequence_axis(node: fx.Node) -> bool:
    """Whether a call makes [1, length] or [1, length, 1, …] of [length]."""
    if node.target is aten.unsqueeze.default:
        return node.args[1] in (0, -2)
    if node.target not in (aten.view.default, aten.reshape.default):
        return False
    (length,), (first, *rest) = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    return str(first) == "1" and [str(size) for size in rest] == [str(length), *["1"] * (len(rest) - 1)]


def check_symbolic_shapes(node: fx.Node) -> None:
    """Compute a call's shape with sizes that no constant of a model equals.

    Sizes of a capture are small: where a batch of 2 is broadcast with 2 heads, torch would specialize them to be equal.
    """
    chosen: dict[str, int] = {}

    def concrete(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        for symbol in expression.free_symbols:
            chosen.setdefault(str(symbol), _UNLIKELY + len(chosen))
        return int(expression.subs({each: chosen[str(each)] for each in expression.free_symbols}))

    fresh = FakeValues([])

    def held(operand: fx.Node) -> Any:
        value = operand.meta.get("val")
        return tree_map(
            lambda each: (
                fresh.tensor(each.dtype, [concrete(size) for size in each.shape])
                if isinstance(each, torch.Tensor)
                else concrete(each)
            ),
            value,
        )

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), held)
    target: Any = node.target
    try:
        with symbolic_sizes(), fresh.mode:
            target(*args, **kwargs)
    except Exception as error:
        raise ProgramError(f"{node} cannot be computed: {one_line(error)}") from error
