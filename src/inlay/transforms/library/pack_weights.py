"""Weights of linear layers are packed for the kernels that read them: as stored in a GGUF file, or quantised here.

linear(x, weight, bias)         inlay.packed_linear(x, packed, bias, features, bits, zero)
embedding(weight, tokens)       inlay.packed_embedding(packed, tokens, features, bits, zero, group, dtype)

A weight stays a reference: it is packed when it is read, one at a time. A package names the map, and can be refitted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx, nn

import inlay.ops  # noqa: F401 - registers the operators
from inlay.errors import ModelError
from inlay.ops.formats import FORMATS, Error, Format
from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.graphs import MODULE, SOURCE
from inlay.program.symbols import FakeValues
from inlay.program.weights import Derived, TensorRef, quantised
from inlay.rewrite import Miss
from inlay.rewrite.schema import normalised
from inlay.transforms import base
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.program.program import Program

aten = torch.ops.aten


@transform("pack_weights", stage=Stage.LOWER, numerics=Numerics.APPROXIMATE, anchors=("aten.linear.default",))
class PackWeights(Transform):
    """Weights of linear layers and tied embeddings are packed: as stored, or quantised to int4 or int8."""

    class Options(base.Options):
        """`format`: `stored` keeps GGUF blocks, `int4` (in groups of `group`; the head as int8) and `int8` quantise,
        `bfloat16` rounds, `float32` keeps values. A weight is packed when `only` is empty or names it, and `skip` does
        not, by patterns such as `lm_head*`."""

        format: Literal["stored", "int4", "int8", "bfloat16", "float32", "none"] = "int8"
        group: Literal[32, 64, 128] = 32
        only: tuple[str, ...] = ()
        skip: tuple[str, ...] = ()

    @classmethod
    def fires(cls) -> list[Case]:
        x, tokens = torch.randn(2, 3, 64), torch.tensor([[1, 0, 19]])
        embedding = nn.functional.embedding
        return [
            Case("linear", _Layer(lambda x, head: head(x).relu()), (x,)),
            Case("with a bias", _Layer(lambda x, head: head(x).relu(), bias=True), (x,)),
            Case("bfloat16", _Layer(lambda x, head: head(x).relu()).bfloat16(), (x.bfloat16(),)),
            Case("tied embedding", _Layer(lambda ids, head: head(embedding(ids, head.weight))), (tokens,)),
        ]

    @classmethod
    def leaves(cls) -> list[Case]:
        x, tokens = torch.randn(2, 3, 64), torch.tensor([[1, 0, 19]])
        embedding = nn.functional.embedding
        return [
            Case("depth of no whole groups", _Layer(lambda x, head: head(x), depth=24), (x[..., :24],)),
            Case("another reader", _Layer(lambda x, head: head(x) + head.weight.sum()), (x,)),
            Case("a weight that is an input", lambda x, w: nn.functional.linear(x, w), (x, torch.randn(16, 64))),
            Case("an embedding alone", _Layer(lambda ids, head: embedding(ids, head.weight)), (tokens,)),
            Case("a computed weight", _Layer(lambda x, head: nn.functional.linear(x, head.weight * 2)), (x,)),
        ]

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        state = {row.name for row in program.bindings.state}
        weights = {row.name: row for row in program.bindings.of(Role.PARAMETER) if row.name not in state}
        packing = _Packing(program)
        kinds: dict[tuple[str, str], list[Derived]] = {}
        for node in list(program.graph.nodes):
            if node.op != "placeholder" or node.name not in weights:
                continue
            linears = [user for user in node.users if _reads(user, node, aten.linear.default)]
            sources, ref = _sources(weights[node.name], program.tensors[node.name])
            if not linears and not (self._stored(sources) and _only_embeddings(node)):
                continue
            chosen = self._choose(node, sources, ref)
            if isinstance(chosen, str):
                first = next(iter(node.users))
                applied.misses.append(Miss(first, node, chosen, 1, 2, refused=True))
            elif self.takes(next(iter(node.users))):
                applied.places.append(next(iter(node.users)).name)
                applied.sites += 1
                made = packing.pack(node, weights[node.name], sources, chosen)
                kind = re.sub(r"\d+", "*", weights[node.name].target)
                kinds.setdefault((chosen.name, kind), []).append(made)
        applied.program = packing.done()
        applied.notes = [_note(FORMATS[name], kind, made) for (name, kind), made in kinds.items()]
        return applied

    def _stored(self, sources: Mapping[str, TensorRef]) -> bool:
        options: Any = self.options
        return options.format == "stored" and any(quantised(ref) for ref in sources.values())

    def _choose(self, node: fx.Node, sources: Mapping[str, TensorRef], ref: TensorRef) -> Format | str:
        """The format that a weight is packed in, or why it is not."""
        options: Any = self.options
        if options.format == "none":
            return "refused: the format is none"
        unwanted = [name for name in sources if not _wanted(name, options.only, options.skip)]
        if unwanted:
            return f"refused: {unwanted[0]} is left out by the options only and skip"
        for user in node.users:
            if not any(_reads(user, node, each) for each in (aten.linear.default, aten.embedding.default)):
                return f"another consumer: {user} reads {node}"
        if isinstance(ref, Derived) and ref.map != "concat":
            return f"refused: {node} is made by another transform"
        name = f"int4-g{options.group}" if options.format == "int4" else options.format
        if options.format == "int4" and _is_head(node):
            name = "int8"
        if options.format == "stored":
            found = {each.format if (each := quantised(ref)) else "plain values" for ref in sources.values()}
            if len(found) > 1 or found == {"plain values"}:
                return f"refused: it is stored as {' and '.join(sorted(found))}"
            (name,) = found
        if name not in FORMATS:
            return f"refused: there is no way to pack {name}"
        depth, group = node.meta["val"].shape[1], FORMATS[name].packing.group
        return f"shape: {depth} columns are no whole groups of {group}" if depth % group else FORMATS[name]


def _sources(row: Binding, ref: TensorRef) -> tuple[Mapping[str, TensorRef], TensorRef]:
    """The weights of the model that a weight is made of, by the names users know."""
    return (ref.sources if isinstance(ref, Derived) else {row.target: ref}), ref


def _reads(user: fx.Node, weight: fx.Node, target: Any) -> bool:
    """Whether a call of this operator reads a node as its weight and as nothing else."""
    if user.target is not target:
        return False
    given = dict(normalised(user))
    return given["weight"] is weight and sum(each is weight for each in given.values()) == 1


def _is_head(node: fx.Node) -> bool:
    """Whether a weight makes the results or is an embedding as well: four bits cost more there than anywhere else."""
    return any(
        user.target is aten.embedding.default or any(each.op == "output" for each in user.users) for user in node.users
    )


def _only_embeddings(node: fx.Node) -> bool:
    return bool(node.users) and all(_reads(user, node, aten.embedding.default) for user in node.users)


def _wanted(name: str, only: Sequence[str], skip: Sequence[str]) -> bool:
    return (not only or any(fnmatch(name, each) for each in only)) and not any(fnmatch(name, each) for each in skip)


def _note(wanted: Format, kind: str, made: Sequence[Derived]) -> str:
    """What was done to the weights of a kind, and how far they are from the original."""
    what = f"{kind} × {len(made)}: {wanted.name}"
    if wanted.exact:
        return f"{what}, kept as stored"
    to = f"{what} → int8 in groups of 32" if wanted.blocks else what
    measured = [made[place] for place in sorted({0, len(made) // 2, len(made) - 1})]
    try:
        errors = [_measured(wanted, each) for each in measured]
    except ModelError as error:
        return f"{to}, error not measured: {error.problem}"
    worst = Error.worst(errors)
    return f"{to}, {worst.text}{'' if len(measured) == len(made) else f' (measured on {len(measured)})'}"


def _measured(wanted: Format, made: Derived) -> Error:
    """The error of one weight, whose rows are read for it and dropped."""
    with torch.no_grad():
        return wanted.error(torch.cat([read() for read in made.readers()]))


class _Packing:
    """A program whose weights are being packed."""

    def __init__(self, program: Program) -> None:
        self.program, self.fakes = program, FakeValues.of(program.graph)
        self.rows: dict[str, Binding] = {}
        self.tensors = dict(program.tensors)

    def pack(self, node: fx.Node, row: Binding, sources: Mapping[str, TensorRef], wanted: Format) -> Derived:
        """The weight in this format, and its readers with it."""
        features, depth = (int(size) for size in node.meta["val"].shape)
        shape = wanted.packing.shape(features, depth)
        for user in list(node.users):
            self._replace(user, node, features, wanted)
        node.meta["val"] = self.fakes.tensor(torch.uint8, shape)
        self.rows[row.name] = replace(row, dtype="uint8", shape=shape)
        made = Derived(sources, wanted.map if len(sources) == 1 else f"concat+{wanted.map}")
        self.tensors[row.name] = made
        return made

    def _replace(self, user: fx.Node, node: fx.Node, features: int, wanted: Format) -> None:
        given: dict[str, Any] = dict(normalised(user))
        bits, zero, group = wanted.packing.bits, wanted.packing.zero, wanted.packing.group
        graph, value = self.program.graph, user.meta["val"]
        with graph.inserting_before(user):
            if user.target is aten.linear.default:
                args: tuple[Any, ...] = (given["input"], node, given["bias"], features, bits, zero)
                made = graph.call_function(torch.ops.inlay.packed_linear.default, args)
            else:
                args = (node, given["indices"], features, bits, zero, group, value.dtype)
                made = graph.call_function(torch.ops.inlay.packed_embedding.default, args)
        made.meta = {"val": value} | {key: user.meta[key] for key in (SOURCE, MODULE) if key in user.meta}
        user.replace_all_uses_with(made)
        graph.erase_node(user)

    def done(self) -> Program:
        """The program with its new bindings."""
        rows = tuple(self.rows.get(row.name, row) for row in self.program.bindings)
        return replace(self.program, bindings=Bindings(rows), tensors=self.tensors)


class _Layer(nn.Module):
    """A linear layer that a function calls, with weights that int8 holds exactly: what the examples are made of."""

    def __init__(self, function: Any, bias: bool = False, depth: int = 64) -> None:
        super().__init__()
        self.function = function
        self.head = nn.Linear(depth, 20, bias)
        with torch.no_grad():
            steps = torch.arange(20 * depth).reshape(20, depth) * 37 % 32
            self.head.weight.copy_((steps * 8 - 121).clamp(max=127) / 128)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.head)
