"""Insert a KV cache into a decoder that was captured without one.

inlay.attention(q, k, v, causal)            keys = index_put(keys, [slot, head, position], k)
                                            inlay.cached_attention(q, keys, values, slots, lengths, …)

With `max_prefill`, layers with a sliding window keep only the rows of the window and of a call. The slots of their
caches are rings: position p is in row p % rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, fx
from torch.utils._pytree import tree_structure

import inlay.ops  # noqa: F401 - registers the operators
from inlay.analysis.length_choices import find_length_choices
from inlay.analysis.masks.classification import MaskAnalysis
from inlay.analysis.position_ids import (
    PositionIds,
    SharedPositions,
    check_symbolic_shapes,
    find_position_sources,
    follow_shared_positions,
)
from inlay.analysis.sequence_axis import (
    AxisTracker,
    MixingCall,
    axes_with_symbol,
    batch_axis,
    find_mixing_call,
    position_axis,
)
from inlay.errors import ProgramError
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.call_arguments import normalize_args
from inlay.program.decoder import SIGNATURE
from inlay.rewrite import Match, Reason, Refusal, Refused
from inlay.transforms import base
from inlay.transforms.base import Case, Numerics, ProgramTransform, Stage, transform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program
    from inlay.rewrite import Rewriter

aten = torch.ops.aten
_ATTENTION = torch.ops.inlay.attention.default
_CACHED = torch.ops.inlay.cached_attention.default
SLOTS, LENGTHS = SIGNATURE.slots, SIGNATURE.lengths
"""Inputs: the slot of each sequence of a batch, and the number of its cached tokens."""
_BLOCK = 32
"""Tokens in a block of the prefix cache by default; rings have a multiple of them."""


@transform("insert_kv_cache", stage=Stage.STATE, numerics=Numerics.ROUNDING, anchors=("inlay.attention.default",))
class InsertKVCache(ProgramTransform):
    """Run causal attention over a KV cache that is written in place; slots and lengths become inputs."""

    is_required = True
    adds_inputs = True
    is_atomic = True

    class Options(base.TransformOptions):
        """`max_length`: the most tokens of a sequence (default: the captured maximum, or 2048). `max_batch`: number of
        slots. `max_prefill`: the most tokens per sequence in a call, if a layer with a window can then have slots with
        fewer rows than `max_length`; 0: all slots have `max_length` rows. `dtype`: dtype of the cache (default: that of
        keys and values)."""

        max_length: int = Field(default=0, ge=0)
        max_batch: int = Field(default=1, ge=1)
        max_prefill: int = Field(default=512, ge=0)
        dtype: Literal["", "float32", "bfloat16", "float16"] = ""

    @classmethod
    def positive_cases(cls) -> list[Case]:
        return [Case("one layer", _decoder, (torch.randn(2, 5, 8), torch.randn(8, 8)), **_CASE_OPTIONS)]

    @classmethod
    def negative_cases(cls) -> list[Case]:
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
            Case("attention both ways", both_ways, (x, w), **_CASE_OPTIONS),
            Case("a sum over positions", mixed, (x, w), **_CASE_OPTIONS),
            Case("a mean over positions", averaged, (x, w), **_CASE_OPTIONS),
            Case("a mean over sequences", across, (x, w), **_CASE_OPTIONS),
            Case("positions moved", shifted, (x, w), **_CASE_OPTIONS),
            Case("no attention", lambda x, w: torch.nn.functional.linear(x, w), (x, w), **_CASE_OPTIONS),
        ]

    def plan(self, program: Program) -> Iterator[Match | Refusal]:
        calls = [node for node in program.graph.nodes if node.target is _ATTENTION]
        options: Any = self.options
        found = _examine(program, calls, options) if calls else _explain_no_attention(program)
        if isinstance(found, MixingCall):
            yield Refusal(calls[0] if calls else found.node, found.node, Reason.REFUSED, str(found), 0, 1)
        if isinstance(found, _DecoderAxes):
            dtype = getattr(torch, options.dtype) if options.dtype else None
            max_seq_len = options.max_length or _default_max_length(program, found.length)
            sizes = _CacheOptions(max_seq_len, options.max_batch, options.max_prefill, dtype)
            insertion = _CacheInsertion(calls, found, sizes)
            yield from (Match.at(call, insertion=insertion) for call in calls)

    def rewrite(self, match: Match, rewriter: Rewriter) -> None:
        insertion: _CacheInsertion = match.values["insertion"]
        try:
            if match.root is insertion.calls[0]:
                insertion.insert_inputs(rewriter)
            insertion.replace_attention(rewriter, match.root)
            if match.root is insertion.calls[-1]:
                insertion.insert_outputs(rewriter)
        except ProgramError as error:  # positions that all sequences share cannot get a batch axis
            raise Refused(Reason.SHAPE, error.problem) from error

    def clean_up(self, rewriter: Rewriter) -> None:
        """Erase the positions that were computed without a cache."""
        rewriter.erase_unused(*reversed(rewriter.program.graph.nodes))


@dataclass(frozen=True)
class _DecoderAxes:
    """The symbols of batch and length in the graph, and the nodes that are positions."""

    batch: str
    length: str
    sources: tuple[PositionIds, ...]


def _explain_no_attention(program: Program) -> MixingCall | None:
    """Return the call that mixes positions in a program without attention, or None."""
    raw = {symbol.name: raw for raw, symbol in program.symbols.items()}
    if "length" not in raw:
        return None
    graph, axis = program.graph, position_axis(raw["length"])
    found = find_position_sources(graph, raw.get("batch", ""), raw["length"])
    mixed = found if isinstance(found, MixingCall) else find_mixing_call(graph, axis, found.nodes, set())
    return replace(mixed, reason=f"{mixed.reason}, and there is no attention to cache") if mixed else None


def _examine(program: Program, calls: list[fx.Node], options: Any) -> _DecoderAxes | MixingCall:
    if program.bindings.state:
        return MixingCall(calls[0], "the model already has state")
    for call in calls:
        if any(len(_shape(call, name)) != 4 for name in ("query", "key", "value")):
            return MixingCall(call, "its operands are not [batch, heads, length, head]")
        if not all(_shape(call, name)[axis].isdigit() for name in ("query", "key", "value") for axis in (1, 3)):
            return MixingCall(call, "the number of heads or the head size is dynamic")
    batch, _, length, _ = _shape(calls[0], "query")
    if length not in program.symbols:
        return MixingCall(calls[0], f"its length is {length}, not dynamic")
    if batch == length or (batch not in program.symbols and batch != "1"):
        return MixingCall(calls[0], f"its batch is {batch}, neither dynamic nor 1")
    for raw, name, most in ((length, "max_length", options.max_length), (batch, "max_batch", options.max_batch)):
        high = program.symbols[raw].high if raw in program.symbols else None
        if high is not None and most > high:
            return MixingCall(
                calls[0], f"{name} is {most}, but the captured {program.symbols[raw].name} is at most {high}"
            )
    for call in calls:
        given: dict[str, Any] = dict(normalize_args(call))
        if given["mask"] is not None:
            reason = MaskAnalysis(program.graph, program.symbols).classify(given["mask"], call).reason
            return MixingCall(call, f"its mask is not known to be causal: {reason or 'match_attention has not run'}")
        if not given["causal"]:
            return MixingCall(call, "it is not causal: it has no mask and reads later positions")
        if any(_shape(call, name)[::2] != [batch, length] for name in ("query", "key", "value")):
            return MixingCall(call, "its batch or length differs from that of the first attention")
    choice = next((each for each in find_length_choices(program) if each.always is None), None)
    if choice is not None:
        return MixingCall(choice.node, f"it chooses by the length, after rows were cached. {choice.reason}")
    sources = find_position_sources(program.graph, batch, length)
    if isinstance(sources, MixingCall):
        return sources
    for source in sources.position_ids:
        axes = [str(size) for size in source.node.meta["val"].shape]
        if axes == [length]:
            readers = follow_shared_positions(source.node)
            if isinstance(readers, fx.Node):
                return MixingCall(readers, "it reads positions as if they were equal in all sequences")
        elif axes not in ([batch, length], ["1", length]):
            return MixingCall(source.node, "the shape of its positions is not [length] or [batch, length]")
    for axis in (position_axis(length), *([batch_axis(batch)] if batch in program.symbols else [])):
        mixed = find_mixing_call(program.graph, axis, sources.nodes, set(calls))
        if mixed is not None:
            return mixed
    return _DecoderAxes(batch, length, sources.position_ids)


def _shape(call: fx.Node, name: str) -> list[str]:
    return [str(size) for size in dict(normalize_args(call))[name].meta["val"].shape]


def _default_max_length(program: Program, length: str) -> int:
    return program.symbols[length].high or 2048


def _keyword_calling(program: Program, ins: tuple[Binding, ...]) -> Any:
    names = [row.name for row in ins if row.role is Role.INPUT]
    in_spec = tree_structure(((), dict.fromkeys(names, 0)))
    return replace(program.call_spec, in_spec=in_spec, arg_names=tuple(names))


@dataclass(frozen=True)
class _CacheOptions:
    max_seq_len: int
    max_batch: int
    max_prefill: int
    dtype: torch.dtype | None

    def window(self, call: fx.Node) -> int:
        """Return the window of an attention; 0 if it covers the longest sequence."""
        window: int = dict(normalize_args(call))["window"]
        return window if window < self.max_seq_len else 0

    def rows(self, call: fx.Node) -> int:
        """Return how many rows a slot needs for an attention.

        All rows of a call are written before one is read, and its first row reads a window before it. A block of the
        prefix cache is copied after the call that completes it, and may begin as many rows before the call.
        """
        rows = max(self.window(call), _BLOCK) + self.max_prefill - 1
        is_ring = self.window(call) and self.max_prefill
        return min(-(-rows // _BLOCK) * _BLOCK, self.max_seq_len) if is_ring else self.max_seq_len


class _CacheInsertion:
    """The insertion of a cache into a program: first inputs, then each attention, then the new state as outputs."""

    def __init__(self, calls: list[fx.Node], axes: _DecoderAxes, sizes: _CacheOptions) -> None:
        self.calls, self.axes, self.sizes = tuple(calls), axes, sizes
        self.has_rings = any(sizes.rows(call) < sizes.max_seq_len for call in calls)
        self.bindings: list[Binding] = []
        self.caches: list[fx.Node] = []
        self.written: list[fx.Node] = []
        self.heads: dict[int, fx.Node] = {}
        self.rows: dict[int, fx.Node] = {}
        """Rows of a slot → the rows of the positions."""
        self.last: fx.Node
        """The last of the nodes that all layers share."""

    def insert_inputs(self, rewriter: Rewriter) -> None:
        """Add slots, lengths and caches as inputs, and compute positions from the lengths."""
        graph = rewriter.program.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        batch = dict(normalize_args(self.calls[0]))["query"].meta["val"].shape[0]
        with rewriter.inserting_before(first):
            self.slots = self._input(rewriter, SLOTS, SLOTS, torch.int64, batch)
            self.lengths = self._input(rewriter, LENGTHS, LENGTHS, torch.int64, batch)
            if self.has_rings:  # otherwise it is the rows of a slot
                self.bindings[-1] = replace(self.bindings[-1], below=self.sizes.max_seq_len)
            for index, call in enumerate(self.calls):
                for kind in ("key", "value"):
                    held = dict(normalize_args(call))[kind].meta["val"]
                    shape = self.sizes.max_batch, int(held.shape[1]), self.sizes.rows(call), int(held.shape[3])
                    name, target = f"{kind}s_{index}", f"{kind}s.{index}"
                    self.caches.append(self._input(rewriter, name, target, self.sizes.dtype or held.dtype, *shape))
        size = self._length_node(rewriter, first)
        with rewriter.inserting_before(size.next):
            steps = rewriter.call(aten.arange.default, (size,))
            begin = rewriter.call(aten.unsqueeze.default, (self.lengths, 1))
            self.positions = rewriter.call(aten.add.Tensor, (begin, rewriter.call(aten.unsqueeze.default, (steps, 0))))
            self.slot = rewriter.call(aten.view.default, (self.slots, [-1, 1, 1]))
            self.last = self.row = rewriter.call(aten.unsqueeze.default, (self.positions, 1))
            self.rows[self.sizes.max_seq_len] = self.row
        self._retype(
            rewriter, {self.positions, *(self._replace_positions(rewriter, each) for each in self.axes.sources)}
        )

    def _input(self, rewriter: Rewriter, name: str, target: str, dtype: torch.dtype, *shape: Any) -> fx.Node:
        with rewriter.fakes.activate():
            node = rewriter.placeholder(name, torch.empty(shape, dtype=dtype))
        stated = rewriter.program.types.shape(node.meta["val"])
        self.bindings.append(Binding(node.name, Role.INPUT, target, str(dtype).removeprefix("torch."), stated))
        return node

    def _length_node(self, rewriter: Rewriter, first: fx.Node) -> fx.Node:
        """Return a node whose value is the length."""
        node: fx.Node
        length = self.axes.length
        for node in rewriter.program.graph.nodes:
            if node.target is aten.sym_size.int and str(node.meta["val"]) == length:  # shortcut
                return node
            axes = axes_with_symbol(node.meta.get("val"), length)
            if node.op == "placeholder" and axes:
                given = node, axes[0]
        with rewriter.inserting_before(first):
            return rewriter.call(aten.sym_size.int, given)

    def _replace_positions(self, rewriter: Rewriter, source: PositionIds) -> fx.Node:
        """Replace positions that start at 0 by the positions of this call."""
        here, moved = source.node, self.positions
        dtype = here.meta["val"].dtype
        if here.meta["val"].dim() == 1:
            self._add_sequence_axis(rewriter, here)
        after = here if here > self.row else self.last
        with rewriter.inserting_before(after.next):
            if source.offset:
                moved = rewriter.call(aten.add.Tensor, (moved, source.offset))
            if dtype != torch.int64:
                moved = rewriter.call(aten._to_copy.default, (moved,), {"dtype": dtype})
        if after is self.last and moved is not self.positions:
            self.last = moved
        for old in list(here.users) if here.meta["val"].dim() == 1 else [here]:
            rewriter.replace_retyped(old, moved)
        return moved

    def _add_sequence_axis(self, rewriter: Rewriter, source: fx.Node) -> None:
        """Compute functions of the positions as [1, length] instead of [length], so that sequences may differ."""
        readers = follow_shared_positions(source)
        assert isinstance(readers, SharedPositions)
        if not readers.pointwise:
            return
        with rewriter.inserting_before(source.next, source):
            made = {source: rewriter.call(aten.unsqueeze.default, (source, 0))}
        for node in readers.pointwise:
            with rewriter.inserting_before(node, node):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                made[node] = rewriter.call(node.target, args, kwargs)
        for end in readers.ends:
            now = made[end.args[0]]  # type: ignore[index]
            with rewriter.inserting_before(end, end):
                for _ in range(end.meta["val"].dim() - 2):
                    now = rewriter.call(aten.unsqueeze.default, (now, -1))
            rewriter.replace(end, now)
        rewriter.erase_unused(*readers.ends, *reversed(readers.pointwise))

    def _retype(self, rewriter: Rewriter, changed: set[fx.Node]) -> None:
        """Retype values that are computed from positions, which now have a batch axis."""
        apart = AxisTracker(batch_axis(self.axes.batch))
        for node in rewriter.program.graph.nodes:
            if node not in changed and not changed.isdisjoint(node.all_input_nodes):
                if node.op == "output":
                    raise ProgramError("positions are returned, but with a cache they differ between sequences")
                check_symbolic_shapes(node)
                if rewriter.retype(node):
                    changed.add(node)
                if reason := apart.mixing_reason(node):
                    raise ProgramError(f"{node}: {reason}, but with a cache positions differ between sequences")
            apart.record(node)

    def replace_attention(self, rewriter: Rewriter, call: fx.Node) -> None:
        """Write the new rows to the caches, and replace attention by attention over the filled rows."""
        given: dict[str, Any] = dict(normalize_args(call))
        heads, index = int(given["key"].meta["val"].shape[1]), 2 * self.calls.index(call)
        if heads not in self.heads:
            with rewriter.inserting_before(self.last.next):
                count = rewriter.call(aten.arange.default, (heads,))
                self.last = self.heads[heads] = rewriter.call(aten.view.default, (count, [1, -1, 1]))
        room = self.sizes.rows(call)
        if room not in self.rows:
            with rewriter.inserting_before(self.last.next):
                self.last = self.rows[room] = rewriter.call(aten.remainder.Scalar, (self.row, room))
        caches = self.caches[index : index + 2]
        with rewriter.inserting_before(call, call):
            for cache, values in zip(caches, (given["key"], given["value"]), strict=True):
                self.written.append(self._write(rewriter, cache, self.heads[heads], self.rows[room], values))
            options = (
                given["scale"],
                self.sizes.window(call),
                *(given[name] for name in ("softcap", "slopes", "sinks")),
            )
            operands = (given["query"], *self.written[-2:], self.slots, self.lengths, *options)
            read = rewriter.call(_CACHED, operands)
        rewriter.replace(call, read)
        rewriter.erase(call)

    def _write(self, rewriter: Rewriter, cache: fx.Node, heads: fx.Node, rows: fx.Node, values: fx.Node) -> fx.Node:
        """Write values to these rows of a cache, in its dtype."""
        dtype = cache.meta["val"].dtype
        if values.meta["val"].dtype != dtype:
            values = rewriter.call(aten._to_copy.default, (values,), {"dtype": dtype})
        return rewriter.call(aten.index_put.default, (cache, [self.slot, heads, rows], values))

    def insert_outputs(self, rewriter: Rewriter) -> None:
        """Return the written caches as outputs that alias their inputs."""
        program = rewriter.program
        returned: Any = program.graph.output_node().args[0]
        rewriter.set_outputs(program.graph, (*self.written, *returned))
        states = [
            replace(row, name=f"{cache.name}.out", role=Role.OUTPUT, alias=Alias(cache.name, "kv_cache_update"))
            for cache, row in zip(self.caches, self.bindings[2:], strict=True)
        ]
        ins = (*program.bindings.ins, *self.bindings)
        symbols = {**program.symbols}
        sizes = self.sizes
        length = ("max_prefill", sizes.max_prefill) if self.has_rings else ("max_length", sizes.max_seq_len)
        for raw, (option, most) in ((self.axes.batch, ("max_batch", sizes.max_batch)), (self.axes.length, length)):
            if raw in symbols:
                symbols[raw] = replace(symbols[raw], low=1, high=most, limited_by=f"insert_kv_cache.{option}")
        rewriter.update(
            bindings=Bindings((*ins, *states, *program.bindings.outs)),
            symbols=symbols,
            call_spec=_keyword_calling(program, ins),
        )


def _attend(x: Tensor, w: Tensor, causal: bool = True) -> Tensor:
    hidden = torch.nn.functional.linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    result = torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=causal)
    return result.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)


def _decoder(x: Tensor, w: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])[None, :, None].to(x.dtype)
    return _attend(x + torch.cos(places), w)


_CASE_OPTIONS: dict[str, Any] = {
    "prerequisites": ("clean_noops", "match_attention"),
    "axes": {"x": {0: "batch", 1: "length"}},
}
