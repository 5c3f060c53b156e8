"""Replace a short convolution between two gates by `inlay.gated_short_conv`.

before, after, value = x.transpose(-1, -2).split(channels, -2)                 inlay.gated_short_conv(x, weight)
(after * conv1d(before * value, weight, …)[..., :length]).transpose(-1, -2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d

import inlay.ops  # noqa: F401 - registers the operators
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


@transform("match_gated_short_conv", stage=Stage.FUSE, numerics=Numerics.ROUNDING)
class MatchGatedShortConv(PatternTransform):
    """Replace a short convolution between two gates by one operator."""

    ignored_args = frozenset({"end"})

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        x, weight = torch.randn(2, 5, 24), torch.randn(8, 1, 3)
        axes = {"x": {0: "batch", 1: "length"}}

        def any_length(x: Tensor, w: Tensor) -> Tensor:
            return rule.pattern(x, w, 8, 2)

        return [
            Case("float32", lambda x, w: rule.pattern(x, w, 8, 2), (x, weight)),
            Case("bfloat16", lambda x, w: rule.pattern(x, w, 8, 2), (x.bfloat16(), weight.bfloat16())),
            Case("a weight without its middle axis", lambda x, w: rule.pattern(x, w[:, None], 8, 2), (x, weight[:, 0])),
            Case("any length", any_length, (x, weight), axes=axes),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        rule = cls()
        x, weight = torch.randn(2, 5, 24), torch.randn(8, 1, 3)

        def shared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            before, after, value = torch.split(x.transpose(-1, -2), 8, -2)
            convolved = conv1d(before * value, w, None, 1, 2, 1, 8)[..., : x.shape[1]]
            return (after * convolved).transpose(-1, -2), convolved.neg()

        def other_gate(x: Tensor, w: Tensor) -> Tensor:
            before, after, value = torch.split(x.transpose(-1, -2), 8, -2)
            return (after * conv1d(before * after, w, None, 1, 2, 1, 8)[..., : x.shape[1]]).transpose(
                -1, -2
            ) + value.sum()

        def centred(x: Tensor, w: Tensor) -> Tensor:
            return rule.pattern(torch.cat([x, x[:, :2]], 1), w, 8, 1)

        def spread(x: Tensor, w: Tensor) -> Tensor:
            before, after, value = torch.split(x.transpose(-1, -2), 8, -2)
            return (after * conv1d(before * value, w, None, 1, 4, 2, 8)[..., : x.shape[1]]).transpose(-1, -2)

        return [
            Case("another consumer", shared, (x, weight)),
            Case("gated by another part", other_gate, (x, weight)),
            Case("taps that are spread", spread, (x, weight)),
            Case("a margin that sees later rows", centred, (x, torch.randn(8, 1, 1))),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        # One tap, so that the pattern can be computed with any padding; `check` compares taps and padding.
        x, weight = torch.ones(5, 7, 3 * 37, dtype=dtype), torch.ones(37, 1, 1, dtype=dtype)
        return {"x": x, "weight": weight, "channels": 37, "margin": 11}

    def pattern(self, x: Tensor, weight: Tensor, channels: int, margin: int) -> Tensor:
        parts = torch.split(x.transpose(-1, -2), channels, -2)
        before, after, value = (parts[index % len(parts)] for index in range(3))  # the fuzzer tries other counts
        convolved = conv1d(before * value, weight, None, 1, margin, 1, channels)
        return (after * convolved[..., : x.shape[1]]).transpose(-1, -2)

    def check(self, match: Match) -> None:
        x, weight, channels = match.value("x"), match.value("weight"), match.value("channels")
        match.require(x.dim() == 3, Reason.SHAPE, "x is not [batch, length, channels]", match.node("x"))
        match.require(x.shape[-1] == 3 * channels, Reason.SHAPE, "x is not split into three parts", match.node("x"))
        causal = weight.shape[-1] == match.value("margin") + 1
        match.require(causal, Reason.CONSTANT, "the padding is not the number of taps - 1", match.node("weight"))

    def replacement(self, x: Tensor, weight: Tensor, channels: int, margin: int) -> Tensor:  # type: ignore[override]
        result: Tensor = torch.ops.inlay.gated_short_conv(x, weight)
        return result
