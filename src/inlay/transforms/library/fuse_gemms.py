"""Linear layers that read the same input become one, with their weights below each other.

q = linear(x, wq)                    all = linear(x, concat(wq, wk, wv))
k = linear(x, wk)                    q, k, v = all[..., :n], all[..., n:m], all[..., m:]
v = linear(x, wv)

The new weight is a reference through the map `concat`: it is made when it is read, and a package can be refitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.graphs import MODULE, SOURCE, is_view, mutates, written_between
from inlay.program.symbols import FakeValues
from inlay.program.types import settle
from inlay.program.weights import Derived, quantised
from inlay.rewrite import Miss
from inlay.rewrite.schema import normalised
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.program.program import Program

aten = torch.ops.aten


@transform("fuse_gemms", stage=Stage.WEIGHTS, numerics=Numerics.ROUNDING, anchors=("aten.linear.default",))
class FuseGemms(Transform):
    """Linear layers with the same input become one with a concatenated weight."""

    @classmethod
    def fires(cls) -> list[Case]:
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
    def leaves(cls) -> list[Case]:
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

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        fusing = _Fusing(program)
        for x in list(program.graph.nodes):
            linears = [user for user in x.users if user.target is aten.linear.default and user.args[0] is x]
            if len(linears) > 1:
                for group in self._groups(sorted(linears), fusing, applied):
                    if self.takes(group[0]):
                        applied.places.append(group[0].name)
                        fusing.fuse(group)
                        applied.sites += 1
        applied.program = fusing.done()
        return applied

    def _groups(self, linears: list[fx.Node], fusing: _Fusing, applied: Applied) -> list[list[fx.Node]]:
        """Which of the linear layers with one input become one; why others do not is noted."""
        groups: dict[Any, list[fx.Node]] = {}
        for linear in linears:
            reason = fusing.refuse(linear)
            if reason:
                applied.misses.append(Miss(linears[0], linear, reason, len(linears) - 1, len(linears), refused=True))
            else:
                groups.setdefault(fusing.kind(linear), []).append(linear)
        found = []
        for group in groups.values():
            write = written_between(group[0], group[-1])
            if len(group) == 1 and len(groups) > 1:
                reason = "dtype: no other linear layer with this input has a bias, a dtype and a stored format like it"
            elif write is not None:
                reason = f"mutation between: {write} writes in place between the linear layers"
            else:
                found += [group] if len(group) > 1 else []
                continue
            applied.misses.append(Miss(linears[0], group[0], reason, len(group), len(linears), refused=True))
        return found


@dataclass(frozen=True)
class _Linear:
    """The operands of a linear layer."""

    weight: fx.Node
    bias: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> _Linear:
        given: dict[str, Any] = dict(normalised(node))
        return cls(given["weight"], given["bias"])


class _Fusing:
    """A program whose linear layers are being put together."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.fakes = FakeValues.of(program.graph)
        state = {row.name for row in program.bindings.state}
        self.weights = {row.name: row for row in program.bindings.of(Role.PARAMETER) if row.name not in state}
        self.made: dict[str, Binding] = {}
        """New bindings, each by the name of the first one that it replaces."""
        self.gone: set[str] = set()
        self.tensors = dict(program.tensors)
        self.changed: set[fx.Node] = set()

    def refuse(self, linear: fx.Node) -> str:
        """Why a linear layer cannot be put together with others, if it cannot."""
        given = _Linear.of(linear)
        for each in (given.weight, given.bias):
            if each is None:
                continue
            if each.op != "placeholder" or each.name not in self.weights:
                return f"refused: {each} is no parameter of the model"
            if len(each.users) > 1:
                return f"another consumer: {next(user for user in each.users if user is not linear)} reads {each}"
            if isinstance(self.tensors[each.name], Derived):
                return f"refused: {each} is made by another transform"
        if given.weight.meta["val"].dim() != 2:
            return f"shape: {given.weight} is no matrix"
        return _shares_storage(linear)

    def kind(self, linear: fx.Node) -> Any:
        """What has to be the same for linear layers to become one."""
        given = _Linear.of(linear)
        stored = quantised(self.tensors[given.weight.name])
        return given.weight.meta["val"].dtype, given.bias is not None, stored.format if stored else ""

    def fuse(self, group: Sequence[fx.Node]) -> None:
        """One linear layer where the first one stood, and a slice of its result for each."""
        given = [_Linear.of(linear) for linear in group]
        first = group[0]
        weights = [each.weight for each in given]
        biases = [each.bias for each in given if each.bias is not None]
        operands = [first.args[0], *(self._concat(each) for each in (weights, biases) if each)]
        with self.graph.inserting_before(first):
            fused = self._call(first, aten.linear.default, *operands)
            parts, at = [], 0
            for linear, weight in zip(group, weights, strict=True):
                end = at + weight.meta["val"].shape[0]
                parts.append(self._call(linear, aten.slice.Tensor, fused, -1, at, end))
                at = end
        for linear, part in zip(group, parts, strict=True):
            linear.replace_all_uses_with(part)
            self.graph.erase_node(linear)
        for node in (*weights, *biases):
            self.graph.erase_node(node)
        self.changed |= set(parts)

    def _call(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {key: like.meta[key] for key in (SOURCE, MODULE) if key in like.meta}
        node.meta["val"] = self.fakes.value(node)
        return node

    def _concat(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """A weight for these weights, at the place of the first."""
        rows = [self.weights[node.name] for node in nodes]
        target = together([row.target for row in rows])
        with self.graph.inserting_before(nodes[0]):
            made = self.graph.placeholder("p_" + target.replace(".", "_"))
        with self.fakes.computing():
            made.meta["val"] = torch.cat([node.meta["val"] for node in nodes])
        shape = self.program.types.shape(made.meta["val"])
        self.made[nodes[0].name] = replace(rows[0], name=made.name, target=target, shape=shape)
        self.gone |= {node.name for node in nodes}
        sources = {row.target: self.tensors.pop(row.name) for row in rows}
        self.tensors[made.name] = Derived(sources, "concat")
        return made

    def done(self) -> Program:
        """The program with its new bindings and types."""
        settle(self.graph, self.changed, self.fakes)
        kept = (self.made.get(row.name, row) for row in self.program.bindings if not self._replaced(row))
        return replace(self.program, bindings=Bindings(tuple(kept)), tensors=self.tensors)

    def _replaced(self, row: Binding) -> bool:
        return row.role is Role.PARAMETER and row.name in self.gone and row.name not in self.made


def together(names: Sequence[str]) -> str:
    """One name for several that differ in one part.

    >>> together(["layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight"])
    'layers.0.attn.q_proj_k_proj.weight'
    >>> together(["a.weight", "b.c.weight"])
    'a_weight_b_c_weight'
    """
    parts = [name.split(".") for name in names]
    differing = [place for place, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len({len(each) for each in parts}) > 1 or len(differing) != 1:
        return "_".join(names).replace(".", "_")
    made = parts[0][:]
    made[differing[0]] = "_".join(each[differing[0]] for each in parts)
    return ".".join(made)


def _shares_storage(linear: fx.Node) -> str:
    """Why the result must be a tensor of its own, if it must: slices of one result share their storage."""
    todo = [linear]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.op == "output":
                return f"another consumer: {node} is returned, and must not share its storage"
            if mutates(user):
                return f"mutation between: {user} writes to {node}"
            if is_view(user):
                todo.append(user)
    return ""


class _Linears(nn.Module):
    """Linear layers that a function calls: what the examples are made of."""

    def __init__(self, function: Any, *features: int, bias: bool | Sequence[bool] = False) -> None:
        super().__init__()
        self.function = function
        biases = [bias] * len(features) if isinstance(bias, bool) else list(bias)
        self.layers = nn.ModuleList(nn.Linear(8, each, own) for each, own in zip(features, biases, strict=True))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.layers)


def _mixed(x: Tensor, a: Any, b: Any, c: Any, d: Any) -> Any:
    return a(x) * b(x) + c(x).tanh() * d(x)
