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


@transform("match_swiglu", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT, anchors=("aten.silu.default",))
class MatchSwiGLU(PatternTransform):
    """Replace a SiLU-gated product by one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        silu = torch.nn.functional.silu
        return [
            Case("gate first", lambda g, u: silu(g) * u, (gate, up)),
            Case("gate second", lambda g, u: u * silu(g), (gate, up)),
            Case("bfloat16", lambda g, u: silu(g) * u, (gate.bfloat16(), up.bfloat16())),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        silu = torch.nn.functional.silu

        def shared(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            activated = silu(g)
            return activated * u, activated

        return [
            Case("another consumer", shared, (gate, up)),
            Case("broadcast factor", lambda g, u: silu(g) * u, (gate, torch.randn(8))),
            Case("another dtype", lambda g, u: silu(g) * u, (gate, up.double())),
            Case("a constant factor", lambda g, u: silu(g) * 2.0 + u, (gate, up)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"gate": torch.ones(3, 5, 7, dtype=dtype), "up": torch.ones(3, 5, 7, dtype=dtype)}

    def pattern(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def check(self, match: Match) -> None:
        gate, up = match.value("gate"), match.value("up")
        match.require(gate.dtype == up.dtype, Reason.DTYPE, f"the gate is {gate.dtype}, the other factor {up.dtype}")
        match.require(gate.shape == up.shape, Reason.SHAPE, "gate and factor differ in shape")

    def replacement(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.swiglu(gate, up)
        return result
