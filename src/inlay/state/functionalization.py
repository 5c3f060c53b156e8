"""Undo functionalization where it is sound: mutating operators write where the program says, not to a copy.

Before, in a post-grad graph:

    new = auto_functionalized_v2(op, x=x, _cache_base_index=0, _all_bases=[cache])   # copies cache, calls op
    copy_(cache, new[1])                                                             # and copies it back

after:

    op(cache, x)

An analysis of storage decides, call by call and argument by argument, not a list of operators: no later reader may
need the old value, no other argument may share the storage, an input must be one that the program changes, and what
the program returns must not become the input itself. What stays says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.program.graphs import TOLD_BY_OFFSET, target_text
from inlay.state.aliases import Aliases, apart, dense, region_of, same, span, storage_of
from inlay.state.later import Later, Reason, Refusal
from inlay.state.wrapped import V2, Wrapped, is_wrapper, read

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

aten = torch.ops.aten
_NEW = (aten.clone.default, aten.new_empty_strided.default)
_NOT_OURS = ("val", "eager_input_vals", "only_clone_these_tensors")


@dataclass(frozen=True)
class Write:
    """One tensor that one call writes."""

    node: str
    """The wrapper, by the name it had."""
    operator: str
    base: str
    """What is written, or copied and then written."""
    bytes: int | None
    """What the copy costs; None where sizes are symbolic."""
    refusal: Refusal | None = None

    def __str__(self) -> str:
        if self.refusal is None:
            return f"{self.operator} writes {self.base} in place"
        because = f" ({self.refusal.because})" if self.refusal.because else ""
        return f"{self.operator} writes a copy of {self.base}: {self.refusal.reason}{because}"


@dataclass(frozen=True)
class Fixed:
    """What went in place, what stayed and why."""

    in_place: tuple[Write, ...] = ()
    stayed: tuple[Write, ...] = ()
    copies_removed: int = 0
    """Copies back to an input that had become copies of a tensor to itself."""

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.in_place, *self.stayed)))


def fix_functionalization(graph: fx.Graph) -> Fixed:
    """Write in place what can be written in place; `graph` is changed and says what it said.

    A call of which some writes stay is called on copies of those; one of which all stay is left wrapped.

    >>> graph = fx.Graph()
    >>> graph.output(graph.placeholder("x"))
    output
    >>> fix_functionalization(graph)
    Fixed(in_place=(), stayed=(), copies_removed=0)
    """
    return _Fixing(graph).run()


def left_alone(graph: fx.Graph, reason: Reason) -> Fixed:
    """What is told when nothing is done, for one reason."""
    stayed: list[Write] = []
    for node in filter(is_wrapper, graph.nodes):
        wrapped = read(node)
        stayed += _opaque(node) if wrapped is None else _all(wrapped, reason)
    return Fixed(stayed=tuple(stayed))


def spell_out_copies(graph: fx.Graph) -> int:
    """Replace wrappers by copies and calls, writing nothing else in place; how many there were.

    After `fix_functionalization` this keeps a compiler from deciding again, with less care, about what stayed.
    """
    fixing = _Fixing(graph)
    for node in fixing.wrappers:
        wrapped = read(node)
        if wrapped is not None and not fixing.unwrap(wrapped, ()):
            fixing.part(wrapped)
    return len(fixing.wrappers)


class _Fixing:
    """One run over one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.wrappers = [node for node in graph.nodes if is_wrapper(node)]
        known = {node: read(node) for node in self.wrappers}
        self.aliases = Aliases(graph, {node: None if each is None else each.lists for node, each in known.items()})
        for wrapped in known.values():
            if wrapped is not None and wrapped.handed_on:
                _merge_results(self.aliases, wrapped)

    def run(self) -> Fixed:
        in_place: list[Write] = []
        stayed: list[Write] = []
        removed = 0
        for node in self.wrappers:
            wrapped = read(node)  # again: its bases may have changed since
            if wrapped is None:
                stayed += _opaque(node)
                continue
            decided, copies = self.decide(wrapped)
            if not all(decided) and any(decided):
                decided = self._together(wrapped, decided)
            writes = [_write(wrapped, index, each) for index, each in enumerate(decided)]
            in_place += [each for each in writes if each.refusal is None]
            stayed += [each for each in writes if each.refusal is not None]
            chosen = [index for index, each in enumerate(decided) if each is None]
            if chosen:
                self.unwrap(wrapped, chosen)
                removed += self._drop(copies)
        return Fixed(tuple(in_place), tuple(stayed), removed)

    def decide(self, wrapped: Wrapped) -> tuple[list[Refusal | None], list[fx.Node]]:
        """For each base why it stays, or None; and the copies back that are not needed any more."""
        decided: list[Refusal | None] = []
        copies: list[fx.Node] = []
        for index, base in enumerate(wrapped.bases):
            later = Later(self.aliases, self.place, wrapped, index)
            decided.append(later.refusal())
            if decided[-1] is None:
                copies += later.self_copies
                for value in (*later.values, *wrapped.handed_on):
                    self.aliases.merge(value, base)
        return decided, copies

    def _together(self, wrapped: Wrapped, decided: list[Refusal | None]) -> list[Refusal | None]:
        """All writes of a call stay if one does that cannot be copied here."""
        if all(self._copied_as_is(wrapped, index) for index, each in enumerate(decided) if each is not None):
            return decided
        return [each or Refusal(Reason.TOGETHER) for each in decided]

    def _copied_as_is(self, wrapped: Wrapped, index: int) -> bool:
        """Whether the copy that the wrapper makes can be made by operators: same strides, same offset, no gaps seen."""
        value, told = wrapped.bases[index].meta["val"], wrapped.told_from(index)
        if dense(value) and same(told, 0):
            return True
        if span(0, value.shape, value.stride(), told, 1) is None:
            return False
        if dense(value):
            return True
        users = {user for each in wrapped.values(wrapped.places[index]) for user in self._users(each)}
        gaps_seen = wrapped.strided(index) or any(each.target in TOLD_BY_OFFSET or is_wrapper(each) for each in users)
        return apart(value) and not gaps_seen

    def _users(self, node: fx.Node) -> set[fx.Node]:
        return {user for member in self.aliases.members(node) for user in member.users}

    def unwrap(self, wrapped: Wrapped, in_place: Collection[int]) -> bool:
        """Call the operator itself, on these bases and on copies of the others; False if one cannot be copied here."""
        node = wrapped.node
        copied = [index for index in range(len(wrapped.bases)) if index not in in_place]
        if not all(self._copied_as_is(wrapped, index) for index in copied):
            return False

        def call(target: Any, *args: Any) -> fx.Node:
            made = self.graph.call_function(target, args)
            made.meta.update(_inherited(node))
            made.meta["val"] = _computed(target, *args)
            self.place[made] = self.place[node]
            self.aliases.add(made, None if target in _NEW else args[0])
            return made

        with self.graph.inserting_before(node):
            bases = list(wrapped.bases)
            for index in copied:
                bases[index] = _copied(bases[index], wrapped.told_from(index), call)
            args, kwargs = wrapped.call(bases, node.kwargs, call)
            made = self.graph.call_function(wrapped.operator, args, kwargs)
        made.meta.update(_inherited(node))
        self.place[made] = self.place[node]
        self.aliases.add(made, bases[0] if wrapped.handed_on else None)
        self._hand_over(wrapped, made, bases)
        return True

    def part(self, wrapped: Wrapped) -> None:
        """Give a call that stays wrapped copies of the arguments that share with what it writes."""
        copies: dict[fx.Node, fx.Node] = {}
        for other in wrapped.others:
            if other not in copies and any(self.aliases.share(other, base) for base in wrapped.bases):
                with self.graph.inserting_before(wrapped.node):
                    copies[other] = self.graph.call_function(aten.clone.default, (other,))
                copies[other].meta.update(_inherited(wrapped.node))
                copies[other].meta["val"] = aten.clone.default(other.meta["val"])
        plain = fx.map_arg(wrapped.plain, lambda each: copies.get(each, each))
        wrapped.node.kwargs = {**wrapped.node.kwargs, **plain}

    def _hand_over(self, wrapped: Wrapped, made: fx.Node, bases: list[fx.Node]) -> None:
        """Let the readers of the wrapper read the call and the bases."""
        node = wrapped.node
        _set_values(wrapped, made)
        for place, base in zip(wrapped.places, bases, strict=True):
            for value in wrapped.values(place):
                self.aliases.merge(value, base)
                self._restate(value, base)
                value.replace_all_uses_with(base)
                self.graph.erase_node(value)
        for user in list(node.users):
            if not user.users and int(str(user.args[1])) >= wrapped.returns:
                self.graph.erase_node(user)
            elif len(wrapped.operator._schema.returns) > 1:
                user.replace_input_with(node, made)
            else:
                self.aliases.merge(user, made)
                user.replace_all_uses_with(made)
                self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _restate(self, value: fx.Node, base: fx.Node) -> None:
        """Views of a new value are views of the base now, and their values say so."""
        stated, storage = base.meta["val"], storage_of(value.meta.get("val"))
        for each in self.aliases.members(value):
            seen: Any = each.meta.get("val")
            if storage is None or each is value or storage_of(seen) != storage or seen.dtype != stated.dtype:
                continue
            region = region_of(seen)
            if region is not None and region.last <= stated.untyped_storage().nbytes():
                each.meta["val"] = torch.as_strided(stated, seen.shape, seen.stride(), seen.storage_offset())

    def _drop(self, copies: list[fx.Node]) -> int:
        """Remove copies of a tensor to itself, and the views that led to them."""
        for copy in copies:
            source = copy.args[1]
            copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
            self.graph.erase_node(copy)
            while isinstance(source, fx.Node) and not source.users and source.op == "call_function":
                schema = getattr(source.target, "_schema", None)
                if schema is None or schema.is_mutable:
                    break
                upstream = source.args[0]
                self.graph.erase_node(source)
                source = upstream
        return len(copies)


