"""Rows that are picked after a linear layer are picked before it: the head is computed for what is asked for.

scores = linear(hidden, weight)[:, -1:]        scores = linear(hidden[:, -1:], weight)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from inlay.errors import UsageError, nearest
from inlay.program.bindings import Bindings
from inlay.program.graphs import all_graphs, provenance, written_between
from inlay.program.stated import difference
from inlay.program.symbols import FakeValues, symbolic_sizes
from inlay.program.types import settle
from inlay.rewrite import Miss
from inlay.rewrite.schema import normalised
from inlay.transforms import base
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from inlay.program.program import Program

aten = torch.ops.aten
_PICKS = {aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.index.Tensor}
_EACH_ROW_ALONE = {aten.tanh.default, aten.mul.Tensor, aten.div.Tensor, aten._to_copy.default}
_END = 9223372036854775807


@transform("gather_last_logits", stage=Stage.FUSE, numerics=Numerics.ROUNDING)
class GatherLastLogits(Transform):
    """Rows picked after a linear layer are picked before it; `output: NAME` keeps only the last row of that output."""

    class Options(base.Options):
        """`output` names a result of which only the last position is wanted: the program then returns no other."""

        output: str = ""

    @classmethod
    def fires(cls) -> list[Case]:
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
    def leaves(cls) -> list[Case]:
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

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        output: str = self.options.output  # type: ignore[union-attr]
        if output:
            applied.program = program = _keep_last(program, output)
        fakes = FakeValues.of(program.graph)
        for _, graph in all_graphs(program.graph):
            moved: set[fx.Node] = set()
            for pick in list(graph.nodes):
                chain = _up_to_linear(pick) if pick.target in _PICKS else []
                if not chain:
                    continue
                reason = _refuse(pick, chain)
                if not reason and self.takes(pick):
                    made = _before_linear(graph, pick, chain)
                    layouts = difference(made.meta["val"], pick.meta["val"], program.types)
                    if layouts != ("", "") and graph is not program.graph:
                        reason = f"shape: it would be {layouts[0]} in a nested graph, where it is {layouts[1]}"
                        _erase(made, len(chain) + 1)
                    else:
                        applied.places.append(pick.name)
                        applied.sites += 1
                        moved |= {made} if layouts != ("", "") else set()
                        pick.replace_all_uses_with(made)
                        _erase(pick, len(chain) + 1)
                if reason:
                    applied.misses.append(Miss(pick, chain[-1], reason, 1, 2, refused=True))
            settle(graph, moved, fakes)
        applied.sites = max(applied.sites, int(bool(output)))
        return applied


def _keep_last(program: Program, name: str) -> Program:
    """The program that returns only the last position of one of its outputs."""
    outs = program.bindings.outs
    place = next((index for index, row in enumerate(outs) if row.name == name), None)
    if place is None:
        raise UsageError(f"The program has no output {name}.", nearest(name, [row.name for row in outs]))
    output = next(iter(reversed(program.graph.nodes)))
    values: Any = list(output.args[0])
    if values[place].meta["val"].dim() != 3:
        raise UsageError(f"The output {name} is {outs[place].text}, not [batch, length, scores].")
    with program.graph.inserting_before(output):
        last = program.graph.call_function(aten.slice.Tensor, (values[place], 1, -1, _END))
    last.meta = _meta(last, values[place])
    values[place] = last
    output.args = (tuple(values),)
    row = replace(outs[place], shape=program.types.shape(last.meta["val"]))
    rows = tuple(row if each is outs[place] else each for each in program.bindings)
    return replace(program, bindings=Bindings(rows))


def _up_to_linear(pick: fx.Node) -> list[fx.Node]:
    """From the value that is picked from up to the linear layer that made it; empty if none did."""
    chain: list[fx.Node] = []
    at: Any = pick.args[0]
    while isinstance(at, fx.Node) and at.op == "call_function":
        chain.append(at)
        if at.target is aten.linear.default:
            return chain
        others = (at.args[1:], at.kwargs)
        if at.target not in _EACH_ROW_ALONE or any(isinstance(each, fx.Node) for each in tree_leaves(others)):
            return []
        at = at.args[0]
    return []


def _refuse(pick: fx.Node, chain: list[fx.Node]) -> str:
    for node in chain:
        if len(node.users) > 1:
            return f"another consumer: {node} is also read by others than {pick}"
    if _touches_last_axis(pick):
        return "axis: columns are picked, not rows"
    if (write := written_between(chain[-1], pick)) is not None:
        return f"mutation between: {write} writes in place between the layer and the choice of rows"
    return ""


def _touches_last_axis(pick: fx.Node) -> bool:
    if pick.target is aten.index.Tensor:
        source, indices = pick.args[:2]
        at, touched = 0, 0
        for index in indices:  # type: ignore[union-attr]
            value = index.meta["val"] if isinstance(index, fx.Node) else None
            at += value.dim() if value is not None and value.dtype in (torch.bool, torch.uint8) else 1
            touched = at if index is not None else touched
        return bool(touched >= source.meta["val"].dim())  # type: ignore[union-attr]
    return bool(dict(normalised(pick))["dim"] == -1)


def _before_linear(graph: fx.Graph, pick: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """The rows picked from what the layer reads, and the layer and what follows on them alone."""
    value: Any = chain[-1].args[0]
    with graph.inserting_before(pick):
        for node in (pick, *reversed(chain)):
            target: Any = node.target
            value = graph.call_function(target, (value, *node.args[1:]), dict(node.kwargs))
            value.meta = _meta(value, node)
    made: fx.Node = value
    return made


def _erase(node: fx.Node, count: int) -> None:
    """Take out a chain of calls, of which this is the last: each reads the one before as its first operand."""
    for _ in range(count):
        source: Any = node.args[0]
        node.graph.erase_node(node)
        node = source


def _meta(node: fx.Node, like: fx.Node) -> dict[str, Any]:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
    with symbolic_sizes():
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    return {"val": value} | provenance(like)
