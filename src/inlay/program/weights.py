"""References to tensors: which file, which tensor, through which map. Never the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from inlay.errors import ModelError, ProgramError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class TensorRef(Protocol):
    """Where a binding's value comes from. `read` may map a file or compute; holding a reference costs nothing."""

    @property
    def origin(self) -> str:
        """A short text for people: file, tensor, map."""
        ...

    def read(self) -> torch.Tensor:
        """The tensor, mapped from its file where that is possible."""
        ...


@dataclass(frozen=True, eq=False)
class InMemoryTensor:
    """A tensor that exists nowhere else: a non-persistent buffer, a constant, a user's own module.

    >>> import torch
    >>> InMemoryTensor(torch.ones(2)).read()
    tensor([1., 1.])
    """

    tensor: torch.Tensor

    @property
    def origin(self) -> str:
        return "memory"

    def read(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class MissingTensor:
    """A tensor of a model that was captured from its configuration alone."""

    name: str

    @property
    def origin(self) -> str:
        return "no weights"

    def read(self) -> torch.Tensor:
        raise ModelError(
            f"{self.name} has no value: the model was captured from its configuration alone.",
            "Point MODEL at a folder that also holds *.safetensors files.",
        )


@dataclass(frozen=True, eq=False)
class CastTensor:
    """A tensor in another number format.

    >>> CastTensor(InMemoryTensor(torch.ones(2)), torch.float16).read().dtype
    torch.float16
    """

    source: TensorRef
    dtype: torch.dtype

    @property
    def origin(self) -> str:
        return f"{self.source.origin} via {str(self.dtype).removeprefix('torch.')}"

    @property
    def quantized_blocks(self) -> QuantizedBlocks | None:
        """The blocks behind it: what is stored has no number format of torch."""
        return quantized_blocks(self.source)

    def read(self) -> torch.Tensor:
        return self.source.read().to(self.dtype)


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """A tensor as a checkpoint stores it quantised."""

    format: str
    """Such as `Q4_1`."""
    read: Callable[[], torch.Tensor]
    """The bytes, `[rows, bytes a row]`, rows in the order that the parameter has them."""


def quantized_blocks(ref: TensorRef) -> QuantizedBlocks | None:
    """What a reference has stored, if that is quantised and each row of the parameter is one stored row.

    >>> quantized_blocks(InMemoryTensor(torch.ones(2))) is None
    True
    """
    found: QuantizedBlocks | None = getattr(ref, "quantized_blocks", None)
    return found


@dataclass(frozen=True)
class WeightMap:
    """How a weight is made of weights."""

    make: Callable[..., torch.Tensor]
    block_format: str = ""
    """The format of the stored blocks that it takes, as bytes; empty: it takes values."""


WEIGHT_MAPS: dict[str, WeightMap] = {
    "same": WeightMap(lambda tensor: tensor),
    "concat": WeightMap(lambda *tensors: torch.cat(tensors)),
    "transpose": WeightMap(lambda tensor: tensor.t().contiguous()),
}
"""How transforms make weights of weights, by name: packages name them, so that they can be refitted."""


def weight_maps(names: str) -> list[WeightMap]:
    """The maps of these names, one after the other: `concat+transpose`."""
    for name in names.split("+"):
        if name not in WEIGHT_MAPS:
            raise ProgramError(f"There is no weight map {name}.", suggest(name, WEIGHT_MAPS))
    return [WEIGHT_MAPS[name] for name in names.split("+")]


@dataclass(frozen=True, eq=False)
class DerivedTensor:
    """A tensor that a transform makes of weights of the model: which ones, by the names users know, and how.

    >>> one, two = InMemoryTensor(torch.ones(1)), InMemoryTensor(torch.zeros(1))
    >>> DerivedTensor({"a": one, "b": two}, "concat").read()
    tensor([1., 0.])
    """

    sources: Mapping[str, TensorRef]
    map: str
    """One map or several, one after the other, with `+` between them."""

    @property
    def origin(self) -> str:
        return f"{', '.join(self.sources)} via {self.map}"

    def readers(self) -> list[Callable[[], torch.Tensor]]:
        """How to read each source: its values, or its blocks when a map takes those. Other blocks are an error."""
        takes = next((each.block_format for each in weight_maps(self.map) if each.block_format), "")
        if not takes:
            return [ref.read for ref in self.sources.values()]
        found = {name: quantized_blocks(ref) for name, ref in self.sources.items()}
        for name, blocks in found.items():
            if blocks is None or blocks.format != takes:
                stored = "in another form" if blocks is None else f"as {blocks.format}"
                raise ModelError(
                    f"{name} is stored {stored}, and the weight is made of {takes} blocks.",
                    "Take a checkpoint that stores it so, or build a new package.",
                )
        return [blocks.read for blocks in found.values() if blocks is not None]

    def read(self) -> torch.Tensor:
        with torch.no_grad():
            values = [read() for read in self.readers()]
            for each in weight_maps(self.map):
                values = [each.make(*values)]
        return values[0]
