"""Replace a layer norm written as elementary operators by `aten.layer_norm`.

mean = x.mean(-1, keepdim=True)                                        layer_norm(x, [size], weight, None, eps)
weight * ((x - mean) * rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inlay.program.symbols import is_same_size
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


@transform("match_layer_norm", stage=Stage.CANONICALIZE, numerics=Numerics.ROUNDING)
class MatchLayerNorm(PatternTransform):
    """Replace a layer norm written as elementary operators by `aten.layer_norm`."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        x, weight = torch.randn(2, 3, 8), torch.rand(8)
        return [
            Case("float32", lambda x, w: rule.pattern(x, w, 1e-5), (x, weight)),
            Case("float32, four axes", lambda x, w: rule.pattern(x, w, 1e-5), (x[None], weight)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, weight = torch.randn(2, 3, 8), torch.rand(8)

        def two_means(x: Tensor, w: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            spread = (x - x.mean(1, keepdim=True)).pow(2).mean(-1, keepdim=True)
            return w * (centred * torch.rsqrt(spread + 1e-5))

        def mean_is_read(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            mean = x.mean(-1, keepdim=True)
            return w * ((x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)), mean

        def plain(x: Tensor, w: Tensor) -> Tensor:
            mean = x.mean(-1, keepdim=True)
            return w * ((x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5))

        def other_axis(x: Tensor, w: Tensor) -> Tensor:
            centred = x - x.mean(1, keepdim=True)
            return w * (centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + 1e-5))

        def wrong_power(x: Tensor, w: Tensor) -> Tensor:
            mean = x.mean(-1, keepdim=True)
            return w * ((x - mean) * torch.rsqrt((x - mean).pow(4).mean(-1, keepdim=True) + 1e-5))

        return [
            Case("centred by one mean, spread around another", two_means, (x, weight)),
            Case("another consumer", mean_is_read, (x, weight)),
            Case("other axis", other_axis, (x, weight)),
            Case("wrong constant", wrong_power, (x, weight)),
            Case("eps not constant", lambda x, w: cls().pattern(x, w, w.sum()), (x, weight)),
            Case("another dtype", plain, (x, weight.double())),
            Case("one column", lambda x, w: cls().pattern(x, w, 1e-5), (x[..., :1], weight[:1])),
            Case("a weight of another shape", lambda x, w: cls().pattern(x, w, 1e-5), (x, torch.rand(3, 1))),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"x": torch.ones(3, 5, 7, dtype=dtype), "weight": torch.ones(7, dtype=dtype), "eps": 3.25e-5}

    def pattern(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        return (weight.to(torch.float32) * ((wide - mean) * torch.rsqrt(variance + eps))).to(x.dtype)

    def check(self, match: Match) -> None:
        x, weight, node = match.value("x"), match.value("weight"), match.node("weight")
        one_row = weight.dim() == 1 and is_same_size(weight.shape[0], x.shape[-1])
        match.require(one_row, Reason.SHAPE, "the weight does not have the shape of one row of x", node)
        # torch's kernel multiplies before it subtracts the mean: a single large number overflows instead of giving 0.
        match.require(weight.shape[0] != 1, Reason.SHAPE, "rows have a single column", node)
        match.require(weight.dtype == x.dtype, Reason.DTYPE, f"the weight is {weight.dtype}, x is {x.dtype}", node)

    def replacement(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        return torch.nn.functional.layer_norm(x, (weight.shape[0],), weight, None, eps)
