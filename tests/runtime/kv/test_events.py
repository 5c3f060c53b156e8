"""The log of KV-cache events: several readers, gaps that are told, snapshots."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from contextlib import aclosing
from typing import Any

import pytest

from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import (
    CacheEvent,
    CacheMirror,
    ClearedEvent,
    CreatedEvent,
    EventLog,
    Gap,
    RemovedEvent,
    StoredEvent,
    UpdatedEvent,
)

pytestmark = pytest.mark.fast


def _stored(number: int) -> StoredEvent:
    return StoredEvent(None, number, (number,), "", 0, 0)


def _fill(log: EventLog, numbers: range) -> None:
    for number in numbers:
        log.add(_stored(number))


def test_subscribers_do_not_take_from_each_other() -> None:
    log = EventLog(most=100)
    one, two = log.subscribe(), log.subscribe()
    _fill(log, range(60))
    assert one.read() == [(number, _stored(number)) for number in range(60)]
    assert two.read(most=10) == [(number, _stored(number)) for number in range(10)]
    _fill(log, range(60, 180))
    with pytest.raises(Gap, match="event 10 was dropped; the oldest event in the log is 80"):
        two.read()
    assert len(two.catch_up().blocks) == 180
    assert two.read() == []
    with pytest.raises(Gap):
        one.read()


def test_a_number_of_another_log_is_a_gap() -> None:
    log = EventLog()
    _fill(log, range(3))
    reader = log.subscribe(3)
    assert reader.read() == []
    with pytest.raises(Gap, match="event 5000 is ahead of this log; its next event is 3") as told:
        log.subscribe(5_000).read()
    assert (told.value.requested, told.value.first, told.value.next) == (5_000, 0, 3)


@pytest.mark.parametrize("most", [1, 7, 100])
def test_what_is_kept_is_what_was_added_last(most: int) -> None:
    log = EventLog(most=most)
    for number in range(50):
        log.add(_stored(number))
        first = max(0, number + 1 - most)
        assert log.read(first) == [(each, _stored(each)) for each in range(first, number + 1)]


def test_one_who_stalls_costs_nothing_and_delays_nobody() -> None:
    """Two read from threads of their own, one of which stops. The other gets all, and the log does not grow."""
    log = EventLog(most=500)
    manager = BlockManager([50, 50], 4, log.add)
    stalled, seen = log.subscribe(0), list[int]()
    ready = threading.Event()

    def follow() -> None:
        reader = log.subscribe(0)
        while len(seen) < 20_000:
            ready.set()
            seen.extend(number for number, _ in reader.read(seconds=10))

    following = threading.Thread(target=follow)
    following.start()
    ready.wait()
    assert len(stalled.read(most=1)) == 1
    rng = random.Random(0)
    while log.next < 20_000:
        manager.store(None, tuple(rng.randrange(1_000) for _ in range(4)))
        while len(seen) < log.next - 250:
            time.sleep(0.0005)  # at the pace of the one who reads
    following.join(60)
    assert seen == list(range(len(seen)))
    assert len(seen) >= 20_000
    assert len(log._ring) == 500
    with pytest.raises(Gap, match="event 1 was dropped"):
        stalled.read()
    replica = CacheMirror(stalled.catch_up().blocks)
    assert set(replica.blocks) == {block.hash for block in manager}


def test_from_any_snapshot() -> None:
    """Whatever a reader begins with, it ends with the same content."""
    log = EventLog(most=100_000)
    manager = BlockManager([20, 20], 2, log.add)
    rng = random.Random(1)
    snapshots = []
    for _ in range(2_000):
        placed = manager.store(None, (rng.randrange(60), 0), priority=rng.randrange(3))
        if placed and rng.random() < 0.3:
            manager.set_priority(placed.block, rng.randrange(3))
        if rng.random() < 0.01:
            manager.clear()
        if rng.random() < 0.02:
            snapshots.append(log.snapshot())
    kinds = {type(event) for _, event in log.read(0)}
    assert kinds == {CreatedEvent, StoredEvent, RemovedEvent, UpdatedEvent, ClearedEvent}
    for snapshot in snapshots:
        replica = CacheMirror(snapshot.blocks)
        for _, event in log.read(snapshot.next):
            replica.apply(event)
        assert list(replica.blocks.values()) == list(log.snapshot().blocks)
    assert len(snapshots) > 20


async def _numbers(log: EventLog, count: int) -> list[int]:
    seen: list[int] = []
    async with aclosing(log.subscribe(0).stream(most=7)) as stream:
        async for batch in stream:
            seen += [number for number, _ in batch]
            if len(seen) >= count:
                break
    return seen


def test_a_loop_is_woken() -> None:
    log = EventLog()

    async def main() -> list[int]:
        task = asyncio.create_task(_numbers(log, 30))
        rng = random.Random(0)
        for number in range(30):
            log.add(_stored(number))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        return await asyncio.wait_for(task, 10)

    assert asyncio.run(main()) == list(range(30))
    assert not log._wake


def test_two_loops_follow_a_thread() -> None:
    log = EventLog(most=100_000)

    async def main() -> list[list[int]]:
        tasks = [asyncio.create_task(_numbers(log, 5_000)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.to_thread(_fill, log, range(5_000))
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert asyncio.run(main()) == [list(range(5_000))] * 2


def test_a_quiet_log_is_told_of() -> None:
    log = EventLog()

    async def main() -> list[int]:
        async with aclosing(log.subscribe().stream(timeout=0.01)) as stream:
            lengths = [len(await anext(stream)), len(await anext(stream))]
            log.add(_stored(0))
            return [*lengths, len(await anext(stream))]

    assert asyncio.run(main()) == [0, 0, 1]


def test_a_loop_is_told_once_however_much_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    log, told = EventLog(), list[int]()

    async def main() -> int:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def tell(*args: Any) -> Any:
            told.append(1)
            return call(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", tell)
        async with aclosing(log.subscribe().stream()) as stream:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            _fill(log, range(100))
            return len(await waiting)

    assert asyncio.run(main()) == 100
    assert len(told) == 1


def test_a_loop_that_is_gone_does_not_hurt_the_cache() -> None:
    log = EventLog()

    async def begin() -> object:
        stream = log.subscribe().stream()
        waiting: Any = asyncio.ensure_future(anext(stream))
        waiting._log_destroy_pending = False  # it is meant to be left over
        await asyncio.sleep(0)
        return stream, waiting

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    assert log._wake
    _fill(log, range(3))
    assert log.next == 3
    assert stream


def test_a_reader_that_waits_is_woken_by_a_thread() -> None:
    log = EventLog()
    reader = log.subscribe()
    assert reader.read(seconds=0.01) == []
    adding = threading.Timer(0.05, log.add, [_stored(0)])
    adding.start()
    assert reader.read(seconds=60) == [(0, _stored(0))]
    adding.join()


def test_an_event_is_small() -> None:
    """A log of ten thousand holds little more than the tokens."""
    events: list[CacheEvent] = [
        _stored(1),
        RemovedEvent(1, 0),
        UpdatedEvent(1, level=(0, 1)),
        ClearedEvent(),
        CreatedEvent((1,), 1),
    ]
    assert all(not hasattr(event, "__dict__") for event in events)
    assert max(sys.getsizeof(event) for event in events) <= 120
