"""What happens to a storage after a write that is to move there: who still reads the old value, who writes over it."""

from __future__ import annotations

import operator
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from inlay.program.graphs import operands
from inlay.state.aliases import SIZES_ONLY, Region, dense, may_write, overlap, region_of, same, storage_of
from inlay.state.wrapped import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from inlay.state.aliases import Aliases
    from inlay.state.wrapped import Wrapped

_COPY = torch.ops.aten.copy_.default


class Reason(StrEnum):
    """Why a write stays on a copy."""

    READ_LATER = "its old value is read later"
    SHARED = "another argument of the call shares its storage"
    NOT_COPIED_BACK = "it is an input or a constant that the program does not change"
    RETURNED = "its new value is returned, and would be the input itself"
    OVERWRITTEN = "its storage is written again while its value is needed"
    TOLD_ELSEWHERE = "a view of it is told by an offset in a storage where it does not begin"
    UNKNOWN = "what shares its storage is not known"
    TOGETHER = "another write of the call stays, in a layout that is only copied by the wrapper"
    MOVED = "the compiler is set to move calls about after this pass"
    OPAQUE = "the wrapped call has a form that is not known"


class Refusal(NamedTuple):
    """A reason, and the node that is it."""

    reason: Reason
    because: str = ""


class _Phase(Enum):
    """What the storage holds, compared with the graph before the change."""

    AHEAD = auto()
    """The new value, where it held the old one."""
    SAME = auto()
    """The new value, as before: it has been copied back."""
    GONE = auto()
    """Something else, as before: it has been copied over."""


