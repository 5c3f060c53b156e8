"""What every kind of MODEL becomes before it is captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from inlay.program.weights import TensorRef


@dataclass(frozen=True)
class Example:
    """A module with one set of inputs and the names of the axes that may change.

    This is what a `package.module:factory` returns.

    >>> import torch
    >>> example = Example(torch.nn.Linear(4, 4), (torch.ones(2, 4),), axes={"input": {0: "batch"}})
    >>> example.axes["input"][0]
    'batch'
    """

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceModel:
    """A model that was found and checked: an example, where its weights are, and what its configuration says."""

    name: str
    kind: str
    example: Example
    tensors: Mapping[str, TensorRef]
    """Qualified name → reference, for parameters and buffers that live in files."""
    config_facts: Mapping[str, int] = field(default_factory=dict)
    architecture: str = ""
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    """Largest size of a named axis, where the model has one."""
    load_tokenizer: Callable[[], Any] | None = None
    """Loads the tokenizer that comes with the model; slow for GGUF files, which store it in another form."""
