"""Check that a program computes positions, and the sequences of a batch, independently of each other.

Only then may a sequence be split into chunks, and sequences be batched: no value of one position or sequence depends on
another, except through attention over a cache. The axis of positions is the axis whose size contains the symbol of the
length. The axis of sequences is the one whose size contains the symbol of the batch. A view may merge them. Every call
that reads a value with such an axis must be known to keep its entries independent. An unknown call is refused.
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
    """A call that combines positions or sequences, or may, and the reason."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        """Return the node, its operator and the reason."""
        named = self.node.op != "call_function" or target_text(self.node.target) in self.reason
        return (
            f"{self.node}: {self.reason}" if named else f"{self.node} ({target_text(self.node.target)}): {self.reason}"
        )


def depends_on_symbol(size: Any, symbol: str) -> bool:
    """Whether a size is an expression that contains a symbol."""
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
    """An axis whose entries must stay independent: its symbol, names for messages, why its size must not be used."""

    symbol: str
    entry_name: str
    size_name: str
    size_reason: str

    @property
    def size_message(self) -> str:
        """The message for a computation that uses the size itself."""
        return f"{self.size_name} is used as a number, {self.size_reason}"


def position_axis(length: str) -> SequenceAxis:
    """The positions of a sequence."""
    return SequenceAxis(length, "positions", "the length", "which differs when only a part of the sequence is computed")


def batch_axis(batch: str) -> SequenceAxis:
    """The sequences of a batch."""
    return SequenceAxis(batch, "sequences", "the size of the batch", "which depends on the other requests in the batch")


def find_mixing_call(
    graph: fx.Graph, axis: SequenceAxis, sources: set[fx.Node], attention: set[fx.Node]
) -> MixingCall | None:
    """Return the first call that mixes entries of an axis, or None.

    `sources` are known not to mix. `attention` contains the calls that will read a cache. Selecting the last position
    does not mix: its result has one position.
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
                reason = "the last position is combined with others"
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
    """Return the operands that are the length, or a number computed from it."""
    return [each for each in node.all_input_nodes if depends_on_symbol(each.meta.get("val"), length)]


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size or computed from sizes alone: it mixes nothing until a tensor is computed with it."""
    if node.target in (aten.sym_size.int, aten._assert_scalar.default):
        return True
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return all(isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for each in values)


def _check_placeholder(node: fx.Node, axis: SequenceAxis) -> str | None:
    """An input may have the axis, but its size must be the symbol itself, not an expression of it."""
    value: Any = node.meta.get("val")
    exact = all(str(value.shape[each]) == axis.symbol for each in axes_with_symbol(value, axis.symbol))
    return None if exact else f"the size of an axis is computed from {axis.size_name}"


def _check_attention(node: fx.Node, axis: SequenceAxis, picked: set[fx.Node]) -> str | None:
    given: dict[str, Any] = dict(normalize_args(node))
    operands = {given[name] for name in ("query", "key", "value")}
    if any(each in picked for each in node.all_input_nodes):
        return "the last position is combined with others"
    if _size_operands(node, axis.symbol):
        return axis.size_message
    place = [2] if axis.entry_name == "positions" else [0]
    for each in node.all_input_nodes:
        if axes_with_symbol(each.meta["val"], axis.symbol) != (place if each in operands else []):
            return f"{each} has {axis.entry_name} along another axis than attention expects"
    return None


def _check_size_use(node: fx.Node, axis: SequenceAxis) -> str | None:
    """The size may be used as a shape, by calls that use it for nothing else."""
    if not _size_operands(node, axis.symbol) or node.target is aten.expand.default:
        return None
    if node.target in _VIEWS and any(_axes(each, axis.symbol) for each in node.all_input_nodes):
        return None
    given: dict[str, Any] = dict(normalize_args(node)) if node.target in _SHAPE_ONLY else {}
    is_shape = given and not depends_on_symbol(_value(given.get("fill_value")), axis.symbol)
    return None if is_shape and _shape_rule(node, [], axis.symbol) else axis.size_message


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


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

    A view may merge the axis with others, [batch, length, 8] to [batch * length, 8]. The size shows which axis it is.
    The tracker also records how many elements of that axis belong to one entry: `length` for the batch in this example.
    """

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis, self.symbol = axis, axis.symbol
        self._inner_sizes: dict[fx.Node, Any] = {}

    def record(self, node: fx.Node) -> None:
        """Record where the axis is in a value that was checked."""
        if len(_axes(node, self.symbol)) != 1:
            return
        carrying = [each for each in node.all_input_nodes if len(_axes(each, self.symbol)) == 1]
        if node.target in _VIEWS and carrying:
            inner = self._inner_size_after_view(node, carrying[0])
        else:
            follows = carrying and node.target not in _NEW_SHAPE
            inner = self.inner_size(carrying[0]) if follows else _default_inner_size(node, self.axis)
        self._inner_sizes[node] = 1 if inner is None else inner

    def inner_size(self, node: fx.Node) -> Any:
        """Return how many elements along its axis lie between two entries."""
        return self._inner_sizes.get(node, 1)

    def mixing_reason(self, node: fx.Node) -> str | None:
        """Return why a call may combine entries, or None if it does not."""
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
            return f"{name} is not known to keep {entries} independent"
        together = len({self.inner_size(each) for each in carrying}) == 1 and known(node, carrying, symbol)
        return None if together else f"{name} works along the axis of {entries}"

    def _inner_size_after_view(self, node: fx.Node, source: fx.Node) -> Any:
        """Return how many elements lie between two entries after a view; None where it moves entries into other axes.

        An entry stays in this axis and in no other under two conditions: as many values follow an entry as before, and
        the size of the axis is a multiple of the distance between two entries times their number.
        """
        behind, size = _trailing_size(node, self.symbol)
        stride = self.inner_size(source) * _trailing_size(source, self.symbol)[0]
        inner = sympy.cancel(stride / behind)
        whole = [inner, sympy.cancel(size / (inner * _symbol(self.symbol)))]
        return inner if all(sympy.fraction(sympy.together(each))[1] == 1 for each in whole) else None


