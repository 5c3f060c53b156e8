"""Replace rotary position embedding by `inlay.rope`.

x * cos + cat([-x[..., half:], x[..., :half]], -1) * sin        inlay.rope(x, cos, sin)
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


@transform("match_rope", stage=Stage.CANONICALIZE, numerics=Numerics.EXACT, anchors=("aten.cos.default",))
class MatchRoPE(PatternTransform):
    """Replace rotary position embedding over halves by one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        x, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
        return [
            Case("four axes", lambda x, c, s: rule.pattern(x, c, s, 4), (x, cos, sin)),
            Case("three axes", lambda x, c, s: rule.pattern(x, c, s, 4), (x[0], cos, sin)),
            Case("bfloat16", lambda x, c, s: rule.pattern(x, c, s, 4), (x.bfloat16(), cos.bfloat16(), sin.bfloat16())),
            Case("halves", lambda x, c, s: rule.pattern_halves(x, c[:, :4], s[:, :4], 4), (x, cos, sin)),
            Case("pairs in, halves out", lambda x, c, s: rule.pattern_pairs(x, c[:, :4], s[:, :4]), (x, cos, sin)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        rule = cls()
        x, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)

        def shared(x: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            rotated = torch.cat([-x[..., 4:], x[..., :4]], -1)
            return x * c + rotated * s, rotated

        def other_sign(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.cat([x[..., 4:], -x[..., :4]], -1) * s

        def two_sources(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.cat([-x[..., 4:], (x + 1)[..., :4]], -1) * s

        def other_axis(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
            return x * c + torch.cat([-x[:, 2:], x[:, :2]], 1) * s

        return [
            Case("another consumer", shared, (x, cos, sin)),
            Case("the other half negated", other_sign, (x, cos, sin)),
            Case("halves of two tensors", two_sources, (x, cos, sin)),
            Case("other axis", other_axis, (torch.randn(2, 4, 5, 8), cos, sin)),
            Case("not cut in halves", lambda x, c, s: rule.pattern(x, c, s, 3), (x, cos, sin)),
            Case("a table of one column", lambda x, c, s: rule.pattern(x, c[:, :1], s, 4), (x, cos, sin)),
            Case("a table of another dtype", lambda x, c, s: rule.pattern(x, c, s, 4), (x, cos.double(), sin)),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        table = torch.ones(7, 74, dtype=dtype)
        halves = torch.ones(7, 37, dtype=dtype)
        x = torch.ones(3, 5, 7, 74, dtype=dtype)
        return {"x": x, "cos": table, "sin": table.clone(), "half": 37, "half_cos": halves, "half_sin": halves.clone()}

    def pattern(self, x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
        """Both tables span the whole axis."""
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def pattern_halves(self, x: Tensor, half_cos: Tensor, half_sin: Tensor, half: int) -> Tensor:
        """Tables for one half; the halves are computed separately."""
        one, two = torch.split(x, half, -1)
        return torch.cat([one * half_cos - two * half_sin, two * half_cos + one * half_sin], -1)

    def pattern_pairs(self, x: Tensor, half_cos: Tensor, half_sin: Tensor) -> Tensor:
        """Neighboring pairs are rotated and stored as halves."""
        one, two = x[..., ::2], x[..., 1::2]
        return torch.cat([one * half_cos - two * half_sin, two * half_cos + one * half_sin], -1)

    def replacement_args(self, pattern: str) -> Mapping[str, Any]:
        return {"pairs": pattern == "pattern_pairs"}

    def check(self, match: Match) -> None:
        x = match.value("x")
        if "half" in match.values:
            match.require(2 * match.value("half") == x.shape[-1], Reason.CONSTANT, "x is not split into halves")
        for name in sorted(set(match.values) - {"x", "half"}):
            table = match.value(name)
            match.require(table.dtype == x.dtype, Reason.DTYPE, f"{name} does not have x's dtype", match.node(name))
            size = table.shape[-1] if table.dim() else 1
            whole = size == (x.shape[-1] // 2 if name.startswith("half") else x.shape[-1])
            match.require(whole, Reason.SHAPE, f"{name} does not span the last axis", match.node(name))

    def replacement(  # type: ignore[override]
        self,
        x: Tensor,
        pairs: bool,
        half: int = 0,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        half_cos: Tensor | None = None,
        half_sin: Tensor | None = None,
    ) -> Tensor:
        if pairs:
            x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        if half_cos is not None and half_sin is not None:
            cos, sin = torch.cat([half_cos, half_cos], -1), torch.cat([half_sin, half_sin], -1)
        result: Tensor = torch.ops.inlay.rope(x, cos, sin)
        return result
