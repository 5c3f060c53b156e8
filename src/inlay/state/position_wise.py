"""Does a program treat every position alone? Only then may it be run on a few positions at a time.

A sequence may be cut anywhere when no value of one position depends on another, but through attention over a cache.
The axis of positions is the one whose size holds the symbol of the length; every call that reads a value with that axis
must be known to keep its positions apart. A call that is not known is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import target_text
from inlay.rewrite.schema import normalised

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
canonical = torch.ops.inlay


@dataclass(frozen=True)
class Mixed:
    """A call that brings positions together, or may."""

    node: fx.Node
    reason: str

    def __str__(self) -> str:
        """Which value, what computes it, and why that is too much."""
        named = self.node.op != "call_function" or target_text(self.node.target) in self.reason
        return (
            f"{self.node}: {self.reason}" if named else f"{self.node} ({target_text(self.node.target)}): {self.reason}"
        )


def depends(size: Any, symbol: str) -> bool:
    """Whether a number is an expression of a symbol."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return any(str(each) == symbol for each in size.node.expr.free_symbols)


def carries(value: Any, length: str) -> list[int]:
    """The axes of a value whose size depends on the symbol `length`."""
    if not isinstance(value, torch.Tensor):
        return []
    return [axis for axis, size in enumerate(value.shape) if depends(size, length)]


def first_mixed(graph: fx.Graph, length: str, sources: set[fx.Node], attention: set[fx.Node]) -> Mixed | None:
    """The first call that mixes positions. `sources` are known to be harmless; `attention` is to get a cache.

    A choice of the last position is none of them: what it gives is of one position.
    """
    picked: set[fx.Node] = set()
    for node in graph.nodes:
        reason: str | None = None
        if node.op == "placeholder":
            reason = _given(node, length)
        elif node.op == "output":
            reason = "the length itself is returned" if _numbers(node, length) else None
        elif node.op != "call_function" or node in sources or _is_size(node):
            continue
        elif node in attention:
            reason = _attends(node, length, picked)
        elif any(each in picked for each in node.all_input_nodes):
            picked.add(node)
            if any(_axes(each, length) for each in (*node.all_input_nodes, node)):
                reason = "the last position is brought together with others"
        elif _picks_last(node, length):
            picked.add(node)
        else:
            reason = _reads_the_length(node, length) or mixes(node, length)
        if reason is not None:
            return Mixed(node, reason)
    return None


