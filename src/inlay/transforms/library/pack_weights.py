"""Pack weights of linear layers for the kernels, as stored in a GGUF file or quantized here.

linear(x, weight, bias)         inlay.packed_linear(x, packed, bias, features, bits, zero)
embedding(weight, tokens)       inlay.packed_embedding(packed, tokens, features, bits, zero, group, dtype)

A weight stays a reference and is packed when it is read, one at a time. A package records the weight map, so it can be
refitted.

Stored formats may differ between layers, or between the parts of a fused weight. Then the weights of all layers are
mixed: they state their formats themselves and have one size, so that the layers still have equal graphs.
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
from inlay.ops.weight_formats import FORMATS, ErrorStats, MixedFormat, PackedFormat
from inlay.ops.weight_layout import MIXED, Packing, mixed_size
from inlay.program.bindings import Binding, Bindings, Role
from inlay.program.call_arguments import normalize_args
from inlay.program.weights import DerivedTensor, TensorRef, quantized_blocks
from inlay.rewrite import Match, Reason, Refusal, Refused
from inlay.transforms import base
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_MAX_GROWTH = 1.25
"""Mixed weights of one kind get one size if all of them together grow at most by this factor."""


@transform("pack_weights", stage=Stage.LOWER, numerics=Numerics.APPROXIMATE, anchors=("aten.linear.default",))
class PackWeights(ProgramTransform):
    """Pack weights of linear layers and tied embeddings, as stored or quantized to int4 or int8."""

    class Options(base.TransformOptions):
        """`format`: `stored` keeps GGUF blocks; `int4` (in groups of `group`; the head as int8) and `int8` quantize;
        `bfloat16` rounds; `float32` keeps values; `none` packs nothing. `only` and `skip` are name patterns such as
        `lm_head*`. A weight is packed if `only` is empty or matches its name, and `skip` does not match it."""

        format: Literal["stored", "int4", "int8", "bfloat16", "float32", "none"] = "int8"
        group: Literal[32, 64, 128] = 32
        only: tuple[str, ...] = ()
        skip: tuple[str, ...] = ()

    @classmethod
    def positive_cases(cls) -> list[Case]:
        x, tokens = torch.randn(2, 3, 64), torch.tensor([[1, 0, 19]])
        embedding = nn.functional.embedding
        return [
            Case("linear", _Layer(lambda x, head: head(x).relu()), (x,)),
            Case("with a bias", _Layer(lambda x, head: head(x).relu(), bias=True), (x,)),
            Case("bfloat16", _Layer(lambda x, head: head(x).relu()).bfloat16(), (x.bfloat16(),)),
            Case("tied embedding", _Layer(lambda ids, head: head(embedding(ids, head.weight))), (tokens,)),
        ]

    @classmethod
    def negative_cases(cls) -> list[Case]:
        x, tokens = torch.randn(2, 3, 64), torch.tensor([[1, 0, 19]])
        embedding = nn.functional.embedding
        return [
            Case("depth of no whole groups", _Layer(lambda x, head: head(x), depth=24), (x[..., :24],)),
            Case("another reader", _Layer(lambda x, head: head(x) + head.weight.sum()), (x,)),
            Case("a weight that is an input", lambda x, w: nn.functional.linear(x, w), (x, torch.randn(16, 64))),
            Case("an embedding alone", _Layer(lambda ids, head: embedding(ids, head.weight)), (tokens,)),
            Case("a computed weight", _Layer(lambda x, head: nn.functional.linear(x, head.weight * 2)), (x,)),
        ]

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        state = {row.name for row in program.bindings.state}
        weights = {row.name: row for row in program.bindings.with_role(Role.PARAMETER) if row.name not in state}
        mixed = self._plan_mixed(program, weights)
        for node in program.graph.nodes:
            if node.op != "placeholder" or node.name not in weights:
                continue
            row, ref = weights[node.name], program.tensors[node.name]
            linears = [user for user in node.users if _reads(user, node, aten.linear.default)]
            sources = ref.sources if isinstance(ref, DerivedTensor) else {row.target: ref}
            if not linears and not (self._is_stored_quantized(sources) and _has_only_embedding_users(node)):
                continue
            first = next(iter(node.users))
            try:
                chosen = self._choose_format(node, sources, ref, mixed.get(node.name))
            except Refused as refused:
                yield Refusal(first, node, refused.kind, refused.text, 1, 2)
            else:
                is_one = len(sources) == 1 or isinstance(chosen, MixedFormat)
                made = DerivedTensor(sources, chosen.map_name if is_one else f"concat+{chosen.map_name}")
                yield Match.at(*node.users, weight=node, row=row, format=chosen, packed=made)

    def _plan_mixed(self, program: Program, weights: Mapping[str, Binding]) -> dict[str, MixedFormat]:
        """Return the formats of weights that are stored in several formats, or in other formats than in other layers.

        Weights of one kind, whose names differ only in numbers, get the size of the largest, unless they grow too much.
        """
        options: Any = self.options
        kinds: dict[Any, dict[str, tuple[tuple[PackedFormat, ...], int]]] = {}
        for node in program.graph.nodes if options.format == "stored" else ():
            if node.op != "placeholder" or node.name not in weights:
                continue
            ref, target = program.tensors[node.name], weights[node.name].target
            sources = ref.sources if isinstance(ref, DerivedTensor) else {target: ref}
            blocks = [quantized_blocks(each) for each in sources.values()]
            parts = tuple(FORMATS[each.format] for each in blocks if each is not None and each.format in FORMATS)
            if len(parts) < len(blocks) or not all(_reads(user, node, aten.linear.default) for user in node.users):
                continue
            *_, depth = (int(size) for size in node.meta["val"].shape)
            rows = [each.rows for each in blocks if each is not None]
            size = mixed_size([(count, each.packing) for count, each in zip(rows, parts, strict=True)], depth)
            kind = _kind(target), tuple(node.meta["val"].shape)
            kinds.setdefault(kind, {})[node.name] = parts, size
        made = {}
        for found in kinds.values():
            sizes = [size for _, size in found.values()]
            is_mixed = len({each for parts, _ in found.values() for each in parts}) > 1
            is_common = max(sizes) * len(sizes) <= _MAX_GROWTH * sum(sizes)
            for name, (parts, size) in found.items():
                if is_mixed and (is_common or len(set(parts)) > 1):
                    made[name] = MixedFormat(parts, max(sizes) if is_common else size)
        return made

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        """Retype the weight as packed, and replace the operators that read it."""
        node, row, chosen = match.values["weight"], match.values["row"], match.values["format"]
        features, depth = (int(size) for size in node.meta["val"].shape)
        is_mixed = isinstance(chosen, MixedFormat)
        shape = (chosen.size,) if is_mixed else chosen.packing.shape(features, depth)
        packing = MIXED if is_mixed else chosen.packing
        rewriter.retype(node, rewriter.fakes.tensor(torch.uint8, shape))
        readers = {user: _packed_reader(rewriter, user, node, features, packing) for user in match.nodes}
        rewriter.replace_all(readers)
        rewriter.erase(*readers)
        program, packed = rewriter.program, replace(row, dtype="uint8", shape=shape)
        rewriter.update(
            bindings=Bindings(tuple(packed if each is row else each for each in program.bindings)),
            tensors={**program.tensors, row.name: match.values["packed"]},
        )

    def notes(self, matches: Sequence[Match]) -> list[str]:
        kinds: dict[tuple[PackedFormat, str], list[DerivedTensor]] = {}
        mixed: dict[str, list[int]] = {}
        for match in matches:
            chosen, packed, kind = match.values["format"], match.values["packed"], _kind(match.values["row"].target)
            if not isinstance(chosen, MixedFormat):
                kinds.setdefault((chosen, kind), []).append(packed)
                continue
            mixed.setdefault(kind, []).append(chosen.size)
            for part, (name, ref) in zip(chosen.parts, packed.sources.items(), strict=True):
                kinds.setdefault((part, _kind(name)), []).append(DerivedTensor({name: ref}, part.map_name))
        notes = [_note(chosen, kind, made) for (chosen, kind), made in kinds.items()]
        return notes + [f"{kind} × {len(sizes)}: mixed, up to {max(sizes):,} bytes" for kind, sizes in mixed.items()]

    def _is_stored_quantized(self, sources: Mapping[str, TensorRef]) -> bool:
        options: Any = self.options
        return options.format == "stored" and any(quantized_blocks(ref) for ref in sources.values())

    def _choose_format(
        self, node: fx.Node, sources: Mapping[str, TensorRef], ref: TensorRef, mixed: MixedFormat | None
    ) -> PackedFormat | MixedFormat:
        """Return the format to pack a weight in, which is `mixed` if that is given, or refuse the weight."""
        options: Any = self.options
        if options.format == "none":
            raise Refused(Reason.REFUSED, "the option format is none")
        unwanted = [name for name in sources if not _is_included(name, options.only, options.skip)]
        if unwanted:
            raise Refused(Reason.REFUSED, f"{unwanted[0]} is excluded by the options only and skip")
        for user in node.users:
            if not any(_reads(user, node, each) for each in (aten.linear.default, aten.embedding.default)):
                raise Refused(Reason.ANOTHER_CONSUMER, f"{user} reads {node}")
        if isinstance(ref, DerivedTensor) and ref.map != "concat":
            raise Refused(Reason.REFUSED, f"{node} was created by another transform")
        if mixed is not None:
            return mixed
        name = f"int4-g{options.group}" if options.format == "int4" else options.format
        if options.format == "int4" and _is_head(node):
            name = "int8"
        if options.format == "stored":
            found = {each.format if (each := quantized_blocks(ref)) else "plain values" for ref in sources.values()}
            if len(found) > 1 or found == {"plain values"}:
                raise Refused(Reason.REFUSED, f"the weight is stored as {' and '.join(sorted(found))}")
            (name,) = found
        if name not in FORMATS:
            raise Refused(Reason.REFUSED, f"{name} cannot be packed")
        depth, group = node.meta["val"].shape[1], FORMATS[name].packing.group_size
        if depth % group:
            raise Refused(Reason.SHAPE, f"{depth} columns are not a multiple of the group size {group}")
        return FORMATS[name]


def _kind(name: str) -> str:
    """Return a name without its numbers, which corresponding weights of layers share."""
    return re.sub(r"\d+", "*", name)


def _reads(user: fx.Node, weight: fx.Node, target: Any) -> bool:
    """Return whether a call of this operator reads a node as its weight only."""
    if user.target is not target:
        return False
    given = dict(normalize_args(user))
    return given["weight"] is weight and sum(each is weight for each in given.values()) == 1


def _is_head(node: fx.Node) -> bool:
    """Return whether a weight computes an output or is also an embedding, where four bits lose the most accuracy."""
    return any(
        user.target is aten.embedding.default or any(each.op == "output" for each in user.users) for user in node.users
    )


def _has_only_embedding_users(node: fx.Node) -> bool:
    return bool(node.users) and all(_reads(user, node, aten.embedding.default) for user in node.users)


def _is_included(name: str, only: Sequence[str], skip: Sequence[str]) -> bool:
    return (not only or any(fnmatch(name, each) for each in only)) and not any(fnmatch(name, each) for each in skip)


def _note(wanted: PackedFormat, kind: str, made: Sequence[DerivedTensor]) -> str:
    """Describe how the weights of a kind were packed, and the error."""
    what = f"{kind} × {len(made)}: {wanted.name}"
    if wanted.is_exact and not any(map(_has_rounded_blocks, made)):
        return f"{what}, kept as stored"
    if wanted.is_exact:
        to = f"{what}, integers kept as stored, scales and minima in float16"
    else:
        to = f"{what} → int8 in groups of 32" if wanted.is_block_format else what
    measured = [made[place] for place in sorted({0, len(made) // 2, len(made) - 1})]
    try:
        errors = [_measure_error(wanted, each) for each in measured]
    except ModelError as error:
        return f"{to}, error not measured: {error.problem}"
    worst = ErrorStats.worst(errors)
    return f"{to}, {worst.text}{'' if len(measured) == len(made) else f' (measured on {len(measured)})'}"


def _has_rounded_blocks(made: DerivedTensor) -> bool:
    return any((blocks := quantized_blocks(ref)) and not blocks.is_exact for ref in made.sources.values())


def _measure_error(wanted: PackedFormat, made: DerivedTensor) -> ErrorStats:
    """Return the error of one weight, whose rows are read for it and freed."""
    with torch.no_grad():
        rows = torch.cat([read() for read in made.readers()])
        if not wanted.is_exact:
            return wanted.measure_error(rows)
        values = torch.cat([ref.read() for ref in made.sources.values()]).double()
        gap = wanted.to_values(rows) - values  # packing keeps what the blocks have
        rms, most = values.square().mean().sqrt(), values.abs().max()
        return ErrorStats(float(gap.square().mean().sqrt() / rms), float(gap.abs().max() / most))


def _packed_reader(rewriter: Rewriter, user: fx.Node, weight: fx.Node, features: int, packing: Packing) -> fx.Node:
    given: dict[str, Any] = dict(normalize_args(user))
    bits, zero, group = packing.bits, packing.zero_point, packing.group_size
    with rewriter.inserting_before(user, user):
        if user.target is aten.linear.default:
            operands: tuple[Any, ...] = (given["input"], weight, given["bias"], features, bits, zero)
            return rewriter.call(torch.ops.inlay.packed_linear.default, operands)
        operands = (weight, given["indices"], features, bits, zero, group, user.meta["val"].dtype)
        return rewriter.call(torch.ops.inlay.packed_embedding.default, operands)


class _Layer(nn.Module):
    """A linear layer for the cases, which a function calls. int8 represents its weights exactly."""

    def __init__(self, function: Any, bias: bool = False, depth: int = 64) -> None:
        super().__init__()
        self.function = function
        self.head = nn.Linear(depth, 20, bias)
        with torch.no_grad():
            steps = torch.arange(20 * depth).reshape(20, depth) * 37 % 32
            self.head.weight.copy_((steps * 8 - 121).clamp(max=127) / 128)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.head)
