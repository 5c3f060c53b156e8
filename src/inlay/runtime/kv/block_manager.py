"""The KV-cache manager: which blocks are held where, who relies on them, and which goes when room is needed.

It keeps books and moves nothing: what has to be copied is returned as moves, in the order in which to do it. All places
are there from the start; their number never changes.
"""

from __future__ import annotations

from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from inlay.errors import UsageError
from inlay.runtime.kv.block import Block, Move, Tokens, hash_block
from inlay.runtime.kv.events import ClearedEvent, CreatedEvent, RemovedEvent, StoredEvent, UpdatedEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.runtime.kv.events import CacheEvent


_EvictionEntry = tuple[int, int, Block]
"""Priority, time of last use, and the block that had them: what is less goes first."""


class StoreResult(NamedTuple):
    """A block that was stored: what to copy before it is written, and whether it has to be."""

    block: Block
    moves: list[Move]
    is_new: bool


class BlockManager:
    """Blocks on one or more levels of memory.

    >>> seen = []
    >>> manager = BlockManager([2, 4], block_size=2, on_event=seen.append)
    >>> first, moves, is_new = manager.store(None, (1, 2))
    >>> [block.hash == first.hash for block in manager.lookup([1, 2, 3])]
    [True]
    >>> manager.lookup([1, 2, 3], salt="another tenant")
    []
    >>> [type(event).__name__ for event in seen]
    ['CreatedEvent', 'StoredEvent']
    """

    def __init__(
        self, capacities: Sequence[int], block_size: int, on_event: Callable[[CacheEvent], None] = lambda event: None
    ) -> None:
        if not capacities or min(capacities) < 0 or not capacities[0] or block_size < 1:
            raise UsageError("A cache needs at least one place on its first level, and blocks of at least one token.")
        self.block_size = block_size
        self.capacities = tuple(capacities)
        self._on_event = on_event
        self._free = [list(range(count))[::-1] for count in capacities]
        self._blocks: dict[int, Block] = {}
        self._eviction_queues: list[list[_EvictionEntry]] = [[] for _ in capacities]
        self._tick = 0
        on_event(CreatedEvent(self.capacities, block_size))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def free_count(self, level: int = 0) -> int:
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
            self._touch(block)
        return found

    def acquire(self, blocks: Sequence[Block]) -> None:
        """Rely on blocks until they are dropped as often."""
        for block in blocks:
            self._check_block(block)
        for block in blocks:
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Rely on them no longer. They were used until now."""
        for block in blocks:
            if not block.ref_count:
                raise UsageError(f"Block {block.hash:x} is dropped more often than it is held.")
            block.ref_count -= 1
            self._touch(block)

    def store(self, parent: Block | None, tokens: Tokens, salt: str = "", priority: int = 0) -> StoreResult | None:
        """A block for tokens that follow `parent`, on the first level; None when everything there is relied upon.

        A block that is there already is returned as it is. `moves` come before what is written to the new place.
        """
        if len(tokens) != self.block_size:
            raise UsageError(f"A block has {self.block_size} tokens, not {len(tokens)}.")
        if parent is not None:
            self._check_block(parent)
            salt = parent.salt
        key = hash_block(parent.hash if parent else None, tokens, salt)
        known = self._blocks.get(key)
        if known is not None and known.matches(parent, tokens, salt):
            self._touch(known)
            return StoreResult(known, [], is_new=False)
        if known is not None:
            return None  # two different prefixes of one hash: the first one stays
        with self._pin(parent):
            moves = self._make_room(0)
        if moves is None:
            return None
        block = Block(key, parent, tokens, salt, 0, self._free[0].pop(), priority, self._tick)
        self._blocks[key] = block
        _count(block, +1)
        self._touch(block)
        self._on_event(StoredEvent(parent.hash if parent else None, key, tokens, salt, 0, priority))
        return StoreResult(block, moves, is_new=True)

    def promote(self, block: Block) -> list[Move] | None:
        """Bring a block to the first level; None when there is no room for it."""
        self._check_block(block)
        if block.level == 0:
            return []
        with self._pin(block), self._pin(block.parent):
            moves = self._make_room(0)
        return None if moves is None else [*moves, self._move(block, 0)]

    def set_priority(self, block: Block, priority: int) -> None:
        """Blocks of lower priority go first, whenever they were used."""
        self._check_block(block)
        if block.priority != priority:
            old, block.priority = block.priority, priority
            self._queue_eviction(block)
            self._on_event(UpdatedEvent(block.hash, priority=(old, priority)))

    def clear(self) -> None:
        """Remove all blocks but those that somebody relies on, and what these follow."""
        kept: set[int] = set()
        for block in self:
            line: Block | None = block if block.ref_count else None
            while line is not None and line.hash not in kept:
                kept.add(line.hash)
                line = line.parent
        if kept:
            for block in reversed(list(self)):  # a block is stored after what it follows
                if block.hash not in kept:
                    self._remove(block)
            return
        self._blocks.clear()
        self._eviction_queues = [[] for _ in self.capacities]
        self._free = [list(range(count))[::-1] for count in self.capacities]
        self._on_event(ClearedEvent())

    def _check_block(self, block: Block) -> None:
        if self._blocks.get(block.hash) is not block:
            raise UsageError(f"Block {block.hash:x} is not in this cache any more.", "Hold what is relied upon.")

    def _find(self, parent: Block | None, tokens: Tokens, salt: str) -> Block | None:
        block = self._blocks.get(hash_block(parent.hash if parent else None, tokens, salt))
        return block if block is not None and block.matches(parent, tokens, salt) else None

    def _touch(self, block: Block) -> None:
        self._tick += 1
        block.last_used = self._tick
        self._queue_eviction(block)

    @contextmanager
    def _pin(self, block: Block | None) -> Iterator[None]:
        """Hold a block for a moment, which is no use of it."""
        if block is None:
            yield
            return
        block.ref_count += 1
        yield
        block.ref_count -= 1
        self._queue_eviction(block)

    def _queue_eviction(self, block: Block) -> None:
        """Put a block into the line of those that may leave their level, if it is one.

        An entry of a block that was used, held or moved since is void. Whoever adds one takes up to two void ones from
        the front, and all are swept out before they are too many, so room costs the same in a large cache.
        """
        if block.is_evictable:
            entries = self._eviction_queues[block.level]
            heappush(entries, (block.priority, block.last_used, block))
            for _ in range(2):
                if not self._is_valid(entries[0], block.level):
                    heappop(entries)
            if len(entries) > 2 * self.capacities[block.level] + 64:
                entries[:] = {entry for entry in entries if self._is_valid(entry, block.level)}
                heapify(entries)

    def _is_valid(self, entry: _EvictionEntry, level: int) -> bool:
        priority, used, block = entry
        same = block.level == level and block.priority == priority and block.last_used == used
        return same and block.is_evictable and self._blocks.get(block.hash) is block

    def _eviction_victim(self, level: int, leaf: bool = False) -> Block | None:
        """The block that leaves a level first: of the lowest priority the least recently used; with `leaf`, one that
        nothing follows.
        """
        entries, passed, found = self._eviction_queues[level], [], None
        while entries and found is None:
            if not self._is_valid(entries[0], level):
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
        first = self._eviction_victim(level)
        if first is not None and level + 1 < len(self.capacities):
            moves = self._make_room(level + 1, None if first.children else first.priority)
            if moves is not None:
                return [*moves, self._move(first, level + 1)]
        leaf = self._eviction_victim(level, leaf=True)
        if leaf is None or (worth is not None and leaf.priority > worth):
            return None
        self._remove(leaf)
        return []

    def _move(self, block: Block, level: int) -> Move:
        source = (block.level, block.index)
        _count(block, -1)
        self._free[block.level].append(block.index)
        block.level, block.index = level, self._free[level].pop()
        _count(block, +1)
        self._queue_eviction(block)
        self._offer_parent(block)
        self._on_event(UpdatedEvent(block.hash, level=(source[0], level)))
        return Move(source, (block.level, block.index))

    def _remove(self, block: Block) -> None:
        _count(block, -1)
        del self._blocks[block.hash]
        self._free[block.level].append(block.index)
        self._offer_parent(block)
        self._on_event(RemovedEvent(block.hash, block.level))

    def _offer_parent(self, block: Block) -> None:
        if block.parent is not None:
            self._queue_eviction(block.parent)


def _count(block: Block, change: int) -> None:
    """Tell its parent that there is a block more, or less, on this level."""
    if block.parent is not None:
        children = block.parent.children
        children[block.level] = children.get(block.level, 0) + change
        if not children[block.level]:
            del children[block.level]
