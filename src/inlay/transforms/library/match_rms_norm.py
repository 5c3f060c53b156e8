"""Replace the different forms of root-mean-square norms by `inlay.rms_norm`.

wide = x.to(float32)                                    inlay.rms_norm(x, weight, eps, offset, cast_first)
weight * (wide * rsqrt(mean(wide ** 2) + eps)).to(…)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.symbols import is_same_size
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


@transform(
    "match_rms_norm",
    stage=Stage.CANONICALIZE,
    numerics=Numerics.EXACT,
    anchors=("aten.rsqrt.default", "aten.rms_norm.default"),
)
class MatchRMSNorm(PatternTransform):
    """Replace the different forms of root-mean-square norms by one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        x, weight = torch.randn(2, 3, 8), torch.rand(8)
        half = (x.bfloat16(), weight.bfloat16())
        return [
            Case("one row a token", lambda x, w: rule.pattern(x, w, 1e-5), (x, weight)),
            Case("bfloat16", lambda x, w: rule.pattern(x, w, 1e-6), half),
            Case("weight before rounding", lambda x, w: rule.pattern_weight_first(x, w, 1e-6), half),
            Case("stored less one", lambda x, w: rule.pattern_plus_one(x, w, 1e-6), half),
            Case("factors the other way round", lambda x, w: _norm(x) * w, (x, weight)),
            Case("torch's own", lambda x, w: functional.rms_norm(x, (8,), w, 1e-6), half),
            Case("torch's own, its own eps", lambda x, w: functional.rms_norm(x, (8,), w), (x, weight)),
            Case("float16", lambda x, w: rule.pattern(x, w, 1e-5), (x.half(), weight.half())),
            Case(
                "float64 computed in float32",  # only the float32 part matches; bfloat16 adds patterns with casts
                lambda x, w, h: (rule.pattern_plus_one(x, w, 1e-6), h.neg()),
                (x.double(), weight.double(), x.bfloat16()),
            ),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, weight = torch.randn(2, 3, 8), torch.rand(8)

        def shared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
            return w * (x * scale), scale

        def wrong_power(x: Tensor, w: Tensor) -> Tensor:
            return w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))

        return [
            Case("another consumer", shared, (x, weight)),
            Case("other axis", lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), (x, weight)),
            Case("wrong constant", wrong_power, (x, weight)),
            Case("eps not constant", lambda x, w: w * _norm(x, w.sum()), (x, weight)),
            Case("a weight of another shape", lambda x, w: w * _norm(x), (x, torch.rand(3, 1))),
            Case("another dtype", lambda x, w: w * _norm(x), (x, weight.double())),
            Case("torch's own over two axes", lambda x, w: functional.rms_norm(x, (3, 8), w), (x, torch.rand(3, 8))),
            Case("torch's own without a weight", lambda x, w: functional.rms_norm(x, (8,)) + w, (x, weight)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        x, weight = torch.ones(3, 5, 37, dtype=dtype), torch.ones(37, dtype=dtype)
        return {"x": x, "weight": weight, "eps": 3.25e-5, "size": 37}

    def pattern(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Llama: rounded to the input's dtype before the weight is applied."""
        wide = x.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def pattern_weight_first(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The weight is applied before rounding."""
        wide = x.to(torch.float32)
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)

    def pattern_plus_one(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Gemma: the weight is stored minus one, and applied before rounding."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + weight.float())).type_as(x)

    def pattern_torch(self, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        """torch's operator, which applies the weight before rounding."""
        return functional.rms_norm(x, (size,), weight, eps)

    def pattern_torch_eps(self, x: Tensor, weight: Tensor, size: int) -> Tensor:
        """torch's operator with its default eps: that of the dtype it computes in."""
        return functional.rms_norm(x, (size,), weight)

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        return {"offset": float(pattern == "pattern_plus_one"), "cast_first": pattern == "pattern"}

    def check(self, match: Match) -> None:
        x, weight, node = match.value("x"), match.value("weight"), match.node("weight")
        one_row = weight.dim() == 1 and is_same_size(weight.shape[0], x.shape[-1])
        match.require(one_row, Reason.SHAPE, "the weight does not have the shape of one row of x", node)
        match.require(weight.dtype == x.dtype, Reason.DTYPE, f"the weight is {weight.dtype}, x is {x.dtype}", node)
        narrow = x.dtype == torch.float64 and any(each.meta["val"].dtype is torch.float32 for each in match.nodes)
        match.require(not narrow, Reason.DTYPE, "x is torch.float64 but computed in torch.float32", match.node("x"))

    def replacement(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, offset: float, cast_first: bool, eps: float | None = None, size: int = 0
    ) -> Tensor:
        if eps is None:
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        result: Tensor = torch.ops.inlay.rms_norm(x, weight, eps, offset, cast_first)
        return result


def _norm(x: Tensor, eps: Any = 1e-5) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
