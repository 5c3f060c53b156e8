"""Liveness of a storage after a candidate in-place write: later readers of the old value, and later writes."""

from __future__ import annotations

import operator
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from inlay.analysis.aliasing import (
    SIZE_OPS,
    ByteRange,
    byte_range,
    is_dense,
    is_same_size,
    may_overlap,
    possible_writes,
    storage_id,
)
from inlay.analysis.auto_functionalized import is_auto_functionalized
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from inlay.analysis.aliasing import Aliases
    from inlay.analysis.auto_functionalized import AutoFunctionalized

_COPY = torch.ops.aten.copy_.default


class CopyReason(StrEnum):
    """Why a write stays a copy."""

    READ_AFTER_WRITE = "its old value is read after the write"
    SHARED_STORAGE = "another argument of the call shares its storage"
    NOT_COPIED_BACK = "it is an input or a constant that the program does not change"
    RETURNED = "its new value is returned, and would alias the input"
    OVERWRITTEN = "its storage is overwritten while its value is still needed"
    OFFSET_MISMATCH = "the storage offset of a strided view of it may not be valid in place"
    UNKNOWN = "it is unknown which tensors share its storage"
    PARTIAL_CALL = "another write of the call stays a copy, in a layout that only the wrapper can copy"
    REORDERED_CALLS = "the compiler is configured to reorder calls after this pass"
    OPAQUE = "the wrapped call has an unknown form"


class CopyRequired(NamedTuple):
    """A reason for a copy, and the node that causes it."""

    reason: CopyReason
    node_name: str = ""


class _Phase(Enum):
    """The contents of the storage after the change, compared with the original graph."""

    AHEAD = auto()
    """The new value; in the original graph still the old one."""
    SAME = auto()
    """The new value, as in the original graph: it has been copied back."""
    GONE = auto()
    """Another value, as in the original graph: the storage has been overwritten."""


