"""What the inputs of a grown graph hold, for any sizes its symbols stand for: random numbers, some of them extreme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

EXTREMES = ("nan", "inf", "-inf", "zero", "-zero", "largest", "large", "small", "smallest", "all equal")


@dataclass(frozen=True, eq=False)
class Leaf:
    """What an input holds, whatever its symbols stand for."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]
    seed: int = 0
    """Of the random numbers that it holds."""
    extreme: str = ""
    value: torch.Tensor | None = None
    """What it holds instead of random numbers."""

    def at(self, symbols: Mapping[str, int]) -> torch.Tensor:
        """The input where symbols stand for these sizes."""
        shape = [size if isinstance(size, int) else symbols[size] for size in self.shape]
        if self.value is None:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(shape, generator=generator).to(self.dtype)
            return _extreme(drawn, self.extreme, generator) if self.extreme and drawn.numel() else drawn
        value: torch.Tensor = self.value
        for axis, (now, wanted) in enumerate(zip(value.shape, shape, strict=True)):
            if now != wanted:
                value = value.index_select(axis, torch.arange(wanted) % now)
        return value.clone()


def _extreme(value: torch.Tensor, kind: str, generator: torch.Generator) -> torch.Tensor:
    """The value with about a third of its elements extreme, or all of them large, small or equal."""
    limits = torch.finfo(value.dtype)
    if kind in ("large", "small"):
        scaled: torch.Tensor = value * (limits.max**0.25 if kind == "large" else limits.tiny**0.25)
        return scaled
    if kind == "all equal":
        return torch.full_like(value, float(value.flatten()[0]))
    number = {"zero": 0.0, "-zero": -0.0, "largest": limits.max, "smallest": limits.tiny / 2}.get(kind)
    chosen = torch.rand(value.shape, generator=generator) < 0.35
    return value.masked_fill(chosen, float(kind) if number is None else number)
