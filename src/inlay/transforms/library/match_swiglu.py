"""Replace a SiLU-gated product by `inlay.swiglu`.

silu(gate) * up        inlay.swiglu(gate, up)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import inlay.ops  # noqa: F401 - registers the operators
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


class GatedProduct(PatternTransform):
    """An activation of a gate, multiplied by another value of its type and shape."""

    @staticmethod
    def activation(gate: Tensor) -> Tensor:
        """Compute the activation."""
        raise NotImplementedError

    @classmethod
    def positive_cases(cls) -> list[Case]:
        gate, up, act = torch.randn(2, 3, 8), torch.randn(2, 3, 8), cls.activation
        return [
            Case("gate first", lambda g, u: act(g) * u, (gate, up)),
            Case("gate second", lambda g, u: u * act(g), (gate, up)),
            Case("bfloat16", lambda g, u: act(g) * u, (gate.bfloat16(), up.bfloat16())),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        gate, up, act = torch.randn(2, 3, 8), torch.randn(2, 3, 8), cls.activation

        def shared(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            activated = act(g)
            return activated * u, activated

        return [
            Case("another consumer", shared, (gate, up)),
            Case("broadcast factor", lambda g, u: act(g) * u, (gate, torch.randn(8))),
            Case("another dtype", lambda g, u: act(g) * u, (gate, up.double())),
            Case("a constant factor", lambda g, u: act(g) * 2.0 + u, (gate, up)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"gate": torch.ones(3, 5, 7, dtype=dtype), "up": torch.ones(3, 5, 7, dtype=dtype)}

    def pattern(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

    def check(self, match: Match) -> None:
        gate, up = match.value("gate"), match.value("up")
        match.require(gate.dtype == up.dtype, Reason.DTYPE, f"the gate is {gate.dtype}, the other factor {up.dtype}")
        match.require(gate.shape == up.shape, Reason.SHAPE, "gate and factor differ in shape")


@transform("match_swiglu", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT, anchors=("aten.silu.default",))
class MatchSwiGLU(GatedProduct):
    """Replace a SiLU-gated product by one operator."""

    @staticmethod
    def activation(gate: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate)

    def replacement(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.swiglu(gate, up)
        return result