class WriteLiveness:
    """The uses of one base after its wrapper."""

    def __init__(self, aliases: Aliases, place: Mapping[fx.Node, int], wrapped: AutoFunctionalized, index: int) -> None:
        self.aliases, self.order, self.call = aliases, place, wrapped
        self.index, self.base = index, wrapped.bases[index]
        self.values = wrapped.result_nodes(wrapped.result_indices[index])
        self.old_aliases = set(aliases.members(self.base))
        self.new_aliases = {
            each for value in (*self.values, *wrapped.aliased_results) for each in aliases.members(value)
        }
        self.inputs = [each for each in self.old_aliases if each.op in ("placeholder", "get_attr")]
        self.written_range = _find_written_range(wrapped, index)
        self.self_copies: list[fx.Node] = []
        """Copies of the new value back to its base: in place they copy a tensor to itself."""
        self._phase = _Phase.AHEAD

    def copy_required(self) -> CopyRequired | None:
        """Return why the write cannot happen in the base, or None if it can."""
        if self.old_aliases & self.new_aliases or len(self.inputs) > 1:
            return CopyRequired(CopyReason.UNKNOWN, self.base.name)
        found = self._check_arguments() or self._check_offset() or self._check_input_bounds()
        if found is not None:
            return found
        after = self.order[self.call.node]
        users = {
            user for each in self.old_aliases | self.new_aliases for user in each.users if self.order[user] > after
        }
        for user in sorted(users, key=self.order.__getitem__):
            found = None if self._is_harmless(user) else self._step(user)
            if found is not None:
                return found
        if self.inputs and self._phase is _Phase.AHEAD:
            return CopyRequired(CopyReason.NOT_COPIED_BACK, self.inputs[0].name)
        return None

    def _check_arguments(self) -> CopyRequired | None:
        for other in self.call.read_only_nodes:
            if self.aliases.may_share(other, self.base) and may_overlap(
                self.written_range, byte_range(other.meta.get("val"))
            ):
                return CopyRequired(CopyReason.SHARED_STORAGE, other.name)
        if sum(self.aliases.may_share(other, self.base) for other in self.call.bases) > 1:
            return CopyRequired(CopyReason.SHARED_STORAGE, self.base.name)
        return None

    def _check_offset(self) -> CopyRequired | None:
        """Refuse a strided view whose offset is ambiguous: the compiler may or may not give the base a new storage."""
        offset, told = self.base.meta["val"].storage_offset(), self.call.base_offset(self.index)
        begins = self.base.op in ("placeholder", "get_attr") or is_same_size(offset, 0)
        if self.call.has_strided_view(self.index) and not (begins and is_same_size(offset, told)):
            return CopyRequired(CopyReason.OFFSET_MISMATCH, self.base.name)
        return None

    def _check_input_bounds(self) -> CopyRequired | None:
        """An input may change only where the program copies back: not between its rows, not outside its bounds."""
        if not self.inputs:
            return None
        target = self.inputs[0]
        views = [view for view in self.call.views if self.call.bases[view.base] is self.base]
        if target is self.base and all(view.strided is None for view in views):
            return None
        value = target.meta.get("val")
        whole = byte_range(value)
        known = whole is not None and self.written_range is not None and whole.storage == self.written_range.storage
        inside = known and whole.start <= self.written_range.start and self.written_range.end <= whole.end  # type: ignore[union-attr]
        symbolic = target is self.base and not known
        if value is not None and is_dense(value) and (inside or symbolic):
            return None
        return CopyRequired(CopyReason.UNKNOWN, target.name)

    def _is_harmless(self, user: fx.Node) -> bool:
        """Whether a user reads no values: a view, whose users are checked, or a size. A possible copy does read."""
        if user.target in SIZE_OPS or user.target is operator.getitem:
            return True
        schema = getattr(user.target, "_schema", None)
        if schema is None or schema.is_mutable or len(schema.returns) != 1:
            return False
        seen = operands(user)[0]
        return (seen in self.old_aliases or seen in self.new_aliases) and _is_view_of(user, seen)

    def _step(self, user: fx.Node) -> CopyRequired | None:
        copy = user.target is _COPY
        writes = set() if is_auto_functionalized(user) or user.op == "output" else set(possible_writes(user))
        reads = set(operands(user)[1:2] if copy else operands(user))
        if user.op == "output" and reads & self.new_aliases:
            if self.inputs:
                changed = self._phase is not _Phase.AHEAD
                return CopyRequired(CopyReason.RETURNED if changed else CopyReason.NOT_COPIED_BACK, self.inputs[0].name)
            if reads & self.old_aliases:  # even outside the written bytes: two results would become one storage
                return CopyRequired(CopyReason.READ_AFTER_WRITE, user.name)
        match self._phase:
            case _Phase.AHEAD:
                if any(
                    may_overlap(self.written_range, byte_range(each.meta.get("val")))
                    for each in reads & self.old_aliases
                ):
                    return CopyRequired(CopyReason.READ_AFTER_WRITE, user.name)
                if writes & self.old_aliases:
                    return self._check_overwrite(user, reads)
                if writes & self.new_aliases:
                    self.written_range = None  # from here on the old value differs outside this range too
            case _Phase.SAME if writes & (self.old_aliases | self.new_aliases):
                return CopyRequired(CopyReason.OVERWRITTEN, user.name)
            case _Phase.GONE if (reads | writes) & self.new_aliases:
                return CopyRequired(CopyReason.OVERWRITTEN, user.name)
        return None

    def _check_overwrite(self, user: fx.Node, reads: set[fx.Node]) -> CopyRequired | None:
        """Check a write to the storage. A final copy to an input may overwrite it, or copy the new value back to it."""
        if user.target is not _COPY or user.args[0] not in self.inputs:
            return CopyRequired(CopyReason.OVERWRITTEN, user.name)
        if self._is_self_copy(user):
            self.self_copies.append(user)
            self._phase = _Phase.SAME
            return None
        if reads & self.new_aliases:
            return CopyRequired(CopyReason.OVERWRITTEN, user.name)
        self._phase = _Phase.GONE
        return None

    def _is_self_copy(self, user: fx.Node) -> bool:
        target, source = user.args[0], user.args[1]
        if target is self.base and source in self.values:
            return True
        if source not in self.new_aliases or not self.values:
            return False
        to, come, base, value = (each.meta.get("val") for each in (target, source, self.base, self.values[0]))  # type: ignore[union-attr]
        if None in map(storage_id, (to, come, base, value)):
            return False
        in_place = storage_id(to) == storage_id(base) and storage_id(come) == storage_id(value)
        return in_place and _has_same_layout(to, come) and _has_same_layout(base, value)


def _is_view_of(user: fx.Node, seen: fx.Node) -> bool:
    """Whether a result, or each tensor of a list result, is in the storage of an operand."""
    value = user.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    storage = storage_id(seen.meta.get("val"))
    return storage is not None and all(storage_id(each) == storage for each in values)


def _has_same_layout(one: Any, two: Any) -> bool:
    if one.dtype != two.dtype or one.dim() != two.dim():
        return False
    numbers = [(*each.shape, *each.stride(), each.storage_offset()) for each in (one, two)]
    return all(is_same_size(*pair) for pair in zip(*numbers, strict=True))


def _find_written_range(wrapped: AutoFunctionalized, index: int) -> ByteRange | None:
    """Return the bytes of a base that a call may write: the range that spans all written views of it."""
    value = wrapped.bases[index].meta["val"]
    regions = [view.byte_range(value) for view in wrapped.views if view.base == index]
    if not regions or any(each is None for each in regions):
        return None if regions else byte_range(value)
    known = [each for each in regions if each is not None]
    return ByteRange(known[0].storage, min(each.start for each in known), max(each.end for each in known))
