"""A decoder that was captured without a cache gets one: attention over rows that stay where they are.

inlay.attention(q, k, v, causal)            keys = index_put(keys, [slot, head, position], k)
                                            inlay.cached_attention(q, keys, values, slots, lengths, …)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_structure

import inlay.ops  # noqa: F401 - registers the operators
from inlay.errors import ProgramError
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.graphs import provenance
from inlay.program.symbols import FakeValues
from inlay.program.types import settle as settle_types
from inlay.rewrite import Miss
from inlay.rewrite.masks import Masks
from inlay.rewrite.schema import normalised
from inlay.state.position_wise import Apart, Mixed, carries, first_mixed, positions, sequences
from inlay.state.positions import Source, find_sources, rehearse
from inlay.transforms import base
from inlay.transforms.base import Applied, Case, Numerics, Stage, Transform, transform

if TYPE_CHECKING:
    from inlay.program.program import Program

aten = torch.ops.aten
_ATTENTION = torch.ops.inlay.attention.default
_CACHED = torch.ops.inlay.cached_attention.default
SLOTS, LENGTHS = "slots", "lengths"
"""The inputs that say which slot each sequence of a batch lies in, and how many rows of it are filled."""


@transform("insert_kv_cache", stage=Stage.STATE, numerics=Numerics.ROUNDING, anchors=("inlay.attention.default",))
class InsertKVCache(Transform):
    """Causal attention runs over a cache that is written in place; slots and lengths become inputs."""

    adds_inputs = True

    class Options(base.Options):
        """`max_length` rows a slot (by default what the model allows), `max_batch` slots, the cache's number format."""

        max_length: int = 0
        max_batch: int = 1
        dtype: Literal["", "float32", "bfloat16", "float16"] = ""

    @classmethod
    def fires(cls) -> list[Case]:
        return [Case("one layer", _decoder, (torch.randn(2, 5, 8), torch.randn(8, 8)), **_CAPTURED)]

    @classmethod
    def leaves(cls) -> list[Case]:
        x, w = torch.randn(2, 5, 8), torch.randn(8, 8)

        def both_ways(x: Tensor, w: Tensor) -> Tensor:
            return _attend(x, w, causal=False)

        def mixed(x: Tensor, w: Tensor) -> Tensor:
            return _attend(x, w).cumsum(1)

        def averaged(x: Tensor, w: Tensor) -> Tensor:
            hidden = _attend(x, w)
            return hidden - hidden.mean(1, keepdim=True)

        def across(x: Tensor, w: Tensor) -> Tensor:
            hidden = _attend(x, w)
            return hidden - hidden.mean(0)

        def shifted(x: Tensor, w: Tensor) -> Tensor:
            return torch.nn.functional.pad(_attend(x, w), (0, 0, 1, 0))

        return [
            Case("attention both ways", both_ways, (x, w), **_CAPTURED),
            Case("a sum over positions", mixed, (x, w), **_CAPTURED),
            Case("a mean over positions", averaged, (x, w), **_CAPTURED),
            Case("a mean over sequences", across, (x, w), **_CAPTURED),
            Case("positions moved", shifted, (x, w), **_CAPTURED),
            Case("no attention", lambda x, w: torch.nn.functional.linear(x, w), (x, w), **_CAPTURED),
        ]

    def apply(self, program: Program) -> Applied:
        applied = Applied(program, 0)
        calls = [node for node in program.graph.nodes if node.target is _ATTENTION]
        options: Any = self.options
        found = _examine(program, calls, options) if calls else _without_attention(program)
        if isinstance(found, Mixed):
            root = calls[0] if calls else found.node
            applied.misses.append(Miss(root, found.node, f"refused: {found}", 0, 1, refused=True))
        if not isinstance(found, _Found):
            return applied
        most = options.max_length or _most(program, found.length)
        places = [node.name for node in calls]
        untouched = program.copy()
        try:
            dtype = getattr(torch, options.dtype) if options.dtype else None
            applied.program = _insert(program, calls, found, most, options.max_batch, dtype)
        except ProgramError as error:  # positions cannot be a row a sequence where they were one for all
            applied.misses.append(Miss(calls[0], calls[0], f"shape: {error.problem}", 0, 1, refused=True))
            applied.program = untouched
            return applied
        applied.places, applied.sites = places, len(calls)
        return applied


