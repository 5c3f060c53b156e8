"""The common form of every kind of MODEL before capture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch.export import ExportedProgram

    from inlay.program.encoder import EncoderFacts
    from inlay.program.weights import TensorRef


@dataclass(frozen=True)
class Example:
    """A module with example inputs and the names of its dynamic axes.

    A `package.module:factory` returns an `Example`.

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
    """A model that was found and checked: an example, references to its weights, and facts of its configuration."""

    name: str
    kind: str
    example: Example
    tensors: Mapping[str, TensorRef]
    """Qualified name → reference, for parameters and buffers that are stored in files."""
    config_facts: Mapping[str, int] = field(default_factory=dict)
    architecture: str = ""
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    """Axis name → maximum size, for axes that the model limits."""
    load_tokenizer: Callable[[], Any] | None = None
    """Loads the tokenizer that comes with the model; slow for GGUF files, which store it in another form."""
    exported: ExportedProgram | None = None
    """The exported program, if the model was exported before; the example has no inputs then."""
    encoder: EncoderFacts | None = None
    """How texts become embeddings, if the model is a text encoder."""

    @classmethod
    def from_exported(cls, exported: ExportedProgram, name: str = "exported") -> SourceModel:
        """Return a model that was exported before."""
        return cls(name, "exported", Example(exported.module()), {}, exported=exported)
