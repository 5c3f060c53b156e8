"""Replace a GELU-gated product by `inlay.geglu`.

gelu(gate, approximate=…) * up        inlay.geglu(gate, up, approximate)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from inlay.transforms.base import Case, Numerics, Stage, transform
from inlay.transforms.library.match_swiglu import GatedProduct

if TYPE_CHECKING:
    from collections.abc import Mapping


@transform("match_geglu", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT, anchors=("aten.gelu.default",))
class MatchGeGLU(GatedProduct):
    """Replace a GELU-gated product by one operator."""

    @staticmethod
    def activation(gate: Tensor) -> Tensor:
        return gelu(gate)

    @classmethod
    def positive_cases(cls) -> list[Case]:
        inputs = (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
        return [*super().positive_cases(), Case("tanh", lambda g, u: u * gelu(g, approximate="tanh"), inputs)]

    def pattern_tanh(self, gate: Tensor, up: Tensor) -> Tensor:
        return gelu(gate, approximate="tanh") * up

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        return {"approximate": "tanh" if pattern == "pattern_tanh" else "none"}

    def replacement(self, gate: Tensor, up: Tensor, approximate: str) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.geglu(gate, up, approximate)
        return result
