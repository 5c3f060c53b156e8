"""Select rows before a linear layer instead of after it, so that the head is computed for those rows only.

scores = linear(hidden, weight)[:, -1:]        scores = linear(hidden[:, -1:], weight)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from inlay.errors import UsageError, suggest
from inlay.program.bindings import Bindings
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import find_write_between
from inlay.program.type_checks import type_mismatch
from inlay.rewrite import Match, Reason, Refusal, Refused
from inlay.transforms import base
from inlay.transforms.base import Case, LocalTransform, Numerics, Stage, TransformResult, transform

if TYPE_CHECKING:
    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_SELECT_OPS = {aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.index.Tensor}
_ROW_WISE_OPS = {aten.tanh.default, aten.mul.Tensor, aten.div.Tensor, aten._to_copy.default}
_END = 9223372036854775807


@transform("gather_last_logits", stage=Stage.FUSE, numerics=Numerics.ROUNDING)
class GatherLastLogits(LocalTransform):
    """Select rows before a linear layer instead of after it; `output: NAME` keeps only the last row of that output."""

    class Options(base.TransformOptions):
        """`output`: name of an output of which the program returns only the last position."""

        output: str = ""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x, weight = torch.randn(2, 5, 8), torch.randn(16, 8)
        linear = torch.nn.functional.linear

        def capped(x: Tensor, w: Tensor) -> Tensor:
            return (torch.tanh(linear(x, w) / 30.0) * 30.0).float()[:, -2:]

        return [
            Case("last row", lambda x, w: linear(x, w)[:, -1:], (x, weight)),
            Case("one row", lambda x, w: linear(x, w)[:, -1], (x, weight)),
            Case("capped", capped, (x.bfloat16(), weight.bfloat16())),
            Case("rows by number", lambda x, w, i: linear(x, w).index_select(1, i), (x, weight, torch.tensor([4, 0]))),
            Case("a row each", lambda x, w, i: linear(x, w)[torch.arange(2), i], (x, weight, torch.tensor([3, 1]))),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, weight = torch.randn(2, 5, 8), torch.randn(16, 8)
        linear = torch.nn.functional.linear

        def shared(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            scores = linear(x, w)
            return scores[:, -1:], scores.argmax(-1)

        def other_mixture(x: Tensor, w: Tensor) -> Tensor:
            return torch.softmax(linear(x, w), 1)[:, -1:]

        return [
            Case("another consumer", shared, (x, weight)),
            Case("other axis", lambda x, w: linear(x, w)[..., :4], (x, weight)),
            Case("a softmax over rows", other_mixture, (x, weight)),
            Case("squared", lambda x, w: (lambda y: y * y)(linear(x, w))[:, -1:], (x, weight)),
            Case("scaled by a row of its own", lambda x, w, r: (linear(x, w) * r)[:, -1:], (x, weight, x[:, :, :1])),
            Case("a mask of columns too", lambda x, w, m: linear(x, w)[m], (x, weight[:8], torch.rand(2, 5, 8) > 0.5)),
            Case("a mask of two axes", lambda x, w, m: linear(x, w)[:, m], (x, weight[:8], torch.eye(5, 8) > 0)),
            Case("columns by number", lambda x, w: linear(x, w)[..., torch.tensor([1, 0])], (x, weight)),
        ]

    def prepare(self, rewriter: Rewriter) -> None:
        if self.options.output:
            _keep_last(rewriter, self.options.output)

    def match(self, pick: fx.Node) -> Match | Refusal | None:
        chain = _chain_to_linear(pick) if pick.target in _SELECT_OPS else []
        if not chain:
            return None
        for node in chain:
            if len(node.users) > 1:
                text = f"{node} is also read outside of the chain to {pick}"
                return Refusal(pick, chain[-1], Reason.ANOTHER_CONSUMER, text, 1, 2)
        if _selects_last_axis(pick):
            return Refusal(pick, chain[-1], Reason.AXIS, "columns are selected, not rows", 1, 2)
        if (write := find_write_between(chain[-1], pick)) is not None:
            text = f"{write} writes in place between the linear layer and the selection of rows"
            return Refusal(pick, chain[-1], Reason.MUTATION, text, 1, 2)
        return Match.at(pick, *chain, chain=chain)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Select rows of the layer's input, then apply the layer and the following operators to them."""
        pick, chain = match.root, match.values["chain"]
        made: Any = chain[-1].args[0]
        with rewriter.inserting_before(pick):
            for node in (pick, *reversed(chain)):
                made = rewriter.call(node.target, (made, *node.args[1:]), node.kwargs, origin=node)
        gives, was = type_mismatch(made.meta["val"], pick.meta["val"], rewriter.program.types)
        if gives != was and match.graph is not rewriter.program.graph:
            raise Refused(Reason.SHAPE, f"the result would be {gives} in a nested graph, expected {was}", chain[-1])
        rewriter.replace(pick, made)
        rewriter.erase(pick, *chain)

    def apply(self, program: Program) -> TransformResult:
        applied = super().apply(program)
        applied.sites = max(applied.sites, int(bool(self.options.output)))
        return applied


def _keep_last(rewriter: Rewriter, name: str) -> None:
    """Return only the last position of one of the program's outputs."""
    program = rewriter.program
    outs = program.bindings.outs
    place = next((index for index, row in enumerate(outs) if row.name == name), None)
    if place is None:
        raise UsageError(f"The program has no output {name}.", suggest(name, [row.name for row in outs]))
    output = program.graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    if values[place].meta["val"].dim() != 3:
        raise UsageError(f"The output {name} is {outs[place].type_text}, not [batch, length, scores].")
    with rewriter.inserting_before(output, values[place]):
        values[place] = last = rewriter.call(aten.slice.Tensor, (values[place], 1, -1, _END))
    rewriter.set_outputs(program.graph, values)
    row = replace(outs[place], shape=program.types.shape(last.meta["val"]))
    rewriter.update(bindings=Bindings(tuple(row if each is outs[place] else each for each in program.bindings)))


def _chain_to_linear(pick: fx.Node) -> list[fx.Node]:
    """Return the calls from the value that `pick` selects from back to its linear layer, or an empty list."""
    chain: list[fx.Node] = []
    at: Any = pick.args[0]
    while isinstance(at, fx.Node) and at.op == "call_function":
        chain.append(at)
        if at.target is aten.linear.default:
            return chain
        others = (at.args[1:], at.kwargs)
        if at.target not in _ROW_WISE_OPS or any(isinstance(each, fx.Node) for each in tree_leaves(others)):
            return []
        at = at.args[0]
    return []


def _selects_last_axis(pick: fx.Node) -> bool:
    if pick.target is aten.index.Tensor:
        source, indices = pick.args[:2]
        at, touched = 0, 0
        for index in indices:  # type: ignore[union-attr]
            value = index.meta["val"] if isinstance(index, fx.Node) else None
            at += value.dim() if value is not None and value.dtype in (torch.bool, torch.uint8) else 1
            touched = at if index is not None else touched
        return bool(touched >= source.meta["val"].dim())  # type: ignore[union-attr]
    return bool(dict(normalize_args(pick))["dim"] == -1)
