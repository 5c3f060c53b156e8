"""Fuse a residual addition and an RMS norm into `inlay.add_rms_norm`; the sum stays available to its other readers.

total = x + residual                                    normed, total = inlay.add_rms_norm(x, residual, …)
normed = inlay.rms_norm(total, weight, eps, …)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import find_write_between
from inlay.rewrite import Match, Reason, Refusal
from inlay.transforms.base import Case, LocalTransform, Numerics, Stage, transform

if TYPE_CHECKING:
    from inlay.rewrite import Rewriter

_NORM = torch.ops.inlay.rms_norm.default
_ADD = torch.ops.aten.add.Tensor
_FUSED = torch.ops.inlay.add_rms_norm.default


@transform("fuse_add_rms_norm", stage=Stage.FUSE, numerics=Numerics.EXACT, anchors=("inlay.rms_norm.default",))
class FuseAddRMSNorm(LocalTransform):
    """Fuse a residual addition and the following RMS norm into one operator."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x, residual, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)
        norm: Any = torch.ops.inlay.rms_norm

        def plain(x: Tensor, r: Tensor, w: Tensor) -> Any:
            return norm(x + r, w, 1e-5, 0.0, True)

        def sum_is_read(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            total = x + r
            early = total.relu()
            return norm(total, w, 1e-5, 0.0, True) + early, total * 2

        half = (x.bfloat16(), residual.bfloat16(), weight.bfloat16())
        return [
            Case("sum read by the norm alone", plain, (x, residual, weight)),
            Case("sum read before and after", sum_is_read, (x, residual, weight)),
            Case("bfloat16", sum_is_read, half),
            Case("computed weight", lambda x, r, w: norm(x + r, w * 2, 1e-5, 0.0, True), (x, residual, weight)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, residual, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.rand(8)
        norm: Any = torch.ops.inlay.rms_norm

        def scaled(x: Tensor, r: Tensor, w: Tensor) -> Any:
            return norm(torch.add(x, r, alpha=2), w, 1e-5, 0.0, True)

        def weight_comes_late(x: Tensor, r: Tensor, w: Tensor) -> Any:
            total = x + r
            return norm(total, w * total.mean(), 1e-5, 0.0, True)

        return [
            Case("sum is read before the weight is there", weight_comes_late, (x, residual, weight)),
            Case("broadcast addition", lambda x, r, w: norm(x + r, w, 1e-5, 0.0, True), (x, torch.randn(8), weight)),
            Case("a constant is added", lambda x, r, w: norm(x + 1.0, w, 1e-5, 0.0, True) + r, (x, residual, weight)),
            Case("scaled addition", scaled, (x, residual, weight)),
            Case("other dtypes", lambda x, r, w: norm(x + r, w, 1e-5, 0.0, True), (x.bfloat16(), residual, weight)),
            Case("a difference", lambda x, r, w: norm(x - r, w, 1e-5, 0.0, True), (x, residual, weight)),
        ]

    def match(self, norm: fx.Node) -> Match | Refusal | None:
        if norm.target is not _NORM:
            return None
        total = norm.args[0]
        if not isinstance(total, fx.Node) or total.target is not _ADD:
            return _refusal(norm, Reason.MISSING, "the norm does not follow an addition")
        if total.kwargs.get("alpha", 1) != 1 or len(total.args) != 2:
            return _refusal(norm, Reason.CONSTANT, "the addition scales its second operand")
        one, two = total.args
        if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
            return _refusal(norm, Reason.MISSING, "a constant is added, not a residual")
        left, right = one.meta["val"], two.meta["val"]
        if left.dtype != right.dtype:
            return _refusal(norm, Reason.DTYPE, f"the addition mixes {left.dtype} and {right.dtype}")
        if left.shape != right.shape:
            return _refusal(norm, Reason.SHAPE, "the operands of the addition are broadcast")
        if (write := find_write_between(total, norm)) is not None:
            text = f"{write} writes in place between the addition and the norm"
            return _refusal(norm, Reason.MUTATION, text)
        if not _is_computed_before(norm.args[1], total) and any(user < norm for user in total.users):
            return _refusal(norm, Reason.ANOTHER_CONSUMER, "the sum is read before the weight is computed")
        return Match.at(norm, total, total=total)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        norm, total = match.root, match.values["total"]
        # At the addition, because the sum may be read before the norm, unless the weight is computed later.
        place = total if _is_computed_before(norm.args[1], total) else norm
        with rewriter.inserting_before(place, norm):
            fused = rewriter.call(_FUSED, (*total.args, *norm.args[1:]))
            normed = rewriter.call(operator.getitem, (fused, 0))
            summed = rewriter.call(operator.getitem, (fused, 1), origin=total)
        rewriter.replace_all({norm: normed, total: summed})
        rewriter.erase(norm, total)


def _refusal(norm: fx.Node, kind: Reason, text: str) -> Refusal:
    return Refusal(norm, norm, kind, text, 1, 2)


def _is_computed_before(value: Any, node: fx.Node) -> bool:
    return not isinstance(value, fx.Node) or value < node