def _default_inner_size(node: fx.Node, axis: SequenceAxis) -> Any:
    """Entries that are all equal may be assumed to lie anywhere: a batch is outermost, positions innermost."""
    size = _trailing_size(node, axis.symbol)[1]
    return sympy.cancel(size / _symbol(axis.symbol)) if axis.entry_name == "sequences" else 1


def _trailing_size(node: fx.Node, symbol: str) -> tuple[Any, Any]:
    """Return how many values follow one index of a symbol's axis, and the axis size. Symbols are identified by name."""
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
    """Pointwise calls: the axes of operands are aligned from the end."""
    axis = _negative_axis(node, length)
    return all(_negative_axis(each, length) == axis for each in carrying)


def _any_axis_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    return True


def _dim_rule(*names: str) -> Callable[[fx.Node, list[fx.Node], str], bool]:
    """Return the rule of calls that work along the axes in these arguments."""

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
    """Return the rule of calls that reduce the last axes of one operand, the only one that may have the axis."""

    def apart(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
        given: dict[str, Any] = dict(normalize_args(node))
        return carrying == [given[operand]] and _negative_axis(given[operand], length) < -count(given)

    return apart


def _norm(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Norms of the last axis and rotations within it: operands are aligned, and the entries lie along another axis."""
    return _pointwise_rule(node, carrying, length) and _negative_axis(node, length) < -1


def _matmul(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """A matrix product reduces the last axis of one operand and the second last of the other."""
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


def _repeat_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    repeats: Any = node.args[1]
    return bool(repeats[_negative_axis(carrying[0], length)] == 1)


def _shape_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """New tensors whose entries are all equal, or not set yet: the size of the axis is the number of entries."""
    value: Any = node.meta["val"]
    is_like = node.target in _LIKE and carrying
    return bool(is_like) or all(str(value.shape[axis]) == length for axis in axes_with_symbol(value, length))


def _embedding(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    return carrying == [node.args[1]]


def _by_index_rule(*names: str) -> Callable[[fx.Node, list[fx.Node], str], bool]:
    """Return the rule of calls that read or write where an index says, for each entry: these operands are aligned."""
    along = _dim_rule("dim")

    def apart(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
        given: dict[str, Any] = dict(normalize_args(node))
        return {given[name] for name in names} <= {*carrying} and along(node, carrying, length)

    return apart


def _experts_rule(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Rows of tokens and their experts are aligned from the start: `[…, chosen, column]`, `[…, chosen]`."""
    given: dict[str, Any] = dict(normalize_args(node))
    axis = _negative_axis(node, length)
    if axis >= -2 or not {*carrying} <= {given["x"], given["experts"]}:
        return False
    return all(_negative_axis(each, length) == axis + (each is given["experts"]) for each in carrying)


_NEW_SHAPE = (aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
_SHAPE_ONLY = (*_NEW_SHAPE, *_LIKE)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_RULES: dict[Any, Callable[[fx.Node, list[fx.Node], str], bool]] = {
    **dict.fromkeys(
        (
            *(aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default),
            *(aten.clone.default, aten.alias.default, aten.detach.default, operator.getitem),
            *(aten.view_as_complex.default, aten.view_as_real.default),  # they split or merge the last axis, of size 2
        ),
        _any_axis_rule,
    ),
    **dict.fromkeys((aten._to_copy.default, canonical.swiglu.default, canonical.geglu.default), _pointwise_rule),
    **dict.fromkeys((canonical.clamped_swiglu.default, aten.copy.default, aten.polar.default), _pointwise_rule),
    **dict.fromkeys((aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _pointwise_rule),
    **dict.fromkeys(_SHAPE_ONLY, _shape_rule),
    **dict.fromkeys(
        (
            *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default),
            *(aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.topk.default),
            *(aten.repeat_interleave.self_int, aten.amax.default, aten.argmax.default, aten.cumsum.default),
            *(aten.squeeze.dim, aten.slice_scatter.default),
        ),
        _dim_rule("dim"),
    ),
    aten.linear.default: _last_axes(lambda given: 1, "input"),
    aten.layer_norm.default: _last_axes(lambda given: len(given["normalized_shape"]), "input"),
    aten.addmm.default: _last_axes(lambda given: 1, "mat1"),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), _matmul),
    aten.embedding.default: _embedding,
    aten.gather.default: _by_index_rule("self", "index"),
    aten.scatter.value: _by_index_rule("self", "index"),
    aten.scatter.src: _by_index_rule("self", "index", "src"),
    canonical.expert_linear.default: _experts_rule,
    aten.index.Tensor: _index_rule,
    aten.repeat.default: _repeat_rule,
    **dict.fromkeys(
        (
            *(canonical.rms_norm.default, canonical.add_rms_norm.default),
            *(canonical.rope.default, canonical.rope_interleaved.default),
        ),
        _norm,
    ),
}
