"""Does a program treat every position alone, and every sequence of a batch? Only then may it be run on a few of them.

A sequence may be cut anywhere, and sequences be put into one batch, when no value of one depends on another, but
through attention over a cache. The axis of positions is the one whose size holds the symbol of the length, the axis of
sequences the one that holds the symbol of the batch; a view may merge them. Every call that reads a value with such an
axis must be known to keep its entries apart. A call that is not known is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import target_text

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
canonical = torch.ops.inlay


@dataclass(frozen=True)
class MixingCall:
    """A call that brings positions together, or may."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        """Which value, what computes it, and why that is too much."""
        named = self.node.op != "call_function" or target_text(self.node.target) in self.reason
        return (
            f"{self.node}: {self.reason}" if named else f"{self.node} ({target_text(self.node.target)}): {self.reason}"
        )


def depends_on_symbol(size: Any, symbol: str) -> bool:
    """Whether a number is an expression of a symbol."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return any(str(each) == symbol for each in size.node.expr.free_symbols)


def axes_with_symbol(value: Any, length: str) -> list[int]:
    """The axes of a value whose size depends on the symbol `length`."""
    if not isinstance(value, torch.Tensor):
        return []
    return [axis for axis, size in enumerate(value.shape) if depends_on_symbol(size, length)]


@dataclass(frozen=True)
class SequenceAxis:
    """What is kept apart: a symbol of sizes, what its entries are called, and why its size is no number to use."""

    symbol: str
    entry_name: str
    size_name: str
    size_reason: str

    @property
    def size_message(self) -> str:
        """What is said where the size itself is computed with."""
        return f"{self.size_name} is used as a number, {self.size_reason}"


def position_axis(length: str) -> SequenceAxis:
    """The positions of a sequence."""
    return SequenceAxis(length, "positions", "the length", "which is another one for a part of the sequence")


def batch_axis(batch: str) -> SequenceAxis:
    """The sequences of a batch."""
    return SequenceAxis(
        batch, "sequences", "the size of the batch", "which depends on what else is run at the same time"
    )


def find_mixing_call(
    graph: fx.Graph, axis: SequenceAxis, sources: set[fx.Node], attention: set[fx.Node]
) -> MixingCall | None:
    """The first call that mixes entries of an axis. `sources` are known to be harmless; `attention` is to get a cache.

    A choice of the last position is none of them: what it gives is of one position.
    """
    apart, length = AxisTracker(axis), axis.symbol
    picked: set[fx.Node] = set()
    for node in graph.nodes:
        reason: str | None = None
        if node.op == "placeholder":
            reason = _check_placeholder(node, axis)
        elif node.op == "output":
            reason = f"{axis.size_name} itself is returned" if _size_operands(node, length) else None
        elif node.op != "call_function" or node in sources or _is_size(node):
            pass
        elif node in attention:
            reason = _check_attention(node, axis, picked)
        elif any(each in picked for each in node.all_input_nodes):
            picked.add(node)
            if any(_axes(each, length) for each in (*node.all_input_nodes, node)):
                reason = "the last position is brought together with others"
            elif _size_operands(node, length):
                reason = axis.size_message
        elif axis.entry_name == "positions" and _picks_last(node, length):
            picked.add(node)
        else:
            reason = _check_size_use(node, axis) or apart.mixing_reason(node)
        if reason is not None:
            return MixingCall(node, reason)
        apart.record(node)
    return None


