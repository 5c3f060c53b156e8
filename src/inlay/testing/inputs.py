"""Inputs of a model: a tuple is passed by position, a mapping by name; a list contains several sets of inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from inlay.errors import UsageError
from inlay.testing.compiler import is_compiled

Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | torch.Tensor
Model: TypeAlias = Callable[..., Any]


def as_input_sets(inputs: Inputs | list[Inputs]) -> list[Inputs]:
    """Return one or several sets of inputs as a list.

    >>> as_input_sets((1, 2)), as_input_sets([(1,), {"x": 2}])
    ([(1, 2)], [(1,), {'x': 2}])
    """
    sets = inputs if isinstance(inputs, list) else [inputs]
    for each in sets:
        if not isinstance(each, (tuple, Mapping, torch.Tensor)):
            raise UsageError(
                f"A set of inputs is a {type(each).__name__}.",
                "Give a tuple (by position) or a mapping (by name), or a list of these.",
            )
    if not sets:
        raise UsageError("There are no inputs.", "Give a tuple, a mapping, or a list of these.")
    return sets


def call(model: Model, inputs: Inputs) -> Any:
    """Call the model with one set of inputs."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def copy_inputs(inputs: Inputs, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Inputs:
    """Return a deep copy: floating-point tensors converted to `dtype`, and all tensors moved to `device`, if given."""

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wanted = dtype if value.is_floating_point() else None
        if wanted is None and (device is None or device.type == value.device.type == "cpu"):
            return value
        return value.detach().to(device=device, dtype=wanted).requires_grad_(value.requires_grad)

    made: Inputs = tree_map(converted, copy.deepcopy(inputs))
    return made


def refuse_compiled(model: Model) -> None:
    """Raise if the model is already compiled, because it is also run eagerly."""
    if is_compiled(model):
        raise UsageError("The model is already compiled.", "Give the model itself, and its compiler as backend.")


def copy_model(model: Model) -> Model:
    """Return a deep copy, so that the caller's state does not change; a compiled model is not copied."""
    return model if is_compiled(model) else copy.deepcopy(model)


def compile_model(
    model: Model, backend: str | Callable[..., Any], options: Mapping[str, Any] | None, dynamic: bool | None
) -> Model:
    """Return the model compiled by `torch.compile`; an already compiled model is returned unchanged."""
    if is_compiled(model):
        return model
    made: Model = torch.compile(model, backend=backend, dynamic=dynamic, options=dict(options) if options else None)
    return made
