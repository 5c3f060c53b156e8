"""What generating text asks of a compiled package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Stepper(Protocol):
    """One sequence on a compiled package: tokens go in, logits come out, the cache stays inside."""

    @property
    def length(self) -> int:
        """Tokens already in the cache."""
        ...

    @property
    def room(self) -> int:
        """The most tokens the cache can hold."""
        ...

    def restart(self) -> None:
        """Begin again at length 0, in constant time."""
        ...

    def advance(self, tokens: list[int]) -> torch.Tensor:
        """Append tokens; the logits after the last of them, f32[vocabulary]."""
        ...