def _merge_results(aliases: Aliases, wrapped: Wrapped) -> None:
    """An in-place operator returns what it wrote."""
    nodes = list(wrapped.node.users)
    for each in nodes[1:]:
        aliases.merge(nodes[0], each)


def _set_values(wrapped: Wrapped, made: fx.Node) -> None:
    """What the call returns, and what it was given before the compiler chose layouts."""
    node, count = wrapped.node, len(wrapped.operator._schema.returns)
    results = node.meta.get("val")
    if not count:
        made.meta["val"] = None
    elif isinstance(results, (list, tuple)):
        made.meta["val"] = results[0] if count == 1 else tuple(results[:count])
    if count == 1 and wrapped.handed_on:
        first = next(each for each in (*made.args, *made.kwargs.values()) if isinstance(each, fx.Node))
        made.meta["val"] = first.meta["val"]
    if "eager_input_vals" in node.meta:
        given = node.meta["eager_input_vals"][1]
        made.meta["eager_input_vals"] = wrapped.call(wrapped.given(given), given, _computed)


def _computed(target: Any, *args: Any) -> Any:
    """What a call makes of the values that its operands state."""
    return target(*fx.map_arg(args, lambda each: each.meta["val"]))


def _inherited(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _NOT_OURS}


def _copied(base: fx.Node, offset: Any, call: Callable[..., fx.Node]) -> fx.Node:
    """A copy with the strides of the original, at an offset in a storage of its own."""
    value = base.meta["val"]
    if dense(value) and same(offset, 0):
        return call(aten.clone.default, base)
    region = span(0, value.shape, value.stride(), offset, 1)
    assert region is not None
    room = call(aten.new_empty_strided.default, base, [region.last], [1])
    copy = call(aten.as_strided.default, room, list(value.shape), list(value.stride()), offset)
    call(aten.copy_.default, copy, base)
    return copy


def _write(wrapped: Wrapped, index: int, refusal: Refusal | None) -> Write:
    base = wrapped.bases[index]
    value = base.meta["val"]
    size = value.numel() * value.element_size()
    name = target_text(wrapped.operator)
    return Write(wrapped.node.name, name, base.name, size if type(size) is int else None, refusal)


def _all(wrapped: Wrapped, reason: Reason) -> list[Write]:
    return [_write(wrapped, index, Refusal(reason)) for index in range(len(wrapped.bases))]


def _opaque(node: fx.Node) -> list[Write]:
    """A wrapper that could not be read; one that has no base fills a tensor of its own and copies nothing."""
    if node.target is V2 and not node.kwargs.get("_all_bases"):
        return []
    return [Write(node.name, target_text(node.args[0]), "", None, Refusal(Reason.OPAQUE))]