@dataclass(frozen=True)
class _Found:
    """What the symbols of batch and length are called in the graph, and which nodes are positions."""

    batch: str
    length: str
    sources: tuple[Source, ...]


def _without_attention(program: Program) -> Mixed | None:
    """Why a program without attention cannot do without state: a call that brings positions together."""
    raw = {symbol.name: raw for raw, symbol in program.symbols.items()}
    if "length" not in raw:
        return None
    graph, axis = program.graph, positions(raw["length"])
    found = find_sources(graph, raw.get("batch", ""), raw["length"])
    mixed = found if isinstance(found, Mixed) else first_mixed(graph, axis, found.nodes, set())
    return replace(mixed, reason=f"{mixed.reason}, and there is no attention to keep rows for") if mixed else None


def _examine(program: Program, calls: list[fx.Node], options: Any) -> _Found | Mixed:
    if program.bindings.state:
        return Mixed(calls[0], "the model brings state of its own")
    for call in calls:
        if any(len(_shape(call, name)) != 4 for name in ("query", "key", "value")):
            return Mixed(call, "its operands are not [batch, heads, length, head]")
    batch, _, length, _ = _shape(calls[0], "query")
    if length not in program.symbols:
        return Mixed(calls[0], f"its length is {length}, not dynamic")
    if batch == length or (batch not in program.symbols and batch != "1"):
        return Mixed(calls[0], f"its batch is {batch}, neither dynamic nor 1")
    for raw, name, most in ((length, "max_length", options.max_length), (batch, "max_batch", options.max_batch)):
        high = program.symbols[raw].high if raw in program.symbols else None
        if high is not None and most > high:
            return Mixed(calls[0], f"{name} is {most}, and it was captured for a {program.symbols[raw].name} to {high}")
    for call in calls:
        given: dict[str, Any] = dict(normalised(call))
        if given["mask"] is not None:
            reason = Masks(program.graph).meaning(given["mask"], call).reason
            return Mixed(call, f"its mask is not known to be causal: {reason or 'match_attention has not run'}")
        if not given["causal"]:
            return Mixed(call, "its mask is not known to be causal: it has none, and sees later positions")
        if any(_shape(call, name)[::2] != [batch, length] for name in ("query", "key", "value")):
            return Mixed(call, "it works on another batch or length than the first one")
    sources = find_sources(program.graph, batch, length)
    if isinstance(sources, Mixed):
        return sources
    for source in sources.counting:
        axes = [str(size) for size in source.node.meta["val"].shape]
        if axes == [length]:
            for user in source.node.users:
                if user.target is not aten.unsqueeze.default or user.args[1] not in (0, -2):
                    return Mixed(user, "it reads positions as if all sequences had the same")
        elif axes not in ([batch, length], ["1", length]):
            return Mixed(source.node, "its positions have another shape than [length] or [batch, length]")
    for axis in (positions(length), *([sequences(batch)] if batch in program.symbols else [])):
        mixed = first_mixed(program.graph, axis, sources.nodes, set(calls))
        if mixed is not None:
            return mixed
    return _Found(batch, length, sources.counting)


def _shape(call: fx.Node, name: str) -> list[str]:
    return [str(size) for size in dict(normalised(call))[name].meta["val"].shape]


def _most(program: Program, length: str) -> int:
    return program.symbols[length].high or 2048


