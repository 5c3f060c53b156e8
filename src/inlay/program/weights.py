"""Weight references: file, tensor and weight map, but never the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from inlay.errors import ModelError, ProgramError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class TensorRef(Protocol):
    """A reference to the value of a binding. `read` may memory-map a file or compute; the reference itself is small."""

    @property
    def origin(self) -> str:
        """A short description: file, tensor, weight map."""

    def read(self) -> torch.Tensor:
        """Return the tensor, memory-mapped from its file if possible."""


@dataclass(frozen=True, eq=False)
class InMemoryTensor:
    """A tensor that is in no file: a non-persistent buffer, a constant, a weight of a module in memory.

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
    """A tensor of a model that was captured only from its configuration."""

    name: str

    @property
    def origin(self) -> str:
        return "no weights"

    def read(self) -> torch.Tensor:
        raise ModelError(
            f"{self.name} has no value: the model was captured from its configuration alone.",
            "Pass a MODEL folder that also contains *.safetensors files.",
        )


@dataclass(frozen=True, eq=False)
class CastTensor:
    """A tensor cast to another dtype.

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
        """The blocks of the source; the cast does not apply to them, because they have no torch dtype."""
        return quantized_blocks(self.source)

    def read(self) -> torch.Tensor:
        return self.source.read().to(self.dtype)


WIDE_BLOCKS = (64, 128)
"""Columns that blocks of Q4_0 and Q4_1 may have besides 32, as in the format `Q4_1-g64`."""


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """The quantized form in which a checkpoint stores a tensor."""

    format: str
    """The storage format, such as `Q4_1`."""
    rows: int
    read: Callable[[], torch.Tensor]
    """Returns the bytes, `[rows, bytes per row]`, in the row order of the parameter."""
    is_exact: bool = True
    """Whether the blocks have the values of the tensor; otherwise their scales or minima are rounded."""


def quantized_blocks(ref: TensorRef) -> QuantizedBlocks | None:
    """Return the stored blocks of a reference if it is quantized and each parameter row is one stored row.

    >>> quantized_blocks(InMemoryTensor(torch.ones(2))) is None
    True
    """
    found: QuantizedBlocks | None = getattr(ref, "quantized_blocks", None)
    return found


def is_bfloat16(values: torch.Tensor) -> bool:
    """Whether bfloat16 represents all values exactly.

    >>> is_bfloat16(torch.tensor([1.0, 1 + 2**-7])), is_bfloat16(torch.tensor([1 + 2**-8]))
    (True, False)
    """
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in torch.split(values, 256))


@dataclass(frozen=True)
class WeightMap:
    """A function that computes a weight from weights of the checkpoint."""

    make: Callable[..., torch.Tensor]
    block_formats: tuple[str, ...] = ()
    """The format of the stored blocks that it takes as bytes, one for all or one for each; empty if it takes values."""


WEIGHT_MAPS: dict[str, WeightMap] = {
    "same": WeightMap(lambda tensor: tensor),
    "concat": WeightMap(lambda *tensors: torch.cat(tensors)),
    "transpose": WeightMap(lambda tensor: tensor.t().contiguous()),
}
"""Weight maps by name. Packages store the names for refit."""
WEIGHT_MAP_KINDS: dict[str, Callable[[str], WeightMap]] = {}
"""Functions that create weight maps of a kind, such as `mixed:4096:Q4_K,Q6_K`, from the text after the first colon."""


def weight_maps(names: str) -> list[WeightMap]:
    """Return the maps of a chain such as `concat+transpose`, in order."""
    return [_weight_map(name) for name in names.split("+")]


def _weight_map(name: str) -> WeightMap:
    kind, _, text = name.partition(":")
    if kind in WEIGHT_MAP_KINDS:
        return WEIGHT_MAP_KINDS[kind](text)
    if name not in WEIGHT_MAPS:
        raise ProgramError(f"There is no weight map {name}.", suggest(name, WEIGHT_MAPS))
    return WEIGHT_MAPS[name]


@dataclass(frozen=True, eq=False)
class DerivedTensor:
    """A tensor that a transform computes from weights of the model, by their names in the model, through weight maps.

    >>> one, two = InMemoryTensor(torch.ones(1)), InMemoryTensor(torch.zeros(1))
    >>> DerivedTensor({"a": one, "b": two}, "concat").read()
    tensor([1., 0.])
    """

    sources: Mapping[str, TensorRef]
    map: str
    """One weight map, or several joined by `+`, applied in order."""

    @property
    def origin(self) -> str:
        return f"{', '.join(self.sources)} via {self.map}"

    def readers(self) -> list[Callable[[], torch.Tensor]]:
        """Return a reader for each source: of its values, or of its blocks if a map takes blocks of their formats."""
        takes = next((each.block_formats for each in weight_maps(self.map) if each.block_formats), ())
        if not takes:
            return [ref.read for ref in self.sources.values()]
        takes = takes * len(self.sources) if len(takes) == 1 else takes
        found = {name: quantized_blocks(ref) for name, ref in self.sources.items()}
        for (name, blocks), wanted in zip(found.items(), takes, strict=True):
            if blocks is None or blocks.format != wanted:
                stored = "in another format" if blocks is None else f"as {blocks.format}"
                raise ModelError(
                    f"{name} is stored {stored}, but the weight map requires {wanted} blocks.",
                    "Use a checkpoint that stores it in this format, or build a new package.",
                )
        return [blocks.read for blocks in found.values() if blocks is not None]

    def read(self) -> torch.Tensor:
        with torch.no_grad():
            values = [read() for read in self.readers()]
            for each in weight_maps(self.map):
                values = [each.make(*values)]
        return values[0]
