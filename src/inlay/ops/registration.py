"""Registration of operators and kernels with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY: Any = torch.library.Library("inlay", "FRAGMENT")  # type: ignore[no-untyped-call]
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
"""Operator overload → its reference, for compilers that need plain ATen."""
SHIMS: dict[Any, str] = {}
"""Operator overload → the argument types of its C++ kernel, which packages contain (`inlay.ops.native`)."""

DEVICE_KERNELS: dict[str, str] = {}
"""Operator → the device for which Inlay has a Triton kernel."""


def canonical_op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as `inlay::name`: implementation, fake kernel and decomposition are the function itself.

    An operator must not return one of its inputs, so a reference must return a new tensor.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        made = custom_op(name)(reference)
        made.register_fake(reference)
        DECOMPOSITIONS[made.overload] = reference
        return reference

    return register


class CustomOp:
    """An operator that compilers call without decomposing it."""

    def __init__(self, name: str, function: Callable[..., Any], shim: str) -> None:
        self.function = function
        self.__doc__ = function.__doc__
        # torch.library.custom_op would add Python overhead to every call.
        _LIBRARY.define(f"{name}{torch.library.infer_schema(function, mutates_args=())}")
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.inlay, name).default
        if shim:
            SHIMS[self.overload] = shim

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a function that returns the result's type without computing the result."""
        torch.library.register_fake(self.overload, function, lib=_LIBRARY)
        return function


def custom_op(name: str, shim: str = "") -> Callable[[Callable[..., Any]], CustomOp]:
    """Register a function as `inlay::name`, opaque to compilers. `shim` lists the argument types of its C++ kernel."""
    return lambda function: CustomOp(name, function, shim)


def check_range(what: str, values: torch.Tensor, maximum: int) -> None:
    """Raise an IndexError if an index is below 0 or above `maximum`.

    >>> check_range("slot", torch.tensor([0, 4]), 3)
    Traceback (most recent call last):
    IndexError: slot 4 at 1 is not from 0 to 3
    """
    numbers = values.reshape(-1).tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) <= maximum:
        place, value = next((place, each) for place, each in enumerate(numbers) if not 0 <= each <= maximum)
        raise IndexError(f"{what} {value} at {place} is not from 0 to {maximum}")


def register_kernel(name: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel of `inlay::name` for a device (`CUDA`). Other devices use the reference."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.impl(name, function, device)
        DEVICE_KERNELS[f"inlay::{name}"] = device
        return function

    return register