def _axes(node: fx.Node, length: str) -> list[int]:
    value = node.meta.get("val")
    found = [carries(each, length) for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return max(found, key=len, default=[])


def _numbers(node: fx.Node, length: str) -> list[fx.Node]:
    """The operands that are the length, or a number computed from it."""
    return [each for each in node.all_input_nodes if depends(each.meta.get("val"), length)]


def _is_size(node: fx.Node) -> bool:
    """A size, or something computed from sizes alone: harmless until a tensor is computed with it."""
    if node.target in (aten.sym_size.int, aten._assert_scalar.default):
        return True
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return all(isinstance(each, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for each in values)


def _given(node: fx.Node, length: str) -> str | None:
    """An input may have the axis of positions, but none that is longer or shorter by a rule."""
    value: Any = node.meta.get("val")
    exact = all(str(value.shape[axis]) == length for axis in carries(value, length))
    return None if exact else "the size of an axis is computed from the length"


def _attends(node: fx.Node, length: str, picked: set[fx.Node]) -> str | None:
    given: dict[str, Any] = dict(normalised(node))
    operands = {given[name] for name in ("query", "key", "value")}
    if any(each in picked for each in node.all_input_nodes):
        return "the last position is brought together with others"
    if _numbers(node, length):
        return _AS_A_NUMBER
    for each in node.all_input_nodes:
        if carries(each.meta["val"], length) != ([2] if each in operands else []):
            return f"{each} has positions along another axis than attention expects"
    return None


_AS_A_NUMBER = "the length is used as a number, which is another one for a part of the sequence"


def _reads_the_length(node: fx.Node, length: str) -> str | None:
    """A shape may hold the length, when the call is known to make nothing else of it."""
    if not _numbers(node, length) or node.target is aten.expand.default:
        return None
    if node.target in _VIEWS and any(_axes(each, length) for each in node.all_input_nodes):
        return None
    return _AS_A_NUMBER


def _picks_last(node: fx.Node, length: str) -> bool:
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return False
    given: dict[str, Any] = dict(normalised(node))
    if len(_axes(given["self"], length)) != 1:
        return False
    axis = _from_the_end(given["self"], length)
    last = given["index"] == -1 if node.target is aten.select.int else given["start"] == -1
    return bool(given["dim"] == axis and last)


def mixes(node: fx.Node, symbol: str, what: str = "positions") -> str | None:
    """Why a call may bring values together along the axis of a symbol."""
    carrying = [each for each in node.all_input_nodes if _axes(each, symbol)]
    if not carrying:
        return None
    if any(len(_axes(each, symbol)) != 1 for each in (*carrying, node)):
        return f"{target_text(node.target)}: its result or an operand has no axis of {what}, or several"
    known = _RULES.get(node.target)
    if known is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        known = _aligned
    if known is None:
        return f"{target_text(node.target)} is not known to keep {what} apart"
    return None if known(node, carrying, symbol) else f"{target_text(node.target)} works along the axis of {what}"


def _from_the_end(node: fx.Node, length: str) -> int:
    """The axis of positions, counted from the end."""
    value: Any = node.meta["val"]
    value = next((each for each in tree_leaves(value) if carries(each, length)), value)
    return carries(value, length)[0] - int(value.dim())


def _aligned(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Value by value: operands are lined up from the end."""
    axis = _from_the_end(node, length)
    return all(_from_the_end(each, length) == axis for each in carrying)


def _always(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    return True


def _along(*names: str) -> Callable[[fx.Node, list[fx.Node], str], bool]:
    """Calls that work along axes they are given, by these names."""

    def apart(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
        given: dict[str, Any] = dict(normalised(node))
        axes = tree_leaves([given.get(name) for name in names])
        positions = {_from_the_end(each, length) for each in carrying}
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
        given: dict[str, Any] = dict(normalised(node))
        return carrying == [given[operand]] and _from_the_end(given[operand], length) < -count(given)

    return apart


def _norm(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """Norms of the last axis, rotations within it: operands lined up, positions along another axis."""
    return _aligned(node, carrying, length) and _from_the_end(node, length) < -1


def _matmul(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    left, right = node.args[:2]
    if len(carrying) != 1:
        return False
    return _from_the_end(carrying[0], length) != (-1 if carrying[0] is left else -2) and left is not right


def _viewed(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    """A view keeps rows together when as many values as before lie behind each position."""
    return _behind(node, length) == _behind(carrying[0], length)


def _behind(node: fx.Node, length: str) -> str:
    value: torch.Tensor = node.meta["val"]
    count: Any = 1
    for size in value.shape[carries(value, length)[0] + 1 :]:
        count = count * size
    return str(count)


def _indexed(node: fx.Node, carrying: list[fx.Node], length: str) -> bool:
    source, indices = node.args[:2]
    if carrying != [source] or not isinstance(indices, (list, tuple)):
        return False
    axis = carries(source.meta["val"], length)[0]  # type: ignore[union-attr]
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
        _always,
    ),
    **dict.fromkeys((aten._to_copy.default, canonical.swiglu.default, canonical.geglu.default), _aligned),
    canonical.clamped_swiglu.default: _aligned,
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(
        (
            *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default),
            *(aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.topk.default),
            *(aten.repeat_interleave.self_int, aten.amax.default, aten.argmax.default, aten.cumsum.default),
            aten.squeeze.dim,
        ),
        _along("dim"),
    ),
    aten.linear.default: _last_axes(lambda given: 1, "input"),
    aten.layer_norm.default: _last_axes(lambda given: len(given["normalized_shape"]), "input"),
    aten.addmm.default: _last_axes(lambda given: 1, "mat1"),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default), _matmul),
    aten.embedding.default: _embedding,
    aten.index.Tensor: _indexed,
    **dict.fromkeys(
        (
            *(canonical.rms_norm.default, canonical.add_rms_norm.default),
            *(canonical.rope.default, canonical.rope_interleaved.default),
        ),
        _norm,
    ),
}
