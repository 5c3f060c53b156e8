"""The KV-cache manager under random use, held against a model that is too simple to be wrong."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from inlay.runtime.kv.block import Block, hash_block
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import CacheEvent, CacheMirror, EventLog, Gap, RemovedEvent, UpdatedEvent

SIZE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=9)
SALTS = st.sampled_from(["", "a", "b"])


class Cache(RuleBasedStateMachine):
    """Sequences come, are found, held, grown, dropped; memory is simulated, so a wrong move is seen."""

    operations = 0
    """How many there were, in all runs."""
    hash = staticmethod(hash_block)

    @initialize(levels=st.sampled_from([[1], [4], [3, 2], [2, 5], [4, 0], [2, 1, 3]]), kept=st.sampled_from([4, 1_000]))
    def start(self, levels: list[int], kept: int) -> None:
        Cache.operations -= 1  # this is none
        self.kept = kept
        self.log = EventLog(most=kept)
        self.manager: Any = None
        self.manager = BlockManager(levels, SIZE, self.tell)
        self.levels = levels
        self.memory: dict[tuple[int, int], Any] = {}
        self.holders: Counter[int] = Counter()
        self.held: list[list[Block]] = []
        self.snapshots = [self.log.snapshot()]
        self.clearing = False
        self.before: dict[int, tuple[Any, ...]] = {}

    def tell(self, event: CacheEvent) -> None:
        """The event comes while the books are changed: who had to go is seen from what they were before."""
        if isinstance(event, RemovedEvent):
            block = self.before[event.hash]
            assert not block[2], "nobody relies on what is removed"
            assert not self._followers(event.hash), "nothing follows what is removed"
            if not self.clearing:
                self._was_next(event.hash, event.level, lambda hash_: not self._followers(hash_))
                self._had_to_go(event.level, block[1][0])
        if isinstance(event, UpdatedEvent) and event.level and event.level[1] > event.level[0]:
            assert not self.before[event.hash][2], "nobody relies on what is moved away"
            near = event.level[0]
            self._was_next(event.hash, near, lambda hash_: all(level > near for level in self._followers(hash_)))
        self.log.add(event)
        if self.manager is not None:
            self._note()

    def _note(self) -> None:
        """What is known of every block: level, order of going, holders, parent."""
        self.before = {
            each.hash: (
                each.level,
                (each.priority, each.last_used),
                each.ref_count,
                each.parent.hash if each.parent else None,
            )
            for each in self.manager
        }

    def _followers(self, hash_: int) -> list[int]:
        return [level for level, _, _, parent in self.before.values() if parent == hash_]

    def _was_next(self, hash_: int, level: int, may_go: Any) -> None:
        """Of all that may go from a level, none has a lower priority, or the same and was used earlier."""
        others = [each[1] for key, each in self.before.items() if each[0] == level and not each[2] and may_go(key)]
        assert self.before[hash_][1] == min(others)

    def _had_to_go(self, level: int, priority: int) -> None:
        """On the next level there was no place, and nothing that matters as little could be removed from it."""
        if level + 1 < len(self.levels):
            assert not self.manager._free[level + 1]
            there = [(key, each) for key, each in self.before.items() if each[0] == level + 1]
            assert all(each[2] or self._followers(key) or each[1][0] > priority for key, each in there)

    def _is_full(self, *relied: Block | None) -> None:
        """Nothing on the first level could be removed, or moved to a place that is free."""
        may_move = len(self.levels) > 1 and self.manager._free[1]
        for block in self.manager:
            if block.level == 0 and not block.ref_count and block not in relied:
                assert block.children, "this could be removed"
                assert not may_move or 0 in block.children, "this could be moved"

    def _do(self, moves: list[Any]) -> None:
        for move in moves:
            self.memory[move.target] = self.memory[move.source]

    @staticmethod
    def _prefix(block: Block | None) -> tuple[Any, ...]:
        whole: list[int] = []
        salt = block.salt if block else ""
        while block is not None:
            whole[:0] = block.tokens
            block = block.parent
        return salt, tuple(whole)

    @rule(tokens=TOKENS, salt=SALTS, priority=st.integers(0, 2), keep=st.sampled_from(["", "last", "all"]))
    def serve(self, tokens: list[int], salt: str, priority: int, keep: str) -> None:
        """A request: what is known is used, brought up and held, the rest is stored."""
        known = {self._prefix(block) for block in self.manager}
        found = self.manager.lookup(tokens, salt)
        expected = 0
        while (salt, tuple(tokens[: (expected + 1) * SIZE])) in known and (expected + 1) * SIZE <= len(tokens):
            expected += 1
        assert [self._prefix(block) for block in found] == [
            (salt, tuple(tokens[: (each + 1) * SIZE])) for each in range(expected)
        ], "all that is there is found, and nothing else"
        self.manager.acquire(found)
        line = []
        for block in found:
            self._note()
            moves = self.manager.promote(block)
            if moves is None:
                self._is_full(block, block.parent)
                break
            self._do(moves)
            assert self.memory[0, block.index] == self._prefix(block), "what lies there is what was stored"
            line.append(block)
        self.manager.release(found[len(line) :])
        while (len(line) + 1) * SIZE <= len(tokens):
            part = tuple(tokens[len(line) * SIZE : (len(line) + 1) * SIZE])
            self._note()
            made = self.manager.store(line[-1] if line else None, part, salt, priority)
            if made is None:
                key = self.hash(line[-1].hash if line else None, part, salt)
                if key not in self.before:  # another block has this hash
                    self._is_full(line[-1] if line else None)
                break
            block, moves, new = made
            assert self._prefix(block) == (salt, tuple(tokens[: (len(line) + 1) * SIZE]))
            self._do(moves)
            if new:
                assert block.level == 0
                self.memory[0, block.index] = self._prefix(block)
            elif block.level:
                break
            self.manager.acquire([block])
            line.append(block)
        kept = {"": [], "last": line[-1:], "all": line}[keep]
        self.manager.release(line[: len(line) - len(kept)])
        self.held.append(kept)
        self.holders.update(block.hash for block in kept)

    @rule(tokens=TOKENS, salt=SALTS)
    def ask(self, tokens: list[int], salt: str) -> None:
        """A question, without relying on the answer."""
        self.manager.lookup(tokens, salt)

    @rule(which=st.integers(0, 50))
    def bring(self, which: int) -> None:
        """A block is raised that nobody relies on."""
        block = self._any(which)
        if block is not None:
            self._note_relied(block, block.parent)
            moves = self.manager.promote(block)
            if moves is None:
                self._is_full(block, block.parent)
            else:
                self._do(moves)
                assert block.level == 0

    @rule(which=st.integers(0, 50), tokens=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def grow(self, which: int, tokens: tuple[int, int]) -> None:
        """Something is stored that follows a block which nobody relies on, wherever it lies."""
        parent = self._any(which)
        if parent is not None:
            self._note_relied(parent)
            made = self.manager.store(parent, tokens)
            if made is None and self.hash(parent.hash, tokens, parent.salt) not in self.before:
                self._is_full(parent)
            elif made is not None:
                self._do(made.moves)
                if made.is_new:
                    self.memory[0, made.block.index] = self._prefix(made.block)

    def _any(self, which: int) -> Block | None:
        """One of the blocks."""
        blocks = list(self.manager)
        return blocks[which % len(blocks)] if blocks else None

    def _note_relied(self, *relied: Block | None) -> None:
        """What is known of every block, while these are relied upon for a moment."""
        self._note()
        for block in relied:
            if block is not None:
                level, order, holders, parent = self.before[block.hash]
                self.before[block.hash] = (level, order, holders + 1, parent)

    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        if self.held:
            line = self.held.pop(which % len(self.held))
            self.manager.release(line)
            self.holders.subtract(block.hash for block in line)

    @rule(which=st.integers(0, 50), priority=st.integers(0, 2))
    def prioritise(self, which: int, priority: int) -> None:
        blocks = list(self.manager)
        if blocks:
            self.manager.set_priority(blocks[which % len(blocks)], priority)

    @rule()
    def clear(self) -> None:
        self._note()
        relied, lines = set(), [block for line in self.held for block in line]
        while lines:
            block = lines.pop()
            relied.add(block.hash)
            lines += [block.parent] if block.parent else []
        self.clearing = True
        self.manager.clear()
        self.clearing = False
        assert {block.hash for block in self.manager} == relied, "what is held, and what it follows"
        assert relied or not any(self.manager._eviction_queues)

    @rule()
    def look(self) -> None:
        self.snapshots = [*self.snapshots[-3:], self.log.snapshot()]

    @invariant()
    def count(self) -> None:
        Cache.operations += 1

    @invariant()
    def every_place_is_free_or_used_once(self) -> None:
        used = [(block.level, block.index) for block in self.manager]
        assert len(used) == len(set(used))
        for level, count in enumerate(self.levels):
            free = self.manager._free[level]
            assert sorted([*free, *(place for each, place in used if each == level)]) == list(range(count))
            assert len(self.manager._eviction_queues[level]) <= 2 * count + 64, "entries that are void are swept out"

    @invariant()
    def what_lies_where_is_what_was_stored(self) -> None:
        for block in self.manager:
            assert self.memory[block.level, block.index] == self._prefix(block)

    @invariant()
    def who_relies_on_what(self) -> None:
        held = {block.hash: block.ref_count for block in self.manager}
        assert {hash_: count for hash_, count in held.items() if count} == +self.holders
        followers = Counter((block.parent.hash, block.level) for block in self.manager if block.parent)
        assert followers == {
            (block.hash, level): count for block in self.manager for level, count in block.children.items()
        }
        assert all(block.parent is None or block.parent.hash in held for block in self.manager)

    @invariant()
    def events_rebuild_the_content(self) -> None:
        content = {
            block.hash: (block.parent and block.parent.hash, block.tokens, block.level, block.priority, block.salt)
            for block in self.manager
        }
        for snapshot in [*self.snapshots, self.log.snapshot()]:
            replica = CacheMirror(snapshot.blocks)
            if snapshot.next + self.kept < self.log.next:
                with pytest.raises(Gap, match="was dropped"):
                    self.log.read(snapshot.next)
                continue
            events = self.log.read(snapshot.next)
            assert len(events) == self.log.next - snapshot.next
            for number, (at, event) in enumerate(events):
                assert at == snapshot.next + number
                replica.apply(event)
            rebuilt = {
                key: (each.parent, each.tokens, each.level, each.priority, each.salt)
                for key, each in replica.blocks.items()
            }
            assert rebuilt == content
            before = list(replica.blocks)
            parents = [(at, each.parent) for at, each in enumerate(replica.blocks.values()) if each.parent is not None]
            assert all(before.index(parent) < at for at, parent in parents), "parents before what follows them"


def _run(examples: int, steps: int) -> int:
    """How many operations there were, of which hypothesis decides within these bounds."""
    Cache.operations = 0
    run_state_machine_as_test(
        Cache,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    return Cache.operations


@pytest.mark.fast
def test_thousands_of_operations() -> None:
    assert _run(60, 50) >= 2_000


@pytest.mark.fast
def test_thousands_of_operations_with_hashes_that_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six hashes for all blocks: what is found has to be compared."""

    def poor(parent: int | None, tokens: tuple[int, ...], salt: str) -> int:
        return tokens[0] + 3 * (parent is None)

    monkeypatch.setattr("inlay.runtime.kv.block_manager.hash_block", poor)
    monkeypatch.setattr(Cache, "hash", staticmethod(poor))
    assert _run(60, 50) >= 2_000


@pytest.mark.nightly
def test_a_hundred_thousand_operations(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    operations = _run(1_500, 100)
    with capsys.disabled():
        print(f"\n{operations:,} operations in {time.perf_counter() - began:.0f} s")
    assert operations >= 100_000
