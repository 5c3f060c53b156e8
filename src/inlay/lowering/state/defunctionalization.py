"""Undo functionalization where it is sound: mutating operators write to their arguments, not to copies.

Before, in a post-grad graph:

    new = auto_functionalized_v2(op, x=x, _cache_base_index=0, _all_bases=[cache])   # copies cache, calls op
    copy_(cache, new[1])                                                             # and copies it back

after:

    op(cache, x)

An analysis of storage decides for each call and argument; there is no list of operators. No later reader may need the
old value, no other argument may share the storage, an input must be one that the program changes, and a returned value
must not become the input itself. Every write that stays a copy is reported with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.aliasing import (
    Aliases,
    byte_range,
    is_dense,
    is_non_overlapping,
    is_same_size,
    storage_id,
    strided_byte_range,
)
from inlay.analysis.auto_functionalized import V2, AutoFunctionalized, is_auto_functionalized, parse_auto_functionalized
from inlay.analysis.liveness import CopyReason, CopyRequired, WriteLiveness
from inlay.program.graphs import AS_STRIDED_OPS, target_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

aten = torch.ops.aten
_ALLOCATING_OPS = (aten.clone.default, aten.new_empty_strided.default)
_EXCLUDED_META = ("val", "eager_input_vals", "only_clone_these_tensors")


@dataclass(frozen=True)
class WriteDecision:
    """The decision about one tensor that one call writes: in place, or why on a copy."""

    node: str
    """The original name of the wrapper."""
    operator: str
    base: str
    """The tensor that is written, or copied and then written."""
    nbytes: int | None
    """The bytes that the copy costs; None where sizes are symbolic."""
    copy_required: CopyRequired | None = None

    def __str__(self) -> str:
        if self.copy_required is None:
            return f"{self.operator} writes {self.base} in place"
        because = f" ({self.copy_required.node_name})" if self.copy_required.node_name else ""
        return f"{self.operator} writes a copy of {self.base}: {self.copy_required.reason}{because}"


@dataclass(frozen=True)
class FixReport:
    """The writes that became in-place writes, and those that stayed copies, with reasons."""

    in_place: tuple[WriteDecision, ...] = ()
    copied: tuple[WriteDecision, ...] = ()
    copies_removed: int = 0
    """Removed copies back to an input, which had become copies of a tensor to itself."""

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.in_place, *self.copied)))


def fix_functionalization(graph: fx.Graph) -> FixReport:
    """Write in place wherever that is sound. `graph` is modified; its results do not change.

    If only some writes of a call stay copies, the call gets copies of those tensors. If all stay, it stays wrapped.

    >>> graph = fx.Graph()
    >>> graph.output(graph.placeholder("x"))
    output
    >>> fix_functionalization(graph)
    FixReport(in_place=(), copied=(), copies_removed=0)
    """
    return _Fixer(graph).run()


def report_all_copied(graph: fx.Graph, reason: CopyReason) -> FixReport:
    """Return the report of a graph in which every write stays a copy, for one reason."""
    stayed: list[WriteDecision] = []
    for node in filter(is_auto_functionalized, graph.nodes):
        wrapped = parse_auto_functionalized(node)
        stayed += _opaque_decisions(node) if wrapped is None else _all(wrapped, reason)
    return FixReport(copied=tuple(stayed))


def expand_auto_functionalized(graph: fx.Graph) -> int:
    """Replace wrappers by copies and calls, without further in-place writes; return the number of wrappers.

    After `fix_functionalization` this keeps a compiler from deciding again, less strictly, about the remaining copies.
    """
    fixing = _Fixer(graph)
    for node in fixing.wrappers:
        wrapped = parse_auto_functionalized(node)
        if wrapped is not None and not fixing.unwrap(wrapped, ()):
            fixing.separate_arguments(wrapped)
    return len(fixing.wrappers)


class _Fixer:
    """One run over one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.wrappers = [node for node in graph.nodes if is_auto_functionalized(node)]
        known = {node: parse_auto_functionalized(node) for node in self.wrappers}
        self.aliases = Aliases(graph, {node: None if each is None else each.lists for node, each in known.items()})
        for wrapped in known.values():
            if wrapped is not None and wrapped.aliased_results:
                _merge_results(self.aliases, wrapped)

    def run(self) -> FixReport:
        in_place: list[WriteDecision] = []
        stayed: list[WriteDecision] = []
        removed = 0
        for node in self.wrappers:
            wrapped = parse_auto_functionalized(node)  # parsed again: its bases may have changed
            if wrapped is None:
                stayed += _opaque_decisions(node)
                continue
            decided, copies = self.decide(wrapped)
            if not all(decided) and any(decided):
                decided = self._refuse_partial(wrapped, decided)
            writes = [_write(wrapped, index, each) for index, each in enumerate(decided)]
            in_place += [each for each in writes if each.copy_required is None]
            stayed += [each for each in writes if each.copy_required is not None]
            chosen = [index for index, each in enumerate(decided) if each is None]
            if chosen:
                self.unwrap(wrapped, chosen)
                removed += self._drop(copies)
        return FixReport(tuple(in_place), tuple(stayed), removed)

    def decide(self, wrapped: AutoFunctionalized) -> tuple[list[CopyRequired | None], list[fx.Node]]:
        """Return for each base why it stays a copy, or None; and the copies back that are no longer needed."""
        decided: list[CopyRequired | None] = []
        copies: list[fx.Node] = []
        for index, base in enumerate(wrapped.bases):
            later = WriteLiveness(self.aliases, self.order, wrapped, index)
            decided.append(later.copy_required())
            if decided[-1] is None:
                copies += later.self_copies
                for value in (*later.values, *wrapped.aliased_results):
                    self.aliases.merge(value, base)
        return decided, copies

    def _refuse_partial(
        self, wrapped: AutoFunctionalized, decided: list[CopyRequired | None]
    ) -> list[CopyRequired | None]:
        """If one write of a call stays and cannot be copied here, all writes of the call stay."""
        if all(self._can_clone(wrapped, index) for index, each in enumerate(decided) if each is not None):
            return decided
        return [each or CopyRequired(CopyReason.PARTIAL_CALL) for each in decided]

    def _can_clone(self, wrapped: AutoFunctionalized, index: int) -> bool:
        """Whether operators can make the wrapper's copy: same strides, same offset, gaps never read."""
        value, told = wrapped.bases[index].meta["val"], wrapped.base_offset(index)
        if is_dense(value) and is_same_size(told, 0):
            return True
        if strided_byte_range(0, value.shape, value.stride(), told, 1) is None:
            return False
        if is_dense(value):
            return True
        users = {user for each in wrapped.result_nodes(wrapped.result_indices[index]) for user in self._users(each)}
        gaps_seen = wrapped.has_strided_view(index) or any(
            each.target in AS_STRIDED_OPS or is_auto_functionalized(each) for each in users
        )
        return is_non_overlapping(value) and not gaps_seen

    def _users(self, node: fx.Node) -> set[fx.Node]:
        return {user for member in self.aliases.members(node) for user in member.users}

    def unwrap(self, wrapped: AutoFunctionalized, in_place: Collection[int]) -> bool:
        """Call the operator on these bases and on copies of the others; return False if one cannot be copied here."""
        node = wrapped.node
        copied = [index for index in range(len(wrapped.bases)) if index not in in_place]
        if not all(self._can_clone(wrapped, index) for index in copied):
            return False

        def call(target: Any, *args: Any) -> fx.Node:
            made = self.graph.call_function(target, args)
            made.meta.update(_inherited_meta(node))
            made.meta["val"] = _compute_value(target, *args)
            self.order[made] = self.order[node]
            self.aliases.add(made, None if target in _ALLOCATING_OPS else args[0])
            return made

        with self.graph.inserting_before(node):
            bases = list(wrapped.bases)
            for index in copied:
                bases[index] = _clone_base(bases[index], wrapped.base_offset(index), call)
        for place, base in zip(wrapped.result_indices, bases, strict=True):
            for value in wrapped.result_nodes(place):
                self.aliases.merge(value, base)
                self._rebase_views(value, base)
        results = wrapped.result_nodes((0,)) if len(wrapped.operator._schema.returns) <= 1 else []
        first = bases[0] if wrapped.aliased_results else None
        made = call_in_place(wrapped, bases, call)
        self.order[made] = self.order[node]
        self.aliases.add(made, first)
        for each in results:
            self.aliases.merge(each, made)
        return True

    def separate_arguments(self, wrapped: AutoFunctionalized) -> None:
        """Copy the read-only arguments of a wrapped call that may share storage with its bases."""
        copies: dict[fx.Node, fx.Node] = {}
        for other in wrapped.read_only_nodes:
            if other not in copies and any(self.aliases.may_share(other, base) for base in wrapped.bases):
                with self.graph.inserting_before(wrapped.node):
                    copies[other] = self.graph.call_function(aten.clone.default, (other,))
                copies[other].meta.update(_inherited_meta(wrapped.node))
                copies[other].meta["val"] = aten.clone.default(other.meta["val"])
        plain = fx.map_arg(wrapped.read_only_arguments, lambda each: copies.get(each, each))
        wrapped.node.kwargs = {**wrapped.node.kwargs, **plain}

    def _rebase_views(self, value: fx.Node, base: fx.Node) -> None:
        """Update the fake tensors of views of a new value: they are views of the base now."""
        stated, storage = base.meta["val"], storage_id(value.meta.get("val"))
        for each in self.aliases.members(value):
            seen: Any = each.meta.get("val")
            if storage is None or each is value or storage_id(seen) != storage or seen.dtype != stated.dtype:
                continue
            region = byte_range(seen)
            if region is not None and region.end <= stated.untyped_storage().nbytes():
                each.meta["val"] = torch.as_strided(stated, seen.shape, seen.stride(), seen.storage_offset())

    def _drop(self, copies: list[fx.Node]) -> int:
        """Remove copies of a tensor to itself, and the views that only they used."""
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