class Later:
    """The life of one base after its wrapper."""

    def __init__(self, aliases: Aliases, place: Mapping[fx.Node, int], wrapped: Wrapped, index: int) -> None:
        self.aliases, self.place, self.wrapped = aliases, place, wrapped
        self.index, self.base = index, wrapped.bases[index]
        self.values = wrapped.values(wrapped.places[index])
        self.old = set(aliases.members(self.base))
        self.new = {each for value in (*self.values, *wrapped.handed_on) for each in aliases.members(value)}
        self.inputs = [each for each in self.old if each.op in ("placeholder", "get_attr")]
        self.region = _written_region(wrapped, index)
        self.self_copies: list[fx.Node] = []
        """Copies of the new value back to where it comes from: nothing is left to copy."""
        self._phase = _Phase.AHEAD

    def refusal(self) -> Refusal | None:
        """Why the write cannot move to the base, or None if it can."""
        if self.old & self.new or len(self.inputs) > 1:
            return Refusal(Reason.UNKNOWN, self.base.name)
        found = self._shared() or self._told_elsewhere() or self._outside()
        if found is not None:
            return found
        after = self.place[self.wrapped.node]
        users = {user for each in self.old | self.new for user in each.users if self.place[user] > after}
        for user in sorted(users, key=self.place.__getitem__):
            found = None if self._harmless(user) else self._step(user)
            if found is not None:
                return found
        if self.inputs and self._phase is _Phase.AHEAD:
            return Refusal(Reason.NOT_COPIED_BACK, self.inputs[0].name)
        return None

    def _shared(self) -> Refusal | None:
        for other in self.wrapped.others:
            if self.aliases.share(other, self.base) and overlap(self.region, region_of(other.meta.get("val"))):
                return Refusal(Reason.SHARED, other.name)
        if sum(self.aliases.share(other, self.base) for other in self.wrapped.bases) > 1:
            return Refusal(Reason.SHARED, self.base.name)
        return None

    def _told_elsewhere(self) -> Refusal | None:
        """What an offset means in a view that a compiler may or may not give a storage of its own is not known."""
        offset, told = self.base.meta["val"].storage_offset(), self.wrapped.told_from(self.index)
        begins = self.base.op in ("placeholder", "get_attr") or same(offset, 0)
        if self.wrapped.strided(self.index) and not (begins and same(offset, told)):
            return Refusal(Reason.TOLD_ELSEWHERE, self.base.name)
        return None

    def _outside(self) -> Refusal | None:
        """An input is changed where the program copies back, and nowhere else: not between its rows, not beside it."""
        if not self.inputs:
            return None
        target = self.inputs[0]
        views = [view for view in self.wrapped.views if self.wrapped.bases[view.base] is self.base]
        if target is self.base and all(view.strided is None for view in views):
            return None
        value = target.meta.get("val")
        whole = region_of(value)
        known = whole is not None and self.region is not None and whole.storage == self.region.storage
        inside = known and whole.first <= self.region.first and self.region.last <= whole.last  # type: ignore[union-attr]
        symbolic = target is self.base and not known
        if value is not None and dense(value) and (inside or symbolic):
            return None
        return Refusal(Reason.UNKNOWN, target.name)

    def _harmless(self, user: fx.Node) -> bool:
        """A view reads nothing, its readers do; sizes are what they were. What may be a copy and no view reads."""
        if user.target in SIZES_ONLY:
            return True
        if user not in self.old and user not in self.new:
            return False
        if user.target is operator.getitem:
            return True
        schema = getattr(user.target, "_schema", None)
        if schema is None or schema.is_mutable or len(schema.returns) != 1:
            return False
        return _views(user, operands(user)[0]) if operands(user) else False

    def _step(self, user: fx.Node) -> Refusal | None:
        copy = user.target is _COPY
        writes = set() if is_wrapper(user) or user.op == "output" else set(may_write(user))
        reads = set(operands(user)[1:2] if copy else operands(user))
        if user.op == "output" and reads & self.new:
            if self.inputs:
                changed = self._phase is not _Phase.AHEAD
                return Refusal(Reason.RETURNED if changed else Reason.NOT_COPIED_BACK, self.inputs[0].name)
            if reads & self.old:  # also where the write did not reach: two results would become one storage
                return Refusal(Reason.READ_LATER, user.name)
        match self._phase:
            case _Phase.AHEAD:
                if any(overlap(self.region, region_of(each.meta.get("val"))) for each in reads & self.old):
                    return Refusal(Reason.READ_LATER, user.name)
                if writes & self.old:
                    return self._written_over(user, reads)
                if writes & self.new:
                    self.region = None  # from here on the old value differs in other places too
            case _Phase.SAME if writes & (self.old | self.new):
                return Refusal(Reason.OVERWRITTEN, user.name)
            case _Phase.GONE if (reads | writes) & self.new:
                return Refusal(Reason.OVERWRITTEN, user.name)
        return None

    def _written_over(self, user: fx.Node, reads: set[fx.Node]) -> Refusal | None:
        """The end of a program copies what its inputs become: over the storage, or back to where it came from."""
        if user.target is not _COPY or user.args[0] not in self.inputs:
            return Refusal(Reason.OVERWRITTEN, user.name)
        if self._copies_itself(user):
            self.self_copies.append(user)
            self._phase = _Phase.SAME
            return None
        if reads & self.new:
            return Refusal(Reason.OVERWRITTEN, user.name)
        self._phase = _Phase.GONE
        return None

    def _copies_itself(self, user: fx.Node) -> bool:
        target, source = user.args[0], user.args[1]
        if target is self.base and source in self.values:
            return True
        if source not in self.new or not self.values:
            return False
        to, come, base, value = (each.meta.get("val") for each in (target, source, self.base, self.values[0]))  # type: ignore[union-attr]
        if None in map(storage_of, (to, come, base, value)):
            return False
        in_place = storage_of(to) == storage_of(base) and storage_of(come) == storage_of(value)
        return in_place and _same_layout(to, come) and _same_layout(base, value)


def _views(user: fx.Node, seen: fx.Node) -> bool:
    """Whether a result, or each tensor of a list of them, is in the storage of an operand."""
    value = user.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    storage = storage_of(seen.meta.get("val"))
    return storage is not None and all(storage_of(each) == storage for each in values)


def _same_layout(one: Any, two: Any) -> bool:
    if one.dtype != two.dtype or one.dim() != two.dim():
        return False
    numbers = [(*each.shape, *each.stride(), each.storage_offset()) for each in (one, two)]
    return all(same(*pair) for pair in zip(*numbers, strict=True))


def _written_region(wrapped: Wrapped, index: int) -> Region | None:
    """The bytes of a base that a call may write: those between the first and the last argument seen in it."""
    value = wrapped.bases[index].meta["val"]
    regions = [view.region(value) for view in wrapped.views if view.base == index]
    if not regions or any(each is None for each in regions):
        return None if regions else region_of(value)
    known = [each for each in regions if each is not None]
    return Region(known[0].storage, min(each.first for each in known), max(each.last for each in known))