def _axes(node: fx.Node, length: str) -> list[int]:
    value = node.meta.get("val")
    found = [axes_with_symbol(each, length) for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return max(found, key=len, default=[])


def _size_operands(node: fx.Node, length: str) -> list[fx.Node]:
    """The operands that are the length, or a number computed from it."""
    return [each for each in node.all_input_nodes if depends_on_symbol(each.meta.get("val"), length)]


def _is_size(node: fx.Node) -> bool:
    """A size, or something computed from sizes alone: harmless until a tensor is computed with it."""
    if node.target in (aten.sym_size.int, aten._assert_scalar.default):
        return True
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return all(isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for each in values)


def _check_placeholder(node: fx.Node, axis: SequenceAxis) -> str | None:
    """An input may have the axis, but none that is longer or shorter by a rule."""
    value: Any = node.meta.get("val")
    exact = all(str(value.shape[each]) == axis.symbol for each in axes_with_symbol(value, axis.symbol))
    return None if exact else f"the size of an axis is computed from {axis.size_name}"


def _check_attention(node: fx.Node, axis: SequenceAxis, picked: set[fx.Node]) -> str | None:
    given: dict[str, Any] = dict(normalize_args(node))
    operands = {given[name] for name in ("query", "key", "value")}
    if any(each in picked for each in node.all_input_nodes):
        return "the last position is brought together with others"
    if _size_operands(node, axis.symbol):
        return axis.size_message
    place = [2] if axis.entry_name == "positions" else [0]
    for each in node.all_input_nodes:
        if axes_with_symbol(each.meta["val"], axis.symbol) != (place if each in operands else []):
            return f"{each} has {axis.entry_name} along another axis than attention expects"
    return None


def _check_size_use(node: fx.Node, axis: SequenceAxis) -> str | None:
    """A shape may hold the size, when the call is known to make nothing else of it."""
    if not _size_operands(node, axis.symbol) or node.target is aten.expand.default:
        return None
    if node.target in _VIEWS and any(_axes(each, axis.symbol) for each in node.all_input_nodes):
        return None
    return axis.size_message


def _picks_last(node: fx.Node, length: str) -> bool:
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return False
    given: dict[str, Any] = dict(normalize_args(node))
    if len(_axes(given["self"], length)) != 1:
        return False
    axis = _negative_axis(given["self"], length)
    last = given["index"] == -1 if node.target is aten.select.int else given["start"] == -1
    return bool(given["dim"] == axis and last)


class AxisTracker:
    """Follows one axis through the calls of a graph, in their order.

    A view may merge the axis with others, [batch, length, 8] to [batch * length, 8]. So beside the place of the axis,
    which its size tells, it is known how many values lie behind one entry within it: `length` for the batch there.
    """

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis, self.symbol = axis, axis.symbol
        self._inner_sizes: dict[fx.Node, Any] = {}

    def record(self, node: fx.Node) -> None:
        """Note where the axis lies in a value that was examined."""
        if len(_axes(node, self.symbol)) != 1:
            return
        carrying = [each for each in node.all_input_nodes if len(_axes(each, self.symbol)) == 1]
        if node.target in _VIEWS and carrying:
            inner = self._inner_size_after_view(node, carrying[0])
        else:
            inner = self.inner_size(carrying[0]) if carrying else _default_inner_size(node, self.axis)
        self._inner_sizes[node] = 1 if inner is None else inner

    def inner_size(self, node: fx.Node) -> Any:
        """How many steps along its axis lie between two entries."""
        return self._inner_sizes.get(node, 1)

    def mixing_reason(self, node: fx.Node) -> str | None:
        """Why a call may bring entries together."""
        symbol, entries, name = self.symbol, self.axis.entry_name, target_text(node.target)
        carrying = [each for each in node.all_input_nodes if _axes(each, symbol)]
        if not carrying:
            return None
        if any(len(_axes(each, symbol)) != 1 for each in (*carrying, node)):
            return f"{name}: its result or an operand has no axis of {entries}, or several"
        if node.target in _VIEWS:
            return (
                None
                if self._inner_size_after_view(node, carrying[0]) is not None
                else f"{name} works along the axis of {entries}"
            )
        known = _RULES.get(node.target)
        if known is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            known = _pointwise_rule
        if known is None:
            return f"{name} is not known to keep {entries} apart"
        together = len({self.inner_size(each) for each in carrying}) == 1 and known(node, carrying, symbol)
        return None if together else f"{name} works along the axis of {entries}"

    def _inner_size_after_view(self, node: fx.Node, source: fx.Node) -> Any:
        """How many steps lie between two entries after a view; None where it moves entries into other axes.

        With as many values behind an entry as before, and the axis a multiple of what lies between two of them and
        of their number, an entry is found in this axis and in no other.
        """
        behind, size = _trailing_size(node, self.symbol)
        stride = self.inner_size(source) * _trailing_size(source, self.symbol)[0]
        inner = sympy.cancel(stride / behind)
        whole = [inner, sympy.cancel(size / (inner * _symbol(self.symbol)))]
        return inner if all(sympy.fraction(sympy.together(each))[1] == 1 for each in whole) else None


def _default_inner_size(node: fx.Node, axis: SequenceAxis) -> Any:
    """Entries that are all the same may be taken to lie anywhere: a batch is outermost, positions innermost."""
    size = _trailing_size(node, axis.symbol)[1]
    return sympy.cancel(size / _symbol(axis.symbol)) if axis.entry_name == "sequences" else 1


def _trailing_size(node: fx.Node, symbol: str) -> tuple[Any, Any]:
    """How many values lie behind the axis of a symbol, and its size; symbols are told by their names."""
    value = next(each for each in tree_leaves(node.meta["val"]) if axes_with_symbol(each, symbol))
    place = axes_with_symbol(value, symbol)[0]
    sizes = [_sympy_size(size) for size in value.shape[place:]]
    return sympy.Mul(*sizes[1:]), sizes[0]


def _symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True, positive=True)