def call_in_place(wrapped: AutoFunctionalized, bases: Sequence[fx.Node], make: Callable[..., fx.Node]) -> fx.Node:
    """Replace a wrapper by a call of its operator on `bases`; `make` inserts the calls that create views of them."""
    node, graph = wrapped.node, wrapped.node.graph
    with graph.inserting_before(node):
        args, kwargs = wrapped.build_arguments(bases, wrapped.read_only_arguments, make)
        call = graph.call_function(wrapped.operator, args, kwargs)
    call.meta.update(_inherited_meta(node))
    _set_values(wrapped, call)
    for place, base in zip(wrapped.result_indices, bases, strict=True):
        for value in wrapped.result_nodes(place):
            value.replace_all_uses_with(base)
            graph.erase_node(value)
    for user in list(node.users):
        if not user.users and int(str(user.args[1])) >= wrapped.return_count:
            graph.erase_node(user)
        elif len(wrapped.operator._schema.returns) > 1:
            user.replace_input_with(node, call)
        else:
            user.replace_all_uses_with(call)
            graph.erase_node(user)
    graph.erase_node(node)
    return call


def _merge_results(aliases: Aliases, wrapped: AutoFunctionalized) -> None:
    """Merge the results of a wrapper: an in-place operator may return what it wrote."""
    nodes = list(wrapped.node.users)
    for each in nodes[1:]:
        aliases.merge(nodes[0], each)


