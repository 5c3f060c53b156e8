"""Sequences and the cache: a prompt begins with what is held of it; what becomes a whole block is kept for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

    from inlay.runtime.kv.blocks import Block
    from inlay.runtime.kv.manager import Manager
    from inlay.runtime.kv.memory import Memory
    from inlay.runtime.request import Answer
    from inlay.runtime.writing import Writer


class Sequence:
    """A request on its way through the engine."""

    def __init__(self, answer: Answer, writer: Writer) -> None:
        self.answer, self.writer = answer, writer
        self.slot = -1
        self.rows = 0
        """Tokens whose keys and values are in the slot."""
        self.blocks: list[Block] = []
        """Those of the cache that its rows are equal to, from the first on."""
        self.looked = self.full = False
        """Whether the cache was asked for its prompt; whether the cache had no room for its blocks."""
        self.told = answer.asked
        """When its last token came."""

    @property
    def left(self) -> int:
        """Tokens of its prompt that were not read yet."""
        return max(0, len(self.answer.request.prompt) - self.rows)


class Prefixes:
    """Moves rows between slots and blocks as the books of the cache say; without a cache it does nothing."""

    def __init__(self, cache: Manager | None, memory: Memory, counts: Counter[str], *, answers: bool) -> None:
        """`answers`: what was made for tokens of an answer is what a prompt with them would have made, to the bit."""
        self._cache, self._memory, self._counts, self._answers = cache, memory, counts, answers

    def reuse(self, sequence: Sequence) -> None:
        """Begin with what the cache holds of a prompt: all but its last token may come from there."""
        sequence.looked = True
        if self._cache is None:
            return
        request = sequence.answer.request
        sequence.blocks = self._cache.lookup(request.prompt[:-1], request.salt)
        self._cache.hold(sequence.blocks)
        for block in sequence.blocks:
            moves = self._cache.raise_up(block)
            if moves is None:
                self._counts["fallback.read_from_second_level"] += 1
            else:
                self._memory.move(moves)
            self._memory.load(sequence.slot, sequence.rows, block.level, block.place)
            sequence.rows += self._cache.block_size
        sequence.answer.cached_tokens = sequence.rows
        self._counts["cached_tokens"] += sequence.rows
        self._counts["hits" if sequence.rows else "misses"] += 1

    def keep(self, sequence: Sequence) -> None:
        """Put what has become a whole block into the cache."""
        cache, request = self._cache, sequence.answer.request
        rows = sequence.rows if self._answers else min(sequence.rows, len(request.prompt))
        while cache is not None and not sequence.full:
            start = len(sequence.blocks) * cache.block_size
            stop = start + cache.block_size
            if stop > rows:
                return
            parent = sequence.blocks[-1] if sequence.blocks else None
            placed = cache.store(parent, tuple(sequence.writer.history[start:stop]), request.salt, request.priority)
            if placed is None:
                self._counts["fallback.cache_full"] += 1
                sequence.full = True
                return
            cache.hold([placed.block])
            sequence.blocks.append(placed.block)
            if placed.new:
                self._memory.move(placed.moves)
                self._memory.save(sequence.slot, start, placed.block.place)

    def drop(self, sequence: Sequence) -> None:
        """It relies on its blocks no longer."""
        if self._cache is not None:
            self._cache.drop(sequence.blocks)
        sequence.blocks, sequence.full = [], True
