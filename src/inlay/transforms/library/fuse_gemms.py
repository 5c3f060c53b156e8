"""Merge linear layers that read the same input into one, with a concatenated weight.

q = linear(x, wq)                    all = linear(x, concat(wq, wk, wv))
k = linear(x, wk)                    q, k, v = all[..., :n], all[..., n:m], all[..., m:]
v = linear(x, wv)

The new weight is a reference through the weight map `concat`. It is computed when it is read, so a package can be
refitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from inlay.program.bindings import Bindings, Role
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import find_write_between, is_mutation, is_view
from inlay.program.weights import DerivedTensor, quantized_blocks
from inlay.rewrite import Match, Reason, Refusal, Refused
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten


@transform("fuse_gemms", stage=Stage.WEIGHTS, numerics=Numerics.ROUNDING, anchors=("aten.linear.default",))
class FuseGemms(ProgramTransform):
    """Merge linear layers with the same input into one with a concatenated weight."""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x, half = torch.randn(2, 3, 8), torch.randn(2, 3, 8).bfloat16()
        return [
            Case("queries, keys and values", _Linears(lambda x, q, k, v: q(x) * k(x) + v(x), 4, 4, 4), (x,)),
            Case("with biases", _Linears(lambda x, a, b: (a(x).relu(), b(x).tanh()), 5, 3, bias=True), (x,)),
            Case("bfloat16", _Linears(lambda x, a, b: a(x).relu() * b(x), 4, 4).bfloat16(), (half,)),
            Case(
                "rows in one piece", _Linears(lambda x, a, b: (a(x).view(2, -1) + 1, b(x).view(2, -1) + 1), 4, 4), (x,)
            ),
            Case("two with a bias, two without", _Linears(_mixed, 4, 4, 4, 4, bias=(True, False, True, False)), (x,)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x = torch.randn(2, 3, 8)
        shared = nn.functional.linear
        return [
            Case("other inputs", _Linears(lambda x, a, b: a(x).relu() * b(x + 1), 4, 4), (x,)),
            Case("one with a bias", _Linears(lambda x, a, b: a(x).relu() * b(x), 4, 4, bias=(True, False)), (x,)),
            Case("results are returned", _Linears(lambda x, a, b: (a(x), b(x)), 4, 4), (x,)),
            Case("views are returned", _Linears(lambda x, a, b: (a(x).view(6, 4), b(x).transpose(0, 1)), 4, 4), (x,)),
            Case("weight with another reader", _Linears(lambda x, a, b: a(x) * b(x) + b.weight.sum(), 4, 4), (x,)),
            Case("the same weight twice", _Linears(lambda x, a: a(x).relu() * a(x), 4), (x,)),
            Case("weights that are inputs", lambda x, a, b: shared(x, a) * shared(x, b), (x, x[0, :, :], x[1])),
            Case("computed weights", _Linears(lambda x, a, b: shared(x, a.weight * 2) * b(x), 4, 4), (x,)),
        ]

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        state = {row.name for row in program.bindings.state}
        weights = {row.name for row in program.bindings.with_role(Role.PARAMETER)} - state
        for x in program.graph.nodes:
            linears = sorted(user for user in x.users if user.target is aten.linear.default and user.args[0] is x)
            if len(linears) > 1:
                yield from _plan_groups(program, weights, linears)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Insert the merged layer at the first layer, and a slice of its result for each layer."""
        group, first = match.nodes, match.root
        given = [_LinearOperands.from_node(linear) for linear in group]
        weights = [each.weight for each in given]
        biases = [each.bias for each in given if each.bias is not None]
        operands = (first.args[0], *(_concat(rewriter, each) for each in (weights, biases) if each))
        with rewriter.inserting_before(first, first):
            fused, parts, at = rewriter.call(aten.linear.default, operands), [], 0
            for linear, weight in zip(group, weights, strict=True):
                end = at + weight.meta["val"].shape[0]
                parts.append(rewriter.call(aten.slice.Tensor, (fused, -1, at, end), origin=linear))
                at = end
        rewriter.replace_all(dict(zip(group, parts, strict=True)))
        rewriter.erase(*group, *weights, *biases)


def _plan_groups(program: Program, weights: set[str], linears: list[fx.Node]) -> Iterator[Match | Refusal]:
    """Find groups of linear layers with one input to merge, and refusals of the others."""
    groups: dict[Any, list[fx.Node]] = {}
    total = len(linears)
    for linear in linears:
        try:
            _check_linear(program, weights, linear)
        except Refused as refused:
            yield Refusal(linears[0], linear, refused.kind, refused.text, total - 1, total)
        else:
            groups.setdefault(_fusion_key(program, linear), []).append(linear)
    for group in groups.values():
        try:
            _check_group(group)
        except Refused as refused:
            if len(groups) > 1 or len(group) > 1:  # otherwise the refusals of the other layers explain it
                yield Refusal(linears[0], group[0], refused.kind, refused.text, len(group), total)
        else:
            yield Match.at(*group)