def _set_values(wrapped: AutoFunctionalized, made: fx.Node) -> None:
    """Set the recorded result of the call, and its eager inputs from before the compiler chose layouts."""
    node, count = wrapped.node, len(wrapped.operator._schema.returns)
    results = node.meta.get("val")
    if not count:
        made.meta["val"] = None
    elif isinstance(results, (list, tuple)):
        made.meta["val"] = results[0] if count == 1 else tuple(results[:count])
    if count == 1 and wrapped.aliased_results:
        first = next(each for each in (*made.args, *made.kwargs.values()) if isinstance(each, fx.Node))
        made.meta["val"] = first.meta["val"]
    if "eager_input_vals" in node.meta:
        given = node.meta["eager_input_vals"][1]
        made.meta["eager_input_vals"] = wrapped.build_arguments(wrapped.find_bases(given), given, _compute_value)


def _compute_value(target: Any, *args: Any) -> Any:
    """Compute the result of a call on the recorded values of its operands."""
    return target(*fx.map_arg(args, lambda each: each.meta["val"]))


def _inherited_meta(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.meta.items() if key not in _EXCLUDED_META}


def _clone_base(base: fx.Node, offset: Any, call: Callable[..., fx.Node]) -> fx.Node:
    """Create a copy with the strides of the original, at an offset in a new storage."""
    value = base.meta["val"]
    if is_dense(value) and is_same_size(offset, 0):
        return call(aten.clone.default, base)
    region = strided_byte_range(0, value.shape, value.stride(), offset, 1)
    assert region is not None
    room = call(aten.new_empty_strided.default, base, [region.end], [1])
    copy = call(aten.as_strided.default, room, list(value.shape), list(value.stride()), offset)
    call(aten.copy_.default, copy, base)
    return copy


def _write(wrapped: AutoFunctionalized, index: int, refusal: CopyRequired | None) -> WriteDecision:
    base = wrapped.bases[index]
    value = base.meta["val"]
    size = value.numel() * value.element_size()
    name = target_text(wrapped.operator)
    return WriteDecision(wrapped.node.name, name, base.name, size if type(size) is int else None, refusal)


def _all(wrapped: AutoFunctionalized, reason: CopyReason) -> list[WriteDecision]:
    return [_write(wrapped, index, CopyRequired(reason)) for index in range(len(wrapped.bases))]


def _opaque_decisions(node: fx.Node) -> list[WriteDecision]:
    """Return the decision for a wrapper that could not be parsed. One without a base copies nothing."""
    if node.target is V2 and not node.kwargs.get("_all_bases"):
        return []
    return [WriteDecision(node.name, target_text(node.args[0]), "", None, CopyRequired(CopyReason.OPAQUE))]
