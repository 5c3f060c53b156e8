"""The block manager of the prefix cache: locations, reference counts and eviction of blocks.

It does bookkeeping only. Copies are returned as moves, in the order in which the caller must do them. The capacity is
fixed at creation.
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
"""Priority and time of last use when the entry was made, and the block. The smallest entry is evicted first."""


class StoreResult(NamedTuple):
    """A stored block, the moves to do before it is written, and whether it is new and must be written."""

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
            raise UsageError(
                "A cache needs a capacity of at least one block on its first level, and blocks of at least one token."
            )
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

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """Return the longest cached prefix of these tokens, in whole blocks. A lookup counts as a use."""
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
        """Increment the reference counts of blocks."""
        for block in blocks:
            self._check_block(block)
        for block in blocks:
            block.ref_count += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Decrement the reference counts of blocks. A release counts as a use."""
        for block in blocks:
            if not block.ref_count:
                raise UsageError(f"Block {block.hash:x} is released more often than it was acquired.")
            block.ref_count -= 1
            self._touch(block)

    def store(self, parent: Block | None, tokens: Tokens, salt: str = "", priority: int = 0) -> StoreResult | None:
        """Return a block on the first level for tokens that follow `parent`; None if no block there can be evicted.

        A block that is already stored is returned unchanged. Do the `moves` before writing the new block.
        """
        if len(tokens) != self.block_size:
            raise UsageError(f"A block must have {self.block_size} tokens, but has {len(tokens)}.")
        if parent is not None:
            self._check_block(parent)
            salt = parent.salt
        key = hash_block(parent.hash if parent else None, tokens, salt)
        known = self._blocks.get(key)
        if known is not None and known.matches(parent, tokens, salt):
            self._touch(known)
            return StoreResult(known, [], is_new=False)
        if known is not None:
            return None  # hash collision of two prefixes: keep the first
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
        """Move a block to the first level; return the moves, or None if there is no room."""
        self._check_block(block)
        if block.level == 0:
            return []
        with self._pin(block), self._pin(block.parent):
            moves = self._make_room(0)
        return None if moves is None else [*moves, self._move(block, 0)]

    def set_priority(self, block: Block, priority: int) -> None:
        """Set the priority of a block. Lower priorities are evicted first, regardless of their last use."""
        self._check_block(block)
        if block.priority != priority:
            old, block.priority = block.priority, priority
            self._queue_eviction(block)
            self._on_event(UpdatedEvent(block.hash, priority=(old, priority)))

    def clear(self) -> None:
        """Remove all blocks except those in use and their ancestors."""
        kept: set[int] = set()
        for block in self:
            line: Block | None = block if block.ref_count else None
            while line is not None and line.hash not in kept:
                kept.add(line.hash)
                line = line.parent
        if kept:
            for block in reversed(list(self)):  # children are stored after their parents
                if block.hash not in kept:
                    self._remove(block)
            return
        self._blocks.clear()
        self._eviction_queues = [[] for _ in self.capacities]
        self._free = [list(range(count))[::-1] for count in self.capacities]
        self._on_event(ClearedEvent())

    def _check_block(self, block: Block) -> None:
        if self._blocks.get(block.hash) is not block:
            raise UsageError(
                f"Block {block.hash:x} is no longer in this cache.", "Acquire blocks while they are in use."
            )

    def _find(self, parent: Block | None, tokens: Tokens, salt: str) -> Block | None:
        block = self._blocks.get(hash_block(parent.hash if parent else None, tokens, salt))
        return block if block is not None and block.matches(parent, tokens, salt) else None

    def _touch(self, block: Block) -> None:
        self._tick += 1
        block.last_used = self._tick
        self._queue_eviction(block)

    @contextmanager
    def _pin(self, block: Block | None) -> Iterator[None]:
        """Protect a block from eviction temporarily, without counting a use."""
        if block is None:
            yield
            return
        block.ref_count += 1
        yield
        block.ref_count -= 1
        self._queue_eviction(block)

    def _queue_eviction(self, block: Block) -> None:
        """Add a block to the eviction queue of its level, if it is evictable.

        Entries become stale when their block is used, acquired or moved. Each addition removes up to two stale entries
        from the front, and a large queue is rebuilt, so the cost does not depend on the size of the cache.
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
        """Return the eviction victim of a level: of the lowest priority, the least recently used. With `leaf`, only
        blocks without children are considered.
        """
        entries, passed, found = self._eviction_queues[level], [], None
        while entries and found is None:
            if not self._is_valid(entries[0], level):
                heappop(entries)
            elif leaf and entries[0][2].children:
                passed.append(heappop(entries))
            else:
                found = entries[0][2]
        for entry in passed:  # few: only when the next level is full of blocks in use
            heappush(entries, entry)
        return found

    def _make_room(self, level: int, worth: int | None = None) -> list[Move] | None:
        """Free at least one location on a level; return the moves, or None if that is impossible.

        With `worth`, no block of a higher priority is removed.
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
    """Update the child count of a block's parent for the block's level."""
    if block.parent is not None:
        children = block.parent.children
        children[block.level] = children.get(block.level, 0) + change
        if not children[block.level]:
            del children[block.level]
