"""Attention written out with a softmax becomes `inlay.attention`; `match_attention` then looks at heads and mask.

scores = q @ k.transpose(2, 3) * scale + mask        inlay.attention(q, k, v, mask, scale, False, 0, softcap)
softmax(scores, dtype=float32).to(q.dtype) @ v
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import inlay.ops  # noqa: F401 - registers the operators
from inlay.transforms.base import Case, Numerics, Rewrite, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Site


@transform("match_softmax_attention", stage=Stage.CANONICALIZE, numerics=Numerics.ROUNDING)
class MatchSoftmaxAttention(Rewrite):
    """Attention written out with a softmax, soft-capped or not, becomes one operator."""

    @classmethod
    def fires(cls) -> list[Case]:
        rule = cls()
        q, mask = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 5)
        half = [each.bfloat16() for each in (q, q, q, mask)]
        return [
            Case("added mask", lambda q, k, v, m: rule.pattern(q, k, v, m, 0.3), (q, q, q, mask)),
            Case("soft-capped", lambda q, k, v, m: rule.pattern_softcap(q, k, v, m, 0.3, 50.0), (q, q, q, mask)),
            Case("bfloat16", lambda q, k, v, m: rule.pattern_softcap(q, k, v, m, 0.3, 50.0), tuple(half)),
        ]

    @classmethod
    def leaves(cls) -> list[Case]:
        q, mask = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 5)

        def shared(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
            weights = torch.softmax(q @ k.transpose(2, 3) * 0.3 + m, -1, dtype=torch.float32).clone()
            return weights @ v, weights

        def other_axis(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            return torch.softmax(q @ k.transpose(2, 3) * 0.3 + m, -2, dtype=torch.float32).clone() @ v

        def other_bound(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / 50.0) * 40.0 + m
            return torch.softmax(scores, -1, dtype=torch.float32).clone() @ v

        return [
            Case("weights are returned", shared, (q, q, q, mask)),
            Case("softmax over rows", other_axis, (q, q, q, mask)),
            Case("capped by two different numbers", other_bound, (q, q, q, mask)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        heads = torch.ones(2, 3, 5, 7, dtype=dtype)
        mask = torch.ones(2, 1, 5, 5, dtype=dtype)
        return {"q": heads, "k": heads.clone(), "v": heads.clone(), "mask": mask, "scale": 0.3125, "softcap": 37.0}

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale + mask
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype).clone(), v)

    def pattern_softcap(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        scores = torch.tanh(scores / softcap) * softcap + mask
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype).clone(), v)

    def fixed(self, pattern: str) -> Mapping[str, Any]:
        return {} if pattern == "pattern_softcap" else {"softcap": 0.0}

    def check(self, site: Site) -> None:
        q, k, v = (site.value(name) for name in "qkv")
        site.require(all(each.dim() == 4 for each in (q, k, v)), "shape: not batch, heads, length, head")
        site.require(q.dtype == k.dtype == v.dtype == site.value("mask").dtype, "dtype: operands differ in dtype")
        same = str(q.shape[1]) == str(k.shape[1]) == str(v.shape[1])
        site.require(same, "shape: query, key and value have different numbers of heads")

    def replacement(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
    ) -> Tensor:
        result: Tensor = torch.ops.inlay.attention(q, k, v, mask, scale, False, 0, softcap)
        return result
