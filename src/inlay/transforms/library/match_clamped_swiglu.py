"""Replace a SiLU-gated product with clamped operands by `inlay.clamped_swiglu`.

gate = gate.clamp(max=limit)                                         inlay.clamped_swiglu(gate, up, alpha, limit)
(up.clamp(-limit, limit) + 1) * (gate * sigmoid(gate * alpha))
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


@transform("match_clamped_swiglu", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT)
class MatchClampedSwiGLU(PatternTransform):
    """Replace a SiLU-gated product with clamped operands by one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        return [
            Case("float32", lambda g, u: rule.pattern(g, u, 1.702, -0.7, 0.7), (gate, up)),
            Case("bfloat16", lambda g, u: rule.pattern(g, u, 1.702, -0.7, 0.7), (gate.bfloat16(), up.bfloat16())),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        rule = cls()
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)

        def shared(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            bounded = g.clamp(max=0.7)
            return (u.clamp(-0.7, 0.7) + 1) * (bounded * torch.sigmoid(bounded * 1.702)), bounded

        def two_gates(g: Tensor, u: Tensor) -> Tensor:
            return (u.clamp(-0.7, 0.7) + 1) * (g.clamp(max=0.7) * torch.sigmoid(u.clamp(max=0.7) * 1.702))

        def not_plus_one(g: Tensor, u: Tensor) -> Tensor:
            bounded = g.clamp(max=0.7)
            return (u.clamp(-0.7, 0.7) + 2) * (bounded * torch.sigmoid(bounded * 1.702))

        return [
            Case("another consumer", shared, (gate, up)),
            Case("bounds that differ", lambda g, u: rule.pattern(g, u, 1.702, -0.6, 0.7), (gate, up)),
            Case("gated by something else", two_gates, (gate, up)),
            Case("wrong constant", not_plus_one, (gate, up)),
            Case("broadcast factor", lambda g, u: rule.pattern(g, u, 1.702, -0.7, 0.7), (gate, torch.randn(8))),
            Case("another dtype", lambda g, u: rule.pattern(g, u, 1.702, -0.7, 0.7), (gate, up.double())),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        gate, up = torch.ones(3, 5, 7, dtype=dtype), torch.ones(3, 5, 7, dtype=dtype)
        return {"gate": gate, "up": up, "alpha": 1.625, "low": -5.75, "limit": 5.75}

    def pattern(self, gate: Tensor, up: Tensor, alpha: float, low: float, limit: float) -> Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(low, limit) + 1) * (gate * torch.sigmoid(gate * alpha))

    def check(self, match: Match) -> None:
        gate, up = match.value("gate"), match.value("up")
        match.require(match.value("low") == -match.value("limit"), Reason.CONSTANT, "the bounds are not symmetric")
        match.require(gate.dtype == up.dtype, Reason.DTYPE, f"the gate is {gate.dtype}, the other factor {up.dtype}")
        match.require(gate.shape == up.shape, Reason.SHAPE, "gate and factor differ in shape")

    def replacement(  # type: ignore[override]
        self, gate: Tensor, up: Tensor, alpha: float, low: float, limit: float
    ) -> Tensor:
        result: Tensor = torch.ops.inlay.clamped_swiglu(gate, up, alpha, limit)
        return result
