"""The prefix cache: prompts reuse cached blocks, and full blocks of sequences are stored for later prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.runtime.kv.block import digest_block
from inlay.runtime.prompt_lookup import Drafter

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from inlay.runtime.generation_state import GenerationState
    from inlay.runtime.kv.block import Block
    from inlay.runtime.kv.block_manager import BlockManager
    from inlay.runtime.kv.disk import BlockFiles
    from inlay.runtime.kv.memory import KVMemory
    from inlay.runtime.request import RequestHandle

READ_BYTES = 1 << 24
"""A step reads at most this much of a prefix from files, and at least one block."""


class SequenceState:
    """The state of a request in the engine."""

    def __init__(self, answer: RequestHandle, writer: GenerationState) -> None:
        self.handle, self.generation, self.drafter = answer, writer, Drafter()
        self.slot = -1
        self.computed_tokens = 0
        """Tokens whose keys and values are in the slot."""
        self.blocks: list[Block] = []
        """Cached blocks equal to its first rows, in order."""
        self.has_lookup = self.is_cache_full = False
        """Whether the lookup of its prompt is complete; whether the cache had no room for its blocks."""
        self.last_token_time = answer.arrival_time
        """Time of its last token."""

    @property
    def prefill_tokens_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, len(self.handle.request.prompt) - self.computed_tokens)


class PrefixCache:
    """Copies rows between slots and blocks, as the block manager decides. Without a block manager it does nothing."""

    def __init__(
        self,
        cache: BlockManager | None,
        memory: KVMemory,
        counts: Counter[str],
        *,
        can_store_generated: bool,
        files: BlockFiles | None = None,
    ) -> None:
        """`can_store_generated`: decode computes keys and values bitwise equal to prefill, so they may be stored."""
        self._cache, self._memory, self._counts, self._can_store_generated = cache, memory, counts, can_store_generated
        self._files = files

    def reuse(self, sequence: SequenceState) -> None:
        """Copy the cached prefix of a prompt into its slot: at most all tokens but the last.

        A long prefix is read from files in parts: until `has_lookup` is set, call it again in the next step.
        """
        if self._cache is None:
            sequence.has_lookup = True
            return
        request = sequence.handle.request
        if not sequence.blocks:
            sequence.blocks = self._cache.lookup(request.prompt[:-1], request.salt)
            self._cache.acquire(sequence.blocks)
            for block in sequence.blocks:
                moves = self._cache.promote(block)
                if moves is None:
                    self._counts["fallback.promote_failed"] += 1
                else:
                    self._memory.move(moves)
                self._load(sequence, block)
        if self._files is not None and self._read(sequence, self._files):
            return
        sequence.has_lookup = True
        sequence.handle.cached_tokens = sequence.computed_tokens
        self._counts["cached_tokens"] += sequence.computed_tokens
        self._counts["prefix_cache_hits" if sequence.computed_tokens else "prefix_cache_misses"] += 1

    def _load(self, sequence: SequenceState, block: Block) -> None:
        self._memory.load(sequence.slot, sequence.computed_tokens, block.level, block.index)
        sequence.computed_tokens += len(block.tokens)

    def _read(self, sequence: SequenceState, files: BlockFiles) -> bool:
        """Read the blocks that follow from files; return whether there may be more."""
        cache, request = self._cache, sequence.handle.request
        assert cache is not None
        for _ in range(max(1, READ_BYTES // files.block_bytes)):
            start, stop = sequence.computed_tokens, sequence.computed_tokens + cache.block_size
            if stop >= len(request.prompt):
                return False
            parent, tokens = sequence.blocks[-1] if sequence.blocks else None, request.prompt[start:stop]
            data = files.read(digest_block(parent.digest if parent else None, tokens, request.salt))
            placed = None if data is None else cache.store(parent, tokens, request.salt, request.priority)
            if data is None or placed is None:
                return False
            cache.acquire([placed.block])
            sequence.blocks.append(placed.block)
            if placed.is_new:
                self._memory.move(placed.moves)
                self._memory.unpack(placed.block.index, data)
            self._load(sequence, placed.block)
            self._counts["disk_tokens"] += cache.block_size
        return True

    def store(self, sequence: SequenceState) -> None:
        """Store the full blocks of a sequence in the cache."""
        cache, request = self._cache, sequence.handle.request
        rows = sequence.computed_tokens
        if not self._can_store_generated:
            rows = min(rows, len(request.prompt))
        while cache is not None and not sequence.is_cache_full:
            start = len(sequence.blocks) * cache.block_size
            stop = start + cache.block_size
            if stop > rows:
                return
            parent = sequence.blocks[-1] if sequence.blocks else None
            placed = cache.store(parent, tuple(sequence.generation.history[start:stop]), request.salt, request.priority)
            if placed is None:
                self._counts["fallback.cache_full"] += 1
                sequence.is_cache_full = True
                return
            cache.acquire([placed.block])
            sequence.blocks.append(placed.block)
            if placed.is_new:
                self._memory.move(placed.moves)
                self._memory.save(sequence.slot, start, placed.block.index)
                if self._files is not None:
                    self._write([placed.block], self._files)

    def _write(self, blocks: Sequence[Block], files: BlockFiles) -> None:
        for block in blocks:
            if files.wants(block.digest):
                files.write(block.digest, self._memory.pack(block.level, block.index))

    def release(self, sequence: SequenceState) -> None:
        """Release the blocks of a finished sequence."""
        if self._files is not None and sequence.blocks and self._files.is_due(sequence.blocks[-1].digest):
            self._write(sequence.blocks, self._files)
            self._files.touch([block.digest for block in sequence.blocks])
        if self._cache is not None:
            self._cache.release(sequence.blocks)
        sequence.blocks, sequence.is_cache_full = [], True