def _sympy_size(size: Any) -> Any:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    expression = size.node.expr
    return expression.xreplace({each: _symbol(str(each)) for each in expression.free_symbols})


def _negative_axis(node: fx.Node, length: str) -> int:
    """The axis of positions, counted from the end."""
    value: Any = node.meta["val"]
    value = next((each for each in tree_leaves(value) if axes_with_symbol(each, length)), value)
    return axes_with_symbol(value, length)[0] - int(value.dim())


def _pointwise_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Value by value: operands are lined up from the end."""
    axis = _negative_axis(node, length)
    return all(_negative_axis(each, length) == axis for each in carrying)


def _any_axis_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    return True


def _dim_rule(*names: str) -> Callable[[fx.Node, list[fx.Node], str], bool]:
    """Calls that work along axes they are given, by these names."""

    def apart(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
        given: dict[str, Any] = dict(normalize_args(node))
        axes = tree_leaves([given.get(name) for name in names])
        positions = {_negative_axis(each, length) for each in carrying}
        return (
            bool(axes)
            and len(positions) == 1
            and all(isinstance(axis, int) for axis in axes)
            and not positions & {*axes}
        )

    return apart


def _last_axes(count: Callable[[dict[str, Any]], int], operand: str) -> Callable[[fx.Node, list[fx.Node], str], bool]:
    """Calls that bring values together along the last axes of one operand, the only one that may have positions."""

    def apart(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
        given: dict[str, Any] = dict(normalize_args(node))
        return carrying == [given[operand]] and _negative_axis(given[operand], length) < -count(given)

    return apart


def _norm(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Norms of the last axis, rotations within it: operands lined up, positions along another axis."""
    return _pointwise_rule(node, carrying, length) and _negative_axis(node, length) < -1


def _matmul(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """A product of matrices works along the last axis of one operand and the last but one of the other."""
    left, right = node.args[:2]
    if len(carrying) == 2 or left is right:
        axes = {_negative_axis(each, length) for each in carrying}
        return len(axes) == 1 and axes.pop() < -2
    return _negative_axis(carrying[0], length) != (-1 if carrying[0] is left else -2)


def _index_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    source, indices = node.args[:2]
    if carrying != [source] or not isinstance(indices, (list, tuple)):
        return False
    axis = axes_with_symbol(source.meta["val"], length)[0]  # type: ignore[union-attr]
    return len(indices) <= axis or indices[axis] is None


def _embedding(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    return carrying == [node.args[1]]


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_RULES: dict[Any, Callable[[fx.Node, list[fx.Node], str], bool]] = {
    **dict.fromkeys(
        (
            *(aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default),
            *(aten.clone.default, aten.alias.default, aten.detach.default, operator.getitem),
        ),
        _any_axis_rule,
    ),
    **dict.fromkeys((aten._to_copy.default, canonical.swiglu.default, canonical.geglu.default), _pointwise_rule),
    canonical.clamped_swiglu.default: _pointwise_rule,
    **dict.fromkeys(
        (
            *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default),
            *(aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.topk.default),
            *(aten.repeat_interleave.self_int, aten.amax.default, aten.argmax.default, aten.cumsum.default),
            aten.squeeze.dim,
        ),
        _dim_rule("dim"),
    ),
    aten.linear.default: _last_axes(lambda given: 1, "input"),
    aten.layer_norm.default: _last_axes(lambda given: len(given["normalized_shape"]), "input"),
    aten.addmm.default: _last_axes(lambda given: 1, "mat1"),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), _matmul),
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index_rule,
    **dict.fromkeys(
        (
            *(canonical.rms_norm.default, canonical.add_rms_norm.default),
            *(canonical.rope.default, canonical.rope_interleaved.default),
        ),
        _norm,
    ),
}
