"""Defining a canonical operator from its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operator overload → its reference, for compilers that want plain ATen."""


def canonical(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as `inlay::name`: implementation, fake kernel and decomposition are the function itself.

    An operator must not return one of its inputs, so references end in something that makes a new tensor.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(f"inlay::{name}", mutates_args=())(reference)
        operator.register_fake(reference)
        overload = getattr(torch.ops.inlay, name).default
        DECOMPOSITIONS[overload] = reference
        return reference

    return register
