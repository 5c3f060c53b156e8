"""The KV-cache manager under random use, held against a model that is too simple to be wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from inlay.errors import UsageError
from inlay.runtime.kv.blocks import Block, chained
from inlay.runtime.kv.events import Gap, Log, Replica, Stored
from inlay.runtime.kv.manager import Manager

SIZE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=9)
SALTS = st.sampled_from(["", "a", "b"])


class Cache(RuleBasedStateMachine):
    """Sequences come, are found, held, grown, dropped; memory is simulated, so a wrong move is seen."""

    @initialize(levels=st.sampled_from([[1], [4], [3, 2], [2, 5], [4, 0], [2, 1, 3]]), kept=st.sampled_from([4, 1_000]))
    def start(self, levels: list[int], kept: int) -> None:
        self.log = Log(most=kept)
        self.manager = Manager(levels, SIZE, self.log.add)
        self.levels = levels
        self.memory: dict[tuple[int, int], Any] = {}
        self.holders: Counter[int] = Counter()
        self.held: list[list[Block]] = []
        self.snapshots = [self.log.snapshot()]

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

    @rule(tokens=TOKENS, salt=SALTS, priority=st.integers(0, 2), keep=st.booleans())
    def serve(self, tokens: list[int], salt: str, priority: int, keep: bool) -> None:
        """A request: what is known is used, brought up and held, the rest is stored."""
        known = {self._prefix(block) for block in self.manager}
        found = self.manager.lookup(tokens, salt)
        expected = 0
        while (salt, tuple(tokens[: (expected + 1) * SIZE])) in known and (expected + 1) * SIZE <= len(tokens):
            expected += 1
        assert len(found) == expected
        self.manager.hold(found)
        line = []
        for block in found:
            moves = self.manager.raise_up(block)
            if moves is None:
                break
            self._do(moves)
            assert self.memory[0, block.place] == self._prefix(block), "what lies there is what was stored"
            line.append(block)
        self.manager.drop(found[len(line) :])
        while (len(line) + 1) * SIZE <= len(tokens):
            part = tuple(tokens[len(line) * SIZE : (len(line) + 1) * SIZE])
            made = self.manager.store(line[-1] if line else None, part, salt, priority)
            if made is None:
                break
            block, moves, new = made
            self._do(moves)
            assert new or not moves
            if new:
                self.memory[block.level, block.place] = self._prefix(block)
            assert self.memory[block.level, block.place] == self._prefix(block)
            self.manager.hold([block])
            line.append(block)
        if keep:
            self.held.append(line)
            self.holders.update(block.hash for block in line)
        else:
            self.manager.drop(line)

    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        if self.held:
            line = self.held.pop(which % len(self.held))
            self.manager.drop(line)
            self.holders.subtract(block.hash for block in line)

    @rule(which=st.integers(0, 50), priority=st.integers(0, 2))
    def prioritise(self, which: int, priority: int) -> None:
        blocks = list(self.manager)
        if blocks:
            self.manager.set_priority(blocks[which % len(blocks)], priority)

    @rule()
    def clear(self) -> None:
        self.manager.clear()
        left = {block.hash for block in self.manager}
        assert {hash_ for hash_, count in self.holders.items() if count} <= left
        assert all(block.holders or block.children for block in self.manager)

    @rule()
    def look(self) -> None:
        self.snapshots = [*self.snapshots[-3:], self.log.snapshot()]

    @invariant()
    def every_place_is_free_or_used_once(self) -> None:
        if not hasattr(self, "manager"):
            return
        used = [(block.level, block.place) for block in self.manager]
        assert len(used) == len(set(used))
        for level, count in enumerate(self.levels):
            free = self.manager._free[level]
            assert sorted([*free, *(place for each, place in used if each == level)]) == list(range(count))

    @invariant()
    def who_relies_on_what(self) -> None:
        if hasattr(self, "manager"):
            held = {block.hash: block.holders for block in self.manager}
            assert {hash_: count for hash_, count in held.items() if count} == +self.holders
            assert all(block.parent is None or block.parent.hash in held for block in self.manager)

    @invariant()
    def events_rebuild_the_content(self) -> None:
        if not hasattr(self, "manager"):
            return
        content = {block.hash: (block.tokens, block.level, block.priority, block.salt) for block in self.manager}
        for snapshot in self.snapshots:
            replica = Replica(snapshot.blocks)
            try:
                events = self.log.since(snapshot.next)
            except Gap as gap:
                assert gap.first > snapshot.next
                continue
            for number, (at, event) in enumerate(events):
                assert at == snapshot.next + number
                replica.apply(event)
            rebuilt = {key: (each.tokens, each.level, each.priority, each.salt) for key, each in replica.blocks.items()}
            assert rebuilt == content


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Cache,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.fast
def test_four_thousand_operations() -> None:
    _run(80, 50)


@pytest.mark.nightly
def test_a_hundred_thousand_operations() -> None:
    _run(1_100, 100)


@pytest.mark.fast
def test_what_is_least_used_goes_first_and_leaves_before_parents() -> None:
    manager = Manager([3], 1)
    first, *_ = manager.store(None, (1,))  # type: ignore[misc]
    second, *_ = manager.store(first, (2,))  # type: ignore[misc]
    manager.store(None, (9,))
    manager.lookup([9])
    manager.store(None, (7,))
    assert [block.tokens for block in manager] == [(1,), (9,), (7,)], "the leaf of the oldest line"
    assert manager.lookup([1, 2]) == [first]
    with pytest.raises(UsageError, match="not in this cache any more"):
        manager.hold([second])


@pytest.mark.fast
def test_a_hash_that_two_have_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.runtime.kv.manager.chained", lambda parent, tokens, salt: 5)
    manager = Manager([4], 1)
    manager.store(None, (1,))
    assert manager.store(None, (2,)) is None
    assert manager.lookup([2]) == []
    assert len(manager.lookup([1])) == 1


@pytest.mark.fast
def test_hashes_are_the_same_everywhere() -> None:
    assert chained(None, [1, 2, 3]) == 360767772400219849
    assert len({chained(None, [1]), chained(None, [1], "a"), chained(None, [1, 0]), chained(1, [1])}) == 4


@pytest.mark.fast
def test_subscribers_do_not_take_from_each_other() -> None:
    log = Log(most=100)
    one, two = log.subscribe(), log.subscribe()
    for number in range(60):
        log.add(Stored(None, number, (number,), "", 0, 0))
    assert [number for number, _ in one.read()] == list(range(60))
    assert [number for number, _ in two.read(most=10)] == list(range(10))
    for number in range(60, 180):
        log.add(Stored(None, number, (number,), "", 0, 0))
    with pytest.raises(Gap, match="event 10 is gone, the oldest one kept is 80"):
        two.read()
    assert len(two.catch_up().blocks) == 180
    assert two.read() == []
    with pytest.raises(Gap):
        one.read()


@pytest.mark.fast
def test_a_loop_is_woken() -> None:
    log = Log()

    async def read() -> list[int]:
        seen: list[int] = []
        reader = log.subscribe(0)
        async for batch in reader.stream():
            seen += [number for number, _ in batch]
            if len(seen) >= 30:
                return seen
        return seen

    async def main() -> list[int]:
        task = asyncio.create_task(read())
        rng = random.Random(0)
        for number in range(30):
            log.add(Stored(None, number, (number,), "", 0, 0))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        return await asyncio.wait_for(task, 10)

    assert asyncio.run(main()) == list(range(30))
