"""References to tensors: which file, which tensor, through which map. Never the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from inlay.errors import ProgramError, nearest

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
class InMemory:
    """A tensor that exists nowhere else: a non-persistent buffer, a constant, a user's own module.

    >>> import torch
    >>> InMemory(torch.ones(2)).read()
    tensor([1., 1.])
    """

    tensor: torch.Tensor

    @property
    def origin(self) -> str:
        return "memory"

    def read(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class Absent:
    """A tensor of a model that was captured from its configuration alone."""

    name: str

    @property
    def origin(self) -> str:
        return "no weights"

    def read(self) -> torch.Tensor:
        from inlay.errors import ModelError

        raise ModelError(
            f"{self.name} has no value: the model was captured from its configuration alone.",
            "Point MODEL at a folder that also holds *.safetensors files.",
        )


@dataclass(frozen=True, eq=False)
class Mapped:
    """A tensor made from other references by a map: dequantised, permuted, merged."""

    sources: tuple[TensorRef, ...]
    via: str
    make: Callable[..., torch.Tensor]

    @property
    def origin(self) -> str:
        first = self.sources[0].origin
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{first}{more} via {self.via}"

    def read(self) -> torch.Tensor:
        return self.make(*(source.read() for source in self.sources))


WEIGHT_MAPS: dict[str, Callable[..., torch.Tensor]] = {
    "same": lambda tensor: tensor,
    "concat": lambda *tensors: torch.cat(tensors),
    "transpose": lambda tensor: tensor.t().contiguous(),
}
"""How transforms make weights of weights, by name: packages name them, so that they can be refitted."""


def weight_map(name: str) -> Callable[..., torch.Tensor]:
    """The map of this name."""
    if name not in WEIGHT_MAPS:
        raise ProgramError(f"There is no weight map {name}.", nearest(name, WEIGHT_MAPS))
    return WEIGHT_MAPS[name]


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that a transform makes of weights of the model: which ones, by the names users know, and how.

    >>> one, two = InMemory(torch.ones(1)), InMemory(torch.zeros(1))
    >>> Derived({"a": one, "b": two}, "concat").read()
    tensor([1., 0.])
    """

    sources: Mapping[str, TensorRef]
    map: str

    @property
    def origin(self) -> str:
        return f"{', '.join(self.sources)} via {self.map}"

    def read(self) -> torch.Tensor:
        return weight_map(self.map)(*(ref.read() for ref in self.sources.values()))
