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


def carries(value: Any, length: str) -> list[int]:
    """The axes of a value whose size depends on the symbol `length`."""
    if not isinstance(value, torch.Tensor):
        return []
    sizes: list[Any] = list(value.shape)
    return [
        axis
        for axis, size in enumerate(sizes)
        if not isinstance(size, int) and any(str(each) == length for each in size.node.expr.free_symbols)
    ]


def first_mixed(graph: fx.Graph, length: str, apart: set[fx.Node]) -> Mixed | None:
    """The first call that mixes positions. Those of `apart` are known to be harmless: sources of positions, attention.

    A choice of the last position is none of them: what it gives is of one position.
    """
    picked: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in apart:
            continue
        carrying = [each for each in node.all_input_nodes if _axes(each, length)]
        if any(each in picked for each in node.all_input_nodes):
            if carrying:
                return Mixed(node, "the last position is brought together with others")
            picked.add(node)
        elif not carrying or node.target is aten.sym_size.int:
            continue
        elif _picks_last(node, length):
            picked.add(node)
        elif (reason := _mixes(node, carrying, length)) is not None:
            return Mixed(node, reason)
    return None


def _axes(node: fx.Node, length: str) -> list[int]:
    value = node.meta.get("val")
    found = [carries(each, length) for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return max(found, key=len, default=[])


def _picks_last(node: fx.Node, length: str) -> bool:
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return False
    given: dict[str, Any] = dict(normalised(node))
    axis = _from_the_end(given["self"], length)
    last = given["index"] == -1 if node.target is aten.select.int else given["start"] == -1
    return bool(given["dim"] == axis and last)


def _mixes(node: fx.Node, carrying: list[fx.Node], length: str) -> str | None:
    if any(len(_axes(each, length)) != 1 for each in (*carrying, node)):
        return "its result or an operand has no axis of positions, or several"
    known = _RULES.get(node.target)
    if known is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        known = _aligned
    if known is None:
        return f"{target_text(node.target)} is not known to keep positions apart"
    return None if known(node, carrying, length) else f"{target_text(node.target)} works along the axis of positions"


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


_RULES: dict[Any, Callable[[fx.Node, list[fx.Node], str], bool]] = {
    **dict.fromkeys(
        (
            *(aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
            *(aten.clone.default, aten.alias.default, aten.detach.default, operator.getitem),
        ),
        _always,
    ),
    **dict.fromkeys((aten._to_copy.default, canonical.swiglu.default, canonical.geglu.default), _aligned),
    canonical.clamped_swiglu.default: _aligned,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _viewed),
    **dict.fromkeys(
        (
            *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default),
            *(aten.softmax.int, aten._softmax.default, aten.sum.dim_IntList, aten.mean.dim, aten.topk.default),
            *(aten.repeat_interleave.self_int, aten.amax.default, aten.argmax.default, aten.cumsum.default),
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
