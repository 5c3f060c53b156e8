"""Normalized arguments of a call: by name, with defaults, axes counted from the end."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterator

AXES = {"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"}
"""Names of arguments that are axes."""
COMMUTATIVE = {
    torch.ops.aten.add.Tensor: ("self", "other"),
    torch.ops.aten.mul.Tensor: ("self", "other"),
    torch.ops.aten.__and__.Tensor: ("self", "other"),
}
"""Operator → the two arguments that may be swapped."""


@lru_cache(maxsize=4096)
def _names(target: Any) -> tuple[tuple[str, bool, Any], ...]:
    return tuple(
        (argument.name, argument.has_default_value(), argument.default_value) for argument in target._schema.arguments
    )


def normalize_args(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call by name, including defaults."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from ((f"_{index}", value) for index, value in enumerate(node.args))
        yield from node.kwargs.items()
        return
    rank = _rank(node)
    for index, (name, has_default, default) in enumerate(_names(node.target)):
        if index < len(node.args):
            value = node.args[index]
        elif name in node.kwargs:
            value = node.kwargs[name]
        elif has_default:
            value = default
        else:
            continue
        if value is None and name == "start":
            value = 0  # torch.export writes either, depending on whether the size is dynamic
        yield name, _count_from_end(value, rank) if name in AXES and rank else value


def _rank(node: fx.Node) -> int:
    """Return the rank that axis arguments refer to: of the first tensor, or the first of a list of tensors."""
    candidates = [*node.args, *node.kwargs.values()]
    for arg in candidates:
        first = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
        value = first.meta.get("val") if isinstance(first, fx.Node) else None
        if isinstance(value, torch.Tensor):
            extra = 1 if node.target is torch.ops.aten.unsqueeze.default else 0
            return value.dim() + extra
    return 0


def _count_from_end(value: Any, rank: int) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value - rank if value >= 0 else value
    if isinstance(value, (list, tuple)):
        return [_count_from_end(each, rank) for each in value]
    return value
