"""A residual addition followed by a norm becomes `inlay.add_rms_norm`; the sum stays available to its other readers.

total = x + residual                                    normed, total = inlay.add_rms_norm(x, residual, …)
normed = inlay.rms_norm(total, weight, eps, …)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

import inlay.ops  # noqa: F401 - registers the operators
from inlay.program.graphs import all_graphs, provenance, written_between
from inlay.rewrite import Miss
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from inlay.program.program import Program

_NORM = torch.ops.inlay.rms_norm.default
_ADD = torch.ops.aten.add.Tensor
_FUSED = torch.ops.inlay.add_rms_norm.default


@transform("fuse_add_rms_norm", stage=Stage.FUSE, numerics=Numerics.EXACT, anchors=("inlay.rms_norm.default",))
class FuseAddRMSNorm(Transform):
    """Residual add followed by RMS norm becomes one operator."""

    @classmethod
    def fires(cls) -> list[Case]:
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
    def leaves(cls) -> list[Case]:
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

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        for _, graph in all_graphs(program.graph):
            for norm in list(graph.nodes):
                if norm.target is _NORM:
                    reason = self._refuse(norm)
                    if reason:
                        applied.misses.append(Miss(norm, norm, reason, 1, 2, refused=True))
                    elif self.takes(norm):
                        applied.places.append(norm.name)
                        self._fuse(graph, norm)
                        applied.sites += 1
        return applied

    def _refuse(self, norm: fx.Node) -> str:
        """Why this norm cannot take its addition in, if it cannot."""
        total = norm.args[0]
        if not isinstance(total, fx.Node) or total.target is not _ADD:
            return "missing node: the norm does not follow an addition"
        if total.kwargs.get("alpha", 1) != 1 or len(total.args) != 2:
            return "constant differs: the addition scales its second operand"
        one, two = total.args
        if not isinstance(one, fx.Node) or not isinstance(two, fx.Node):
            return "missing node: a constant is added, not a residual"
        left, right = one.meta["val"], two.meta["val"]
        if left.dtype != right.dtype:
            return f"dtype: {left.dtype} and {right.dtype} are added"
        if left.shape != right.shape:
            return "shape: the operands of the addition are broadcast"
        if (write := written_between(total, norm)) is not None:
            return f"mutation between: {write} writes in place between the addition and the norm"
        if not _known_at(norm.args[1], total) and any(user < norm for user in total.users):
            return "another consumer: the sum is read before the weight is there"
        return ""

    def _fuse(self, graph: fx.Graph, norm: fx.Node) -> None:
        total: Any = norm.args[0]
        # At the place of the addition, because others may read the sum before the norm; unless the weight comes later.
        with graph.inserting_before(total if _known_at(norm.args[1], total) else norm):
            fused = graph.call_function(_FUSED, (*total.args, *norm.args[1:]))
            parts = [graph.call_function(operator.getitem, (fused, index)) for index in (0, 1)]
        values = (norm.meta["val"], total.meta["val"])
        for node, value, source in ((fused, values, norm), (parts[0], values[0], norm), (parts[1], values[1], total)):
            node.meta = {"val": value} | provenance(source)
        norm.replace_all_uses_with(parts[0])
        graph.erase_node(norm)
        total.replace_all_uses_with(parts[1])
        graph.erase_node(total)


def _known_at(value: Any, node: fx.Node) -> bool:
    return not isinstance(value, fx.Node) or value < node
