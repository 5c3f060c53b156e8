"""Mutating operators with every kind of schema that functionalization wraps.

Each operator writes before it reads, so that an argument that shares storage with a written one changes the result.
They use integers of any shape, so that results are exact in every layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _register_mutating(name: str, schema: str, *tags: torch.Tag) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(f"inlay_fuzz::{name}", schema, tags=tags)
        torch.library.impl(f"inlay_fuzz::{name}", "CompositeExplicitAutograd", function)
        return function

    return register


@_register_mutating("put", "(Tensor(a!) x, Tensor y) -> ()")
def put(x: Tensor, y: Tensor) -> None:
    """Write one tensor."""
    x.mul_(3)
    x.add_(y.sum())


@_register_mutating("keyed", "(Tensor(a!) x, *, Tensor y, int k=2) -> ()")
def keyed(x: Tensor, *, y: Tensor, k: int = 2) -> None:
    """Write one tensor and read a keyword-only one."""
    x.add_(k)
    x.mul_(y.sum())


@_register_mutating("two", "(Tensor(a!) x, Tensor y, Tensor(b!) z) -> Tensor")
def two(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Write two tensors and return a new one."""
    x.mul_(5)
    z.add_(y.sum())
    return x.sum() + y.sum()


@_register_mutating("both", "(Tensor(a!) x, Tensor(b!)? z, Tensor y) -> (Tensor, Tensor)")
def both(x: Tensor, z: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    """Write two tensors, one of them optional, and return two new ones."""
    x.sub_(4)
    if z is not None:
        z.add_(y.sum())
    return y.sum() * 2, x.sum()


@_register_mutating("many", "(Tensor(a!)[] xs, Tensor y) -> ()")
def many(xs: Sequence[Tensor], y: Tensor) -> None:
    """Write a list of tensors."""
    for index, each in enumerate(xs):
        each.add_(index)
        each.mul_(y.sum())


@_register_mutating("bump_", "(Tensor(a!) x, Tensor y) -> Tensor(a!)", torch.Tag.inplace)
def bump_(x: Tensor, y: Tensor) -> Tensor:
    """Write a tensor and return it."""
    x.mul_(7)
    return x.add_(y.sum())


def _two(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return y.new_empty([], dtype=y.dtype)


def _both(x: Tensor, z: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty([]), x.new_empty([])


torch.library.register_fake("inlay_fuzz::two", _two)
torch.library.register_fake("inlay_fuzz::both", _both)


MUTATED_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    torch.ops.inlay_fuzz.put.default: ("x",),
    torch.ops.inlay_fuzz.keyed.default: ("x",),
    torch.ops.inlay_fuzz.two.default: ("x", "z"),
    torch.ops.inlay_fuzz.both.default: ("x", "z"),
    torch.ops.inlay_fuzz.many.default: ("xs",),
    torch.ops.inlay_fuzz.bump_.default: ("x",),
}
"""Operator → the arguments it writes."""