def _insert(
    program: Program, calls: list[fx.Node], found: _Found, room: int, slots: int, dtype: torch.dtype | None
) -> Program:
    """The program with a cache: new inputs, writes before each attention, the new state as outputs."""
    graph = program.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    fakes = FakeValues.of(graph)
    rows: list[Binding] = []

    def placeholder(name: str, target: str, like: torch.dtype, *shape: Any) -> fx.Node:
        with graph.inserting_before(first):
            node = graph.placeholder(name)
        with fakes.computing():
            node.meta["val"] = torch.empty(shape, dtype=like)
        dtype = str(like).removeprefix("torch.")
        rows.append(Binding(node.name, Role.INPUT, target, dtype, program.types.shape(node.meta["val"])))
        return node

    query = dict(normalised(calls[0]))["query"].meta["val"]
    slot = placeholder(SLOTS, SLOTS, torch.int64, query.shape[0])
    length = placeholder(LENGTHS, LENGTHS, torch.int64, query.shape[0])
    caches = []
    for index, call in enumerate(calls):
        given = dict(normalised(call))
        for kind in ("key", "value"):
            held = given[kind].meta["val"]
            heads, size = int(held.shape[1]), int(held.shape[3])
            name = f"{kind}s_{index}"
            caches.append(placeholder(name, f"{kind}s.{index}", dtype or held.dtype, slots, heads, room, size))
    put = _Puts(graph, first, slot, length, found, fakes)
    for source in found.sources:
        put.replace(source)
    put.settle()
    outputs = []
    for call, keys, values in zip(calls, caches[::2], caches[1::2], strict=True):
        outputs += put.attention(call, keys, values)
    settle_types(graph, put.read, fakes)
    output = graph.output_node()
    output.args = ((*outputs, *output.args[0]),)  # type: ignore[misc]
    graph.eliminate_dead_code()
    states = [
        Binding(
            f"{cache.name}.out", Role.OUTPUT, row.target, row.dtype, row.shape, Alias(cache.name, "kv_cache_update")
        )
        for cache, row in zip(caches, rows[2:], strict=True)
    ]
    ins = (*program.bindings.ins, *rows)
    bindings = Bindings((*ins, *states, *program.bindings.outs))
    symbols = {**program.symbols}
    for raw, most in ((found.batch, slots), (found.length, room)):
        if raw in symbols:
            symbols[raw] = replace(symbols[raw], low=1, high=most)
    return replace(program, bindings=bindings, symbols=symbols, calling=_by_name(program, ins))


def _by_name(program: Program, ins: tuple[Binding, ...]) -> Any:
    names = [row.name for row in ins if row.role is Role.INPUT]
    in_spec = tree_structure(((), dict.fromkeys(names, 0)))
    return replace(program.calling, in_spec=in_spec, arg_names=tuple(names))


