"""Replace attention written as matmul and softmax by `inlay.attention`; `match_attention` then handles heads and mask.

scores = q @ k.transpose(2, 3) * scale + mask        inlay.attention(q, k, v, mask, scale, …, zero_rows=False)
softmax(scores, dtype=float32).to(q.dtype) @ v
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import sizes
from inlay.rewrite import Reason
from inlay.transforms.base import Case, Numerics, PatternTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.rewrite import Match


def _no_dropout(weights: Tensor) -> Tensor:
    """Return what a model computes whose dropout is off: a copy in torch 2.13, the same value in 2.15."""
    return torch.nn.functional.dropout(weights, 0.1, training=False)


@transform("match_softmax_attention", stage=Stage.CANONICALIZE, numerics=Numerics.ROUNDING)
class MatchSoftmaxAttention(PatternTransform):
    """Replace attention written as matmul and softmax, also with soft cap, bias or sinks, by one operator."""

    ignored_args = frozenset({"size"})

    @classmethod
    def positive_cases(cls) -> list[Case]:
        rule = cls()
        q, mask = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 5)
        rows = [torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(3)]
        half = [each.bfloat16() for each in (q, q, q, mask)]

        def blind(q: Tensor, m: Tensor) -> Tensor:
            hidden = torch.where(torch.arange(5) == 2, float("-inf"), 0.0)
            return rule.pattern(q, q, q, m + hidden[:, None], 0.3)

        def scaled_by_sinks(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
            return rule.pattern_scaled_by_sinks(q, k, v, m, 0.3, s)

        return [
            Case("added mask", lambda q, k, v, m: rule.pattern(q, k, v, m, 0.3), (q, q, q, mask)),
            Case("divided", lambda q, k, v, m: rule.pattern_divided(q, k, v, m, 3.0), (q, q, q, mask)),
            Case("divided, bfloat16", lambda q, k, v, m: rule.pattern_divided(q, k, v, m, 3.0), tuple(half)),
            Case("scaled by sinks", scaled_by_sinks, (q, q, q, mask, torch.randn(4))),
            Case("scaled by sinks, bfloat16", scaled_by_sinks, (*half, half[0][0, :, 0, 0])),
            Case("soft-capped", lambda q, k, v, m: rule.pattern_softcap(q, k, v, m, 0.3, 50.0), (q, q, q, mask)),
            Case("a row that sees nothing", blind, (q, mask)),
            Case("bfloat16", lambda q, k, v, m: rule.pattern_softcap(q, k, v, m, 0.3, 50.0), tuple(half)),
            Case(
                "sinks", lambda q, k, v, m, s: rule.pattern_sinks(q, k, v, m, 0.3, s), (q, q, q, mask, torch.randn(4))
            ),
            Case(
                "sinks, bfloat16",
                lambda q, k, v, m, s: rule.pattern_sinks(q, k, v, m, 0.3, s),
                (*half, half[0][0, :, 0, 0]),
            ),
            Case(
                "a bias",
                lambda q, k, v, m, b: rule.pattern_bias(q, k, v, m, 0.3, b),
                (*rows, mask, torch.randn(8, 1, 5)),
            ),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        q, mask = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 5)

        rule, rows = cls(), torch.randn(2, 5, 4, 8).transpose(1, 2)

        def drops_first(q: Tensor, k: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Tensor:
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + m
            scores = torch.cat([scores, s.reshape(1, -1, 1, 1).expand(2, -1, 5, -1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=scores.dtype)[..., 1:]), v)

        def cut_rows(r: Tensor, m: Tensor, b: Tensor) -> Tensor:
            q, k, v = (r.reshape(8, 10, 4) for _ in range(3))
            scores = torch.baddbmm(b, q, k.transpose(-1, -2), beta=1.0, alpha=0.3).view(2, 4, 10, -1) + m
            weights = _no_dropout(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype))
            return torch.bmm(weights.view(8, 10, -1), v).view(2, 4, 5, 8)

        def sink_a_row(q: Tensor, m: Tensor, s: Tensor) -> Tensor:
            scores = torch.matmul(q, q.transpose(2, 3)) * 0.3 + m
            scores = torch.cat([scores, s.reshape(1, 1, -1, 1).expand(2, 5, -1, -1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1]), q)

        def scaled_rows(q: Tensor, m: Tensor, s: Tensor) -> Tensor:
            scores = torch.matmul(q, q.transpose(2, 3)) * 0.3 + m
            share = (torch.logsumexp(scores, -1) - s.view(1, 1, -1)).to(torch.float32).sigmoid()
            weights = _no_dropout(torch.softmax(scores, -1, dtype=torch.float32))
            return torch.matmul(weights, q) * share.unsqueeze(-1)

        def other_scores(q: Tensor, m: Tensor, s: Tensor) -> Tensor:
            scores = torch.matmul(q, q.transpose(2, 3)) * 0.3
            share = (torch.logsumexp(scores, -1) - s.view(1, -1, 1)).to(torch.float32).sigmoid()
            weights = _no_dropout(torch.softmax(scores + m, -1, dtype=torch.float32))
            return torch.matmul(weights, q) * share.unsqueeze(-1)

        def divided_after_the_mask(q: Tensor, m: Tensor) -> Tensor:
            scores = (torch.matmul(q, q.transpose(2, 3)) + m) / 3.0
            return torch.matmul(_no_dropout(torch.softmax(scores, -1)), q)

        def three_axes(q: Tensor, m: Tensor) -> Tensor:
            scores = torch.matmul(q, q.transpose(1, 2)) * 0.3 + m
            return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=torch.float32)), q)

        def shared(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
            weights = _no_dropout(torch.softmax(q @ k.transpose(2, 3) * 0.3 + m, -1, dtype=torch.float32))
            return weights @ v, weights

        def other_axis(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            return _no_dropout(torch.softmax(q @ k.transpose(2, 3) * 0.3 + m, -2, dtype=torch.float32)) @ v

        def other_bound(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            scores = torch.tanh(q @ k.transpose(2, 3) * 0.3 / 50.0) * 40.0 + m
            return _no_dropout(torch.softmax(scores, -1, dtype=torch.float32)) @ v

        return [
            Case("weights are returned", shared, (q, q, q, mask)),
            Case("softmax over rows", other_axis, (q, q, q, mask)),
            Case("capped by two different numbers", other_bound, (q, q, q, mask)),
            Case("a mask of another dtype", lambda q, m: rule.pattern(q, q, q, m, 0.3), (q, mask.double())),
            Case("a computed scale", lambda q, m: rule.pattern(q, q, q, m, m.mean()), (q, mask)),
            Case("the wrong score dropped", drops_first, (q, q, q, mask, torch.randn(4))),
            Case("a sink a row", sink_a_row, (torch.randn(2, 5, 5, 8), mask, torch.randn(5))),
            Case("scaled, a sink a row", scaled_rows, (torch.randn(2, 5, 5, 8), mask, torch.randn(5))),
            Case("scaled by other scores", other_scores, (q, mask, torch.randn(4))),
            Case("divided after the mask", divided_after_the_mask, (q, mask)),
            Case("divided by a computed number", lambda q, m: rule.pattern_divided(q, q, q, m, m.mean()), (q, mask)),
            Case("a mask with more rows", lambda q, m: rule.pattern(q[:, :, :1], q, q, m, 0.3), (q, mask)),
            Case("three axes", three_axes, (torch.randn(4, 8, 8), torch.randn(8, 8))),
            Case("rows cut in two", cut_rows, (rows, torch.randn(2, 1, 1, 1), torch.randn(8, 1, 1))),
            Case("no heads", lambda q, m: rule.pattern(q, q, q, m, 0.3), (q[:, :0], mask)),
            Case("values of one head", lambda q, v, m: rule.pattern(q, q, v, m, 0.3), (q, q[:, :1], mask)),
            Case(
                "one bias for all",
                lambda r, m, b: rule.pattern_bias(r, r, r, m, 0.3, b),
                (rows, mask, torch.randn(1, 1, 5)),
            ),
        ]

    def examples(self, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = torch.ones(3, 7, 5, 11, dtype=dtype).transpose(1, 2)
        columns = torch.ones(3, 13, 5, 11, dtype=dtype).transpose(1, 2)
        return {
            **{"q": rows, "k": columns, "v": columns.clone(), "mask": torch.ones(3, 1, 7, 13, dtype=dtype)},
            **{"scale": 0.3125, "divisor": 3.25, "softcap": 37.0},
            **{"sinks": torch.ones(5, dtype=dtype), "bias": torch.ones(15, 1, 13, dtype=dtype)},
        }

    def pattern(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale + mask
        return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)), v)

    def pattern_divided(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, divisor: float) -> Tensor:
        scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) / divisor + mask
        return torch.matmul(_no_dropout(torch.softmax(scores, -1).to(v.dtype)), v)

    def pattern_softcap(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        scores = torch.tanh(scores / softcap) * softcap + mask
        return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)), v)

    def pattern_sinks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
        """The softmax includes one more score per head, which is dropped after it."""
        scores = torch.matmul(q, k.transpose(2, 3)) * scale + mask
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return torch.matmul(_no_dropout(torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1]), v)

    def pattern_scaled_by_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor
    ) -> Tensor:
        """The result is scaled by the share that one more score per head would leave to the others."""
        scores = torch.matmul(q, k.transpose(2, 3)) * scale + mask
        share = (torch.logsumexp(scores, -1) - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
        weights = _no_dropout(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype))
        return torch.matmul(weights, v) * share.unsqueeze(-1).to(q.dtype)

    def pattern_bias(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, bias: Tensor) -> Tensor:
        """Batch and heads are one axis, and a bias is added to the product."""
        batch, heads, rows, size = q.shape
        q, k, v = (each.reshape(batch * heads, -1, size) for each in (q, k, v))
        scores = torch.baddbmm(bias, q, k.transpose(-1, -2), beta=1.0, alpha=scale).view(batch, heads, rows, -1) + mask
        weights = _no_dropout(torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype))
        return torch.bmm(weights.view(batch * heads, rows, -1), v).view(batch, heads, rows, size)

    def check(self, match: Match) -> None:
        q, k, v = (match.value(name) for name in "qkv")
        match.require(
            q.dtype == k.dtype == v.dtype == match.value("mask").dtype, Reason.DTYPE, "operands differ in dtype"
        )
        same = sizes(q)[:2] == sizes(k)[:2] == sizes(v)[:2]
        match.require(same, Reason.SHAPE, "query, key and value differ in batch or heads")
        match.require(sizes(k)[1:2] != ["0"], Reason.SHAPE, "there are no heads", match.node("k"))
        mask, scores = sizes(match.value("mask")), [*sizes(q)[:3], sizes(k)[2]]
        fits = len(mask) <= 4 and all(one in ("1", two) for one, two in zip(mask[::-1], scores[::-1], strict=False))
        match.require(fits, Reason.SHAPE, "the mask does not broadcast to the scores")
        if "sinks" in match.values:
            self._check_sinks(match)
        if "bias" in match.values:
            self._check_bias(match)

    def _check_sinks(self, match: Match) -> None:
        is_scaled = any(node.target is torch.ops.aten.logsumexp.default for node in match.nodes)
        expected = ["1", str(match.value("q").shape[1]), "1", *([] if is_scaled else ["1"])]
        for node, shape in _views(match):
            match.require(shape == expected, Reason.AXIS, "the sinks are not one per head", node)

    def _check_bias(self, match: Match) -> None:
        """Check that views merge batch and heads and split them again. A view's last size follows from the others."""
        batch, heads, rows, _ = match.value("q").shape
        together = str(batch * heads)
        allowed = (
            [str(batch), str(heads), str(rows)],
            [together, str(rows)],
            [together, str(match.value("k").shape[2])],
        )
        bias = match.value("bias")
        match.require(bias.dim() == 3 and str(bias.shape[0]) == together, Reason.SHAPE, "the bias is not one per head")
        for node, shape in _views(match):
            match.require(shape[:-1] in allowed, Reason.AXIS, "the view does not merge batch and heads", node)

    def replacement(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float = 1.0,
        divisor: float = 1.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if bias is not None:
            mask = bias.reshape(q.shape[0], q.shape[1], *bias.shape[1:]) + mask
        options = {"sinks": sinks, "zero_rows": bool(softcap) or sinks is not None}
        result: Tensor = torch.ops.inlay.attention(q, k, v, mask, scale / divisor, False, 0, softcap, **options)
        return result


def _views(match: Match) -> list[tuple[fx.Node, list[str]]]:
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    return [(node, sizes(node.meta["val"])) for node in match.nodes if node.target in views]
