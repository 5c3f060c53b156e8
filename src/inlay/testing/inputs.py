"""What a model is called with: a tuple is given by position, a mapping by name, and a list holds several of these."""

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
    """One set of inputs, or a list of them, as a list.

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


def copy_inputs(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """The same values in memory of their own; floating point values in another dtype if one is given."""

    def converted(value: Any) -> Any:
        if dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    made: Inputs = tree_map(converted, copy.deepcopy(inputs))
    return made


def refuse_compiled(model: Model) -> None:
    """Where the model is also run eagerly, it must not be compiled already."""
    if is_compiled(model):
        raise UsageError("The model is compiled already.", "Give the model itself, and what compiles it as backend.")


def copy_model(model: Model) -> Model:
    """The model with state of its own, so that the caller's stays as it is; what is compiled already is not copied."""
    return model if is_compiled(model) else copy.deepcopy(model)


def compile_model(
    model: Model, backend: str | Callable[..., Any], options: Mapping[str, Any] | None, dynamic: bool | None
) -> Model:
    """What `torch.compile` makes of the model; itself if that is what it is."""
    if is_compiled(model):
        return model
    made: Model = torch.compile(model, backend=backend, dynamic=dynamic, options=dict(options) if options else None)
    return made