class _Puts:
    """Puts the nodes of a cache into a graph."""

    def __init__(
        self, graph: fx.Graph, first: fx.Node, slots: fx.Node, lengths: fx.Node, found: _Found, fakes: FakeValues
    ) -> None:
        self.graph, self.fakes = graph, fakes
        self.slots, self.lengths = slots, lengths
        self.batch = found.batch
        size = self.size(found.length, first)
        anchor = size.next
        with graph.inserting_before(anchor):
            steps = self.call(aten.arange.default, size)
            self.positions = self.call(
                aten.add.Tensor,
                self.call(aten.unsqueeze.default, lengths, 1),
                self.call(aten.unsqueeze.default, steps, 0),
            )
            self.slot = self.call(aten.view.default, slots, [-1, 1, 1])
            self.row = self.call(aten.unsqueeze.default, self.positions, 1)
        self.heads: dict[int, fx.Node] = {}
        self.anchor = self.row.next
        self.moved: list[fx.Node] = []
        self.read: set[fx.Node] = set()
        """Attention over a cache, which lies in memory in its own way."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.fakes.value(node)
        return node

    def size(self, length: str, first: fx.Node) -> fx.Node:
        """The node that is the length."""
        node: fx.Node
        for node in self.graph.nodes:
            if node.target is aten.sym_size.int and str(node.meta["val"]) == length:
                return node
            axes = carries(node.meta.get("val"), length)
            if node.op == "placeholder" and axes:
                given = node, axes[0]
        with self.graph.inserting_before(first):
            return self.call(aten.sym_size.int, *given)

    def replace(self, source: Source) -> None:
        """Positions of this call instead of positions from 0 on."""
        here = source.node
        dtype = here.meta["val"].dtype
        with self.graph.inserting_before(here.next if here > self.row else self.anchor):
            moved = self.call(aten.add.Tensor, self.positions, source.offset) if source.offset else self.positions
            if dtype != torch.int64:
                moved = self.call(aten._to_copy.default, moved, dtype=dtype)
        self.moved.append(moved)
        if here.meta["val"].dim() == 1:
            for user in list(here.users):
                user.replace_all_uses_with(moved, propagate_meta=False)
        else:
            here.replace_all_uses_with(moved, propagate_meta=False)

    def settle(self) -> None:
        """Positions have an axis of sequences now: so have the values computed from them alone."""
        changed = {self.positions, *self.moved}
        apart = Apart(sequences(self.batch))
        for node in self.graph.nodes:
            if node in changed or changed.isdisjoint(node.all_input_nodes):
                apart.see(node)
                continue
            if node.op == "output":
                raise ProgramError("positions are returned, and they are others for each sequence now")
            rehearse(node)
            before, node.meta["val"] = node.meta["val"], self.fakes.value(node)
            if str(before) != str(node.meta["val"]):
                changed.add(node)
            if reason := apart.mixes(node):
                raise ProgramError(f"{node}: {reason}, and positions are others for each sequence now")
            apart.see(node)

    def write(self, cache: fx.Node, where: list[fx.Node], rows: fx.Node) -> fx.Node:
        """New rows in a cache, in its number format."""
        dtype = cache.meta["val"].dtype
        if rows.meta["val"].dtype != dtype:
            rows = self.call(aten._to_copy.default, rows, dtype=dtype)
        return self.call(aten.index_put.default, cache, where, rows)

    def attention(self, call: fx.Node, keys: fx.Node, values: fx.Node) -> list[fx.Node]:
        """Write the new rows, read the filled ones."""
        given: dict[str, Any] = dict(normalised(call))
        heads = int(given["key"].meta["val"].shape[1])
        if heads not in self.heads:
            with self.graph.inserting_before(self.anchor):
                count = self.call(aten.arange.default, heads)
                self.heads[heads] = self.call(aten.view.default, count, [1, -1, 1])
        where = [self.slot, self.heads[heads], self.row]
        origin = provenance(call)
        with self.graph.inserting_before(call):
            written = [self.write(cache, where, given[kind]) for cache, kind in ((keys, "key"), (values, "value"))]
            window = given["window"] if given["window"] < keys.meta["val"].shape[2] else 0  # no row is so far back
            read = self.call(
                *(_CACHED, given["query"], *written, self.slots, self.lengths, given["scale"], window),
                *(given[name] for name in ("softcap", "slopes", "sinks")),
            )
        for node in (*written, read):
            node.meta |= origin
        call.replace_all_uses_with(read, propagate_meta=False)
        self.graph.erase_node(call)
        self.read.add(read)
        return written


def _attend(x: Tensor, w: Tensor, causal: bool = True) -> Tensor:
    hidden = torch.nn.functional.linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    result = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=causal)
    return result.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)


def _decoder(x: Tensor, w: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])[None, :, None].to(x.dtype)
    return _attend(x + torch.cos(places), w)


_CAPTURED: dict[str, Any] = {
    "after": ("clean_noops", "match_attention"),
    "axes": {"x": {0: "batch", 1: "length"}},
}
