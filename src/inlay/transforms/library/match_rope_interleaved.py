"""Replace rotary position embedding over neighboring pairs by `inlay.rope_interleaved`.

x * cos + stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin        inlay.rope_interleaved(x, cos, sin)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import sizes
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


@transform("match_rope_interleaved", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT)
class MatchRoPEInterleaved(PatternTransform):
    """Replace rotary position embedding over neighboring pairs by one operator."""

    ignored_args = frozenset({"size"})

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        x, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
        return [
            Case("four axes", rule.pattern, (x, cos, sin)),
            Case("three axes", rule.pattern, (x[0], cos, sin)),
            Case("bfloat16", rule.pattern, (x.bfloat16(), cos.bfloat16(), sin.bfloat16())),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, cos, sin = torch.randn(2, 3, 4, 4), torch.randn(4, 4), torch.randn(4, 4)

        def other_sign(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.stack([x[..., 1::2], -x[..., ::2]], -1).flatten(-2) * s

        def shared(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * c + rotated * s, rotated

        def same_twice(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.stack([-x[..., ::2], x[..., ::2]], -1).flatten(-2) * s

        def other_order(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.stack([-x[..., 1::2], x[..., ::2]], -2).flatten(-2) * s

        def across_rows(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.stack([-x[..., 1::2], x[..., ::2]], -1).view(1, 2, 4) * s

        def flattened_otherwise(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.stack([-x[..., 1::2], x[..., ::2]], -1).view(2, 1, 3, 4, 4) * s

        return [
            Case("the other neighbour negated", other_sign, (x, cos, sin)),
            Case("another consumer", shared, (x, cos, sin)),
            Case("the same neighbour twice", same_twice, (x, cos, sin)),
            Case("halves, not pairs", other_order, (x, cos, sin)),
            Case("flattened to another shape", flattened_otherwise, (x, cos, sin)),
            Case("flattened across rows", across_rows, (x[:, 0, :1], cos.expand(2, 4, 4)[:, :2], sin[:2])),
            Case("a table of another dtype", cls().pattern, (x, cos.double(), sin)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        table = torch.ones(7, 22, dtype=dtype)
        return {"x": torch.ones(3, 5, 7, 22, dtype=dtype), "cos": table, "sin": table.clone()}

    def pattern(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin

    def check(self, match: Match) -> None:
        x = match.value("x")
        for node in match.nodes:
            if node.target is torch.ops.aten.view.default:
                same = sizes(node.meta["val"]) == sizes(x)
                match.require(same, Reason.SHAPE, "the pairs are not flattened to x's shape", node)
        for name in ("cos", "sin"):
            match.require(
                match.value(name).dtype == x.dtype, Reason.DTYPE, f"{name} does not have x's dtype", match.node(name)
            )

    def replacement(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.rope_interleaved(x, cos, sin)
        return result
