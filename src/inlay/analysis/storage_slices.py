"""Parts of the storage of a state binding, and the operators that write to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import is_view

if TYPE_CHECKING:
    from collections.abc import Mapping

aten = torch.ops.aten
SCATTERS: Mapping[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.as_strided_scatter.default: aten.as_strided.default,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Scatter operator → the view operator that takes the same part."""


@dataclass(frozen=True, eq=False)
class ViewCall:
    """One view step from a whole to a part: the view operator, and its arguments except the first."""

    target: Any
    args: tuple[Any, ...]

    def matches(self, node: fx.Node) -> bool:
        """Whether a call takes the same part."""
        return node.target is self.target and _normalize_args(self.target, node.args[1:]) == _normalize_args(
            self.target, self.args
        )


def _normalize_args(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with defaults filled in, and the `end` of a slice in one form."""
    defaults = [each.default_value for each in target._schema.arguments[1:]]
    filled = [*args, *defaults[len(args) :]]
    if target is aten.slice.Tensor:
        filled[1] = 0 if filled[1] is None else filled[1]
        filled[2] = 9223372036854775807 if filled[2] is None else filled[2]
    return tuple(filled)


@dataclass(frozen=True, eq=False)
class StorageSlice:
    """A part of a state's storage: views applied to the binding, one after the other."""

    views: tuple[ViewCall, ...] = ()

    def extend(self, target: Any, args: tuple[Any, ...]) -> StorageSlice:
        """Return a part of this part."""
        return StorageSlice((*self.views, ViewCall(target, args)))


def in_place_variant(target: Any) -> Any | None:
    """Return the operator that writes its result to its first operand, or None.

    >>> in_place_variant(torch.ops.aten.index_copy.default)
    <OpOverload(op='aten.index_copy_', overload='default')>
    >>> in_place_variant(torch.ops.aten.transpose.int) is None
    True
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if is_view(fx.Graph().call_function(target)):
        return None  # transpose_ and similar operators change metadata, not values
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    variant = getattr(packet, target._overloadname, None) if packet is not None else None
    if variant is None or not variant._schema.is_mutable:
        return None
    names, others = ([each.name for each in each_of._schema.arguments] for each_of in (target, variant))
    return variant if names == others else None
