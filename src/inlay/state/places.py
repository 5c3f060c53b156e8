"""Places in the storage of a state binding, and the operators that write to them."""

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
"""What puts a part back into a whole → what takes that part out."""
WRAPPED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
"""Mutating operators as functionalization leaves them: called on copies, results handed out one by one."""


@dataclass(frozen=True, eq=False)
class View:
    """One step from a whole to a part: a view operator and its arguments but the first."""

    target: Any
    args: tuple[Any, ...]

    def same(self, node: fx.Node) -> bool:
        """Whether a call takes the same part."""
        return node.target is self.target and _full(self.target, node.args[1:]) == _full(self.target, self.args)


def _full(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with defaults filled in, `end` of a slice written one way."""
    defaults = [each.default_value for each in target._schema.arguments[1:]]
    filled = [*args, *defaults[len(args) :]]
    if target is aten.slice.Tensor:
        filled[1] = 0 if filled[1] is None else filled[1]
        filled[2] = 9223372036854775807 if filled[2] is None else filled[2]
    return tuple(filled)


@dataclass(frozen=True, eq=False)
class Place:
    """A part of a state's storage: views applied to the binding, one after the other."""

    views: tuple[View, ...] = ()

    def part(self, target: Any, args: tuple[Any, ...]) -> Place:
        """A part of this part."""
        return Place((*self.views, View(target, args)))


def is_wrapped(node: Any) -> bool:
    """Whether a node calls a mutating operator the functional way."""
    return isinstance(node, fx.Node) and node.target in WRAPPED


def wrapped_operands(call: fx.Node) -> list[fx.Node | None]:
    """What a wrapped operator writes to, in the order of its results; None where it is only given a view of it."""
    schema = call.args[0]._schema  # type: ignore[union-attr]
    names = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    if call.target is WRAPPED[0]:
        return [each if isinstance(each := call.kwargs.get(name), fx.Node) else None for name in names]
    bases: Any = call.kwargs["_all_bases"]
    whole = {call.kwargs.get(f"_{name}_base_index") for name in names if f"_{name}_size" not in call.kwargs}
    sliced = {call.kwargs.get(f"_{name}_base_index") for name in names if f"_{name}_slice_dim" in call.kwargs}
    return [base if index in whole - sliced else None for index, base in enumerate(bases)]


def wrapped_operand(result: fx.Node) -> fx.Node | None:
    """What a result of a wrapped operator is the new value of."""
    call: Any = result.args[0]
    index: Any = result.args[1]
    index -= max(1, len(call.args[0]._schema.returns))
    operands = wrapped_operands(call)
    return operands[index] if 0 <= index < len(operands) else None


def in_place_variant(target: Any) -> Any | None:
    """The operator that writes its result over its first operand, where there is one.

    >>> in_place_variant(torch.ops.aten.index_copy.default)
    <OpOverload(op='aten.index_copy_', overload='default')>
    >>> in_place_variant(torch.ops.aten.transpose.int) is None
    True
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if is_view(fx.Graph().call_function(target)):
        return None  # transpose_ and its like change what a tensor looks like, not what it holds
    packet = getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None)
    variant = getattr(packet, target._overloadname, None) if packet is not None else None
    if variant is None or not variant._schema.is_mutable:
        return None
    names, others = ([each.name for each in each_of._schema.arguments] for each_of in (target, variant))
    return variant if names == others else None
