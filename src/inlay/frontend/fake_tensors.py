"""Modules without weights: parameters are fake tensors on the CPU device, buffers are real.

The meta device is not an option. It bakes `device=meta` into captured graphs and loses the buffers that are not in
the checkpoint (`inv_freq`, embedding scales).

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from inlay.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterator


class _FakeModeState(threading.local):
    """The fake tensor mode of this thread while it builds a module without weights."""

    mode: FakeTensorMode | None = None


_FAKE_MODE_STATE = _FakeModeState()


def _replace_with_fake(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> torch.nn.Parameter | None:
    mode = _FAKE_MODE_STATE.mode
    if mode is None or is_fake(param):
        return None
    with mode:
        empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
    made = torch.nn.Parameter(empty, requires_grad=False)
    made._is_hf_initialized = True  # type: ignore[attr-defined] # transformers would draw and examine random values
    return made


# Stays registered: torch iterates over its hooks without a lock, so adding and removing them is not thread-safe.
register_module_parameter_registration_hook(_replace_with_fake)  # type: ignore[arg-type]


@contextmanager
def fake_parameters() -> Iterator[None]:
    """Replace every parameter that a module registers in this context by a fake tensor of the same shape.

    Other threads are not affected.

    >>> with fake_parameters():
    ...     layer = torch.nn.Linear(1 << 20, 1 << 12, bias=False)
    >>> is_fake(layer.weight), tuple(layer.weight.shape)
    (True, (4096, 1048576))
    """
    before, _FAKE_MODE_STATE.mode = _FAKE_MODE_STATE.mode, FakeTensorMode(allow_non_fake_inputs=True)
    try:
        yield
    finally:
        _FAKE_MODE_STATE.mode = before


@contextmanager
def fake_mode_of(module: torch.nn.Module) -> Iterator[None]:
    """Make a module with fake parameters callable in this context, with fake results; no effect on other modules.

    >>> with fake_parameters():
    ...     layer = torch.nn.Linear(2, 1 << 12)
    >>> with fake_mode_of(layer):
    ...     made = layer(torch.ones(1 << 30, 2))
    >>> is_fake(made), tuple(made.shape)
    (True, (1073741824, 4096))
    """
    held = [parameter.data for parameter in module.parameters()]
    mode = next((each.fake_mode for each in held if isinstance(each, FakeTensor)), None)
    with mode or nullcontext():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: it has a shape but no memory."""
    return isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)


def check_buffers(module: torch.nn.Module) -> None:
    """Reject fake buffers: a buffer computed from a fake parameter has no value."""
    for name, buffer in module.named_buffers():
        if is_fake(buffer):
            raise CaptureError(
                f"The buffer {name} is computed from a weight when the model is built, so it has no value yet.",
                "Capture the model with its weights in memory: pass the nn.Module itself to inlay.frontend.",
            )