def _check_group(group: list[fx.Node]) -> None:
    """Refuse linear layers that cannot be merged."""
    if len(group) == 1:
        text = "no other linear layer with this input agrees in bias, dtype and whether it is stored quantized"
        raise Refused(Reason.DTYPE, text)
    if (write := find_write_between(group[0], group[-1])) is not None:
        raise Refused(Reason.MUTATION, f"{write} writes in place between the linear layers")


def _check_linear(program: Program, weights: set[str], linear: fx.Node) -> None:
    """Refuse a linear layer that cannot be merged with others."""
    given = _LinearOperands.from_node(linear)
    for each in (given.weight, given.bias):
        if each is None:
            continue
        if each.op != "placeholder" or each.name not in weights:
            raise Refused(Reason.REFUSED, f"{each} is not a parameter of the model")
        if len(each.users) > 1:
            other = next(user for user in each.users if user is not linear)
            raise Refused(Reason.ANOTHER_CONSUMER, f"{other} reads {each}")
        if isinstance(program.tensors[each.name], DerivedTensor):
            raise Refused(Reason.REFUSED, f"{each} was created by another transform")
    if given.weight.meta["val"].dim() != 2:
        raise Refused(Reason.SHAPE, f"{given.weight} is not a matrix")
    _check_storage(linear)


def _fusion_key(program: Program, linear: fx.Node) -> Any:
    """Return the properties that linear layers must share to be merged."""
    given = _LinearOperands.from_node(linear)
    stored = quantized_blocks(program.tensors[given.weight.name])
    return given.weight.meta["val"].dtype, given.bias is not None, stored is not None


def _concat(rewriter: Rewriter, nodes: Sequence[fx.Node]) -> fx.Node:
    """Add a weight that concatenates these weights. It and its binding take the position of the first."""
    program, names = rewriter.program, [node.name for node in nodes]
    rows = {row.name: row for row in program.bindings.with_role(Role.PARAMETER)}
    sources = {rows[name].target: program.tensors[name] for name in names}
    target = join_names(list(sources))
    with rewriter.fakes.activate():
        value = torch.cat([node.meta["val"] for node in nodes])
    with rewriter.inserting_before(nodes[0]):
        made = rewriter.placeholder("p_" + target.replace(".", "_"), value)
    first = rows[names[0]]
    row = replace(first, name=made.name, target=target, shape=program.types.shape(value))
    removed = {id(rows[name]) for name in names[1:]}
    kept = (row if each is first else each for each in program.bindings if id(each) not in removed)
    tensors = {name: ref for name, ref in program.tensors.items() if name not in names}
    rewriter.update(bindings=Bindings(tuple(kept)), tensors=tensors | {made.name: DerivedTensor(sources, "concat")})
    return made


@dataclass(frozen=True)
class _LinearOperands:
    """The operands of a linear layer."""

    weight: fx.Node
    bias: fx.Node | None

    @classmethod
    def from_node(cls, node: fx.Node) -> _LinearOperands:
        given: dict[str, Any] = dict(normalize_args(node))
        return cls(given["weight"], given["bias"])


def join_names(names: Sequence[str]) -> str:
    """Return one name for several that differ in one part.

    >>> join_names(["layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight"])
    'layers.0.attn.q_proj_k_proj.weight'
    >>> join_names(["a.weight", "b.c.weight"])
    'a_weight_b_c_weight'
    """
    parts = [name.split(".") for name in names]
    differing = [place for place, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len({len(each) for each in parts}) > 1 or len(differing) != 1:
        return "_".join(names).replace(".", "_")
    made = parts[0][:]
    made[differing[0]] = "_".join(each[differing[0]] for each in parts)
    return ".".join(made)


def _check_storage(linear: fx.Node) -> None:
    """Refuse a result that needs separate storage, because slices of one result share storage."""
    todo = [linear]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output":
                raise Refused(Reason.ANOTHER_CONSUMER, f"{node} is returned and must not share storage")
            if is_mutation(user):
                raise Refused(Reason.MUTATION, f"{user} writes to {node}")
            if is_view(user):
                todo.append(user)


class _Linears(nn.Module):
    """Linear layers for the cases, which a function calls."""

    def __init__(self, function: Any, *features: int, bias: bool | Sequence[bool] = False) -> None:
        super().__init__()
        self.function = function
        biases = [bias] * len(features) if isinstance(bias, bool) else list(bias)
        self.layers = nn.ModuleList(nn.Linear(8, each, own) for each, own in zip(features, biases, strict=True))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.layers)


def _mixed(x: Tensor, a: Any, b: Any, c: Any, d: Any) -> Any:
    return a(x) * b(x) + c(x).tanh() * d(x)
