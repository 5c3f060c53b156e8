"""Replace a GELU-gated product by `inlay.geglu`.

gelu(gate, approximate=…) * up        inlay.geglu(gate, up, approximate)
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


@transform("match_geglu", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT, anchors=("aten.gelu.default",))
class MatchGeGLU(PatternTransform):
    """Replace a GELU-gated product by one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        gelu = torch.nn.functional.gelu
        return [
            Case("exact", lambda g, u: gelu(g) * u, (gate, up)),
            Case("tanh", lambda g, u: u * gelu(g, approximate="tanh"), (gate, up)),
            Case("bfloat16", lambda g, u: gelu(g) * u, (gate.bfloat16(), up.bfloat16())),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        gelu = torch.nn.functional.gelu

        def shared(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            activated = gelu(g)
            return activated * u, activated

        return [
            Case("another consumer", shared, (gate, up)),
            Case("broadcast factor", lambda g, u: gelu(g) * u, (gate, torch.randn(8))),
            Case("another dtype", lambda g, u: gelu(g) * u, (gate, up.double())),
            Case("a constant factor", lambda g, u: gelu(g) * 2.0 + u, (gate, up)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"gate": torch.ones(3, 5, 7, dtype=dtype), "up": torch.ones(3, 5, 7, dtype=dtype)}

    def pattern(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate) * up

    def pattern_tanh(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        return {"approximate": "tanh" if pattern == "pattern_tanh" else "none"}

    def check(self, match: Match) -> None:
        gate, up = match.value("gate"), match.value("up")
        match.require(gate.dtype == up.dtype, Reason.DTYPE, f"the gate is {gate.dtype}, the other factor {up.dtype}")
        match.require(gate.shape == up.shape, Reason.SHAPE, "gate and factor differ in shape")

    def replacement(self, gate: Tensor, up: Tensor, approximate: str) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.geglu(gate, up, approximate)
        return result
