"""The KV-cache manager: which blocks are held where, who relies on them, and which goes when room is needed.

It keeps books and moves nothing: what has to be copied is returned as moves, in the order in which to do it. All places
are there from the start; their number never changes.
"""

from __future__ import annotations

from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from inlay.errors import UsageError
from inlay.runtime.kv.blocks import Block, Move, Tokens, chained
from inlay.runtime.kv.events import Cleared, Created, Removed, Stored, Updated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.runtime.kv.events import Event


_Entry = tuple[int, int, Block]
"""Priority, time of last use, and the block that had them: what is less goes first."""


class Placed(NamedTuple):
    """A block that was stored: what to copy before it is written, and whether it has to be."""

    block: Block
    moves: list[Move]
    new: bool


class Manager:
    """Blocks on one or more levels of memory.

    >>> seen = []
    >>> manager = Manager([2, 4], block_size=2, tell=seen.append)
    >>> first, moves, new = manager.store(None, (1, 2))
    >>> [block.hash == first.hash for block in manager.lookup([1, 2, 3])]
    [True]
    >>> manager.lookup([1, 2, 3], salt="another tenant")
    []
    >>> [type(event).__name__ for event in seen]
    ['Created', 'Stored']
    """

    def __init__(
        self, places: Sequence[int], block_size: int, tell: Callable[[Event], None] = lambda event: None
    ) -> None:
        if not places or min(places) < 0 or not places[0] or block_size < 1:
            raise UsageError("A cache needs at least one place on its first level, and blocks of at least one token.")
        self.block_size = block_size
        self.places = tuple(places)
        self._tell = tell
        self._free = [list(range(count))[::-1] for count in places]
        self._blocks: dict[int, Block] = {}
        self._leaving: list[list[_Entry]] = [[] for _ in places]
        self._tick = 0
        tell(Created(self.places, block_size))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def free(self, level: int = 0) -> int:
        """Places of a level that hold nothing."""
        return len(self._free[level])

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """The longest run of whole blocks that these tokens begin with, from the first on. It counts as use."""
        found: list[Block] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = self._find(found[-1] if found else None, tuple(tokens[start : start + self.block_size]), salt)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._use(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Rely on blocks until they are dropped as often."""
        for block in blocks:
            self._known(block)
        for block in blocks:
            block.holders += 1

    def drop(self, blocks: Sequence[Block]) -> None:
        """Rely on them no longer. They were used until now."""
        for block in blocks:
            if not block.holders:
                raise UsageError(f"Block {block.hash:x} is dropped more often than it is held.")
            block.holders -= 1
            self._use(block)

    def store(self, parent: Block | None, tokens: Tokens, salt: str = "", priority: int = 0) -> Placed | None:
        """A block for tokens that follow `parent`, on the first level; None when everything there is relied upon.

        A block that is there already is returned as it is. `moves` come before what is written to the new place.
        """
        if len(tokens) != self.block_size:
            raise UsageError(f"A block has {self.block_size} tokens, not {len(tokens)}.")
        if parent is not None:
            self._known(parent)
            salt = parent.salt
        key = chained(parent.hash if parent else None, tokens, salt)
        known = self._blocks.get(key)
        if known is not None and known.is_one_of(parent, tokens, salt):
            self._use(known)
            return Placed(known, [], new=False)
        if known is not None:
            return None  # two different prefixes of one hash: the first one stays
        with self._relying_on(parent):
            moves = self._make_room(0)
        if moves is None:
            return None
        block = Block(key, parent, tokens, salt, 0, self._free[0].pop(), priority, self._tick)
        self._blocks[key] = block
        _count(block, +1)
        self._use(block)
        self._tell(Stored(parent.hash if parent else None, key, tokens, salt, 0, priority))
        return Placed(block, moves, new=True)

    def raise_up(self, block: Block) -> list[Move] | None:
        """Bring a block to the first level; None when there is no room for it."""
        self._known(block)
        if block.level == 0:
            return []
        with self._relying_on(block), self._relying_on(block.parent):
            moves = self._make_room(0)
        return None if moves is None else [*moves, self._move(block, 0)]

    def set_priority(self, block: Block, priority: int) -> None:
        """Blocks of lower priority go first, whenever they were used."""
        self._known(block)
        if block.priority != priority:
            old, block.priority = block.priority, priority
            self._offer(block)
            self._tell(Updated(block.hash, priority=(old, priority)))

    def clear(self) -> None:
        """Remove all blocks but those that somebody relies on, and what these follow."""
        kept: set[int] = set()
        for block in self:
            line: Block | None = block if block.holders else None
            while line is not None and line.hash not in kept:
                kept.add(line.hash)
                line = line.parent
        if kept:
            for block in reversed(list(self)):  # a block is stored after what it follows
                if block.hash not in kept:
                    self._remove(block)
            return
        self._blocks.clear()
        self._leaving = [[] for _ in self.places]
        self._free = [list(range(count))[::-1] for count in self.places]
        self._tell(Cleared())

    def _known(self, block: Block) -> None:
        if self._blocks.get(block.hash) is not block:
            raise UsageError(f"Block {block.hash:x} is not in this cache any more.", "Hold what is relied upon.")

    def _find(self, parent: Block | None, tokens: Tokens, salt: str) -> Block | None:
        block = self._blocks.get(chained(parent.hash if parent else None, tokens, salt))
        return block if block is not None and block.is_one_of(parent, tokens, salt) else None

    def _use(self, block: Block) -> None:
        self._tick += 1
        block.used = self._tick
        self._offer(block)

    @contextmanager
    def _relying_on(self, block: Block | None) -> Iterator[None]:
        """Hold a block for a moment, which is no use of it."""
        if block is None:
            yield
            return
        block.holders += 1
        yield
        block.holders -= 1
        self._offer(block)

    def _offer(self, block: Block) -> None:
        """Put a block into the line of those that may leave their level, if it is one.

        An entry of a block that was used, held or moved since is void. Whoever adds one takes up to two void ones from
        the front, and all are swept out before they are too many, so room costs the same in a large cache.
        """
        if block.may_go:
            entries = self._leaving[block.level]
            heappush(entries, (block.priority, block.used, block))
            for _ in range(2):
                if not self._holds(entries[0], block.level):
                    heappop(entries)
            if len(entries) > 2 * self.places[block.level] + 64:
                entries[:] = {entry for entry in entries if self._holds(entry, block.level)}
                heapify(entries)

    def _holds(self, entry: _Entry, level: int) -> bool:
        priority, used, block = entry
        same = block.level == level and block.priority == priority and block.used == used
        return same and block.may_go and self._blocks.get(block.hash) is block

    def _next_to_go(self, level: int, leaf: bool = False) -> Block | None:
        """The block that leaves a level first: of the lowest priority the least recently used; with `leaf`, one that
        nothing follows.
        """
        entries, passed, found = self._leaving[level], [], None
        while entries and found is None:
            if not self._holds(entries[0], level):
                heappop(entries)
            elif leaf and entries[0][2].children:
                passed.append(heappop(entries))
            else:
                found = entries[0][2]
        for entry in passed:  # few: they are passed only when the next level is full of what is relied upon
            heappush(entries, entry)
        return found

    def _make_room(self, level: int, worth: int | None = None) -> list[Move] | None:
        """At least one free place on a level; what has to be moved for it, or None if that cannot be.

        With `worth`, nothing of a higher priority is removed for it.
        """
        if self._free[level]:
            return []
        first = self._next_to_go(level)
        if first is not None and level + 1 < len(self.places):
            moves = self._make_room(level + 1, None if first.children else first.priority)
            if moves is not None:
                return [*moves, self._move(first, level + 1)]
        leaf = self._next_to_go(level, leaf=True)
        if leaf is None or (worth is not None and leaf.priority > worth):
            return None
        self._remove(leaf)
        return []

    def _move(self, block: Block, level: int) -> Move:
        source = (block.level, block.place)
        _count(block, -1)
        self._free[block.level].append(block.place)
        block.level, block.place = level, self._free[level].pop()
        _count(block, +1)
        self._offer(block)
        self._offer_parent(block)
        self._tell(Updated(block.hash, level=(source[0], level)))
        return Move(source, (block.level, block.place))

    def _remove(self, block: Block) -> None:
        _count(block, -1)
        del self._blocks[block.hash]
        self._free[block.level].append(block.place)
        self._offer_parent(block)
        self._tell(Removed(block.hash, block.level))

    def _offer_parent(self, block: Block) -> None:
        if block.parent is not None:
            self._offer(block.parent)


def _count(block: Block, change: int) -> None:
    """Tell its parent that there is a block more, or less, on this level."""
    if block.parent is not None:
        children = block.parent.children
        children[block.level] = children.get(block.level, 0) + change
        if not children[block.level]:
            del children[block.level]
