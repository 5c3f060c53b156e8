"""KV-cache events as JSON lines: the form of TensorRT-LLM, snapshots, gaps, heartbeats."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import (
    CacheMirror,
    ClearedEvent,
    CreatedEvent,
    EventLog,
    RemovedEvent,
    StoredEvent,
    UpdatedEvent,
)
from inlay.serve.kv_events.json_feed import _stream_until_closed, event_json, lines, snapshot_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inlay.runtime.kv.events import CacheEvent

pytestmark = pytest.mark.fast


def _token(number: int) -> dict[str, Any]:
    return {"type": "unique_token", "token_id": number, "token_extra_id": 0}


def _change(old: int, new: int) -> dict[str, Any]:
    return {"type": "event_diff", "old_value": old, "new_value": new}


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (CreatedEvent((4, 8), 2), {"type": "created", "num_blocks_per_cache_level": [4, 8], "block_size": 2}),
        (
            StoredEvent(5, 7, (1, 2), "", 1, 3),
            {
                "type": "stored",
                "parent_hash": 5,
                "blocks": [
                    {
                        "type": "stored_block",
                        "block_hash": 7,
                        "tokens": [_token(1), _token(2)],
                        "cache_level": 1,
                        "priority": 3,
                    }
                ],
            },
        ),
        (RemovedEvent(7, 1), {"type": "removed", "block_hashes": [7], "cache_level": 1}),
        (
            UpdatedEvent(7, level=(0, 1)),
            {"type": "updated", "block_hash": 7, "cache_level": _change(0, 1), "priority": None},
        ),
        (
            UpdatedEvent(7, priority=(3, 9)),
            {"type": "updated", "block_hash": 7, "cache_level": None, "priority": _change(3, 9)},
        ),
    ],
)
def test_the_form_is_that_of_tensorrt_llm(event: CacheEvent, data: dict[str, Any]) -> None:
    assert event_json(3, event) == {"event_id": 3, "data": data, "window_size": 0}


def _replayed(held: dict[int, dict[str, Any]], line: dict[str, Any]) -> None:
    """What a reader makes of a line."""
    data = line.get("data", line)
    match data["type"]:
        case "snapshot":
            held.clear()
            held.update({block["block_hash"]: block for block in data["blocks"]})
        case "created" | "cleared":
            held.clear()
        case "stored":
            (block,) = data["blocks"]
            held[block["block_hash"]] = {"parent_hash": data["parent_hash"]} | block
        case "removed":
            for hash_ in data["block_hashes"]:
                assert held.pop(hash_)["cache_level"] == data["cache_level"]
        case "updated":
            for name in ("cache_level", "priority"):
                if data[name] is not None:
                    assert held[data["block_hash"]][name] == data[name]["old_value"]
                    held[data["block_hash"]][name] = data[name]["new_value"]
        case other:
            assert other in ("gap", "heartbeat")


def _use(manager: BlockManager, numbers: range) -> None:
    for number in numbers:
        placed = manager.store(None, (number, 0), salt="mine" if number % 3 == 0 else "", priority=number % 2)
        assert placed is not None
        manager.set_priority(placed.block, number % 5)


def _read(log: EventLog, start: int | None, enough: Callable[[list[Any]], bool], heartbeat: float = 30.0) -> list[Any]:
    async def read() -> list[Any]:
        seen: list[Any] = []
        async with aclosing(lines(log, start, heartbeat)) as stream:
            async for some in stream:
                assert some.endswith(b"\n")
                seen += [json.loads(line) for line in some.splitlines()]
                if enough(seen):
                    break
        return seen

    return asyncio.run(asyncio.wait_for(read(), 30))


def test_from_a_number_on() -> None:
    log = EventLog()
    _use(BlockManager([4, 4], 2, log.add), range(50))
    seen = _read(log, 0, lambda seen: len(seen) == log.next)
    assert seen == [event_json(number, event) for number, event in log.read(0)]
    first, *_ = _read(log, 7, lambda seen: len(seen) == log.next - 7)
    assert first["event_id"] == 7
    assert not log._wake


def test_without_a_number_a_snapshot_comes_first_and_what_follows_fits() -> None:
    log = EventLog()
    manager = BlockManager([4, 4], 2, log.add)
    _use(manager, range(30))
    held: dict[int, dict[str, Any]] = {}

    async def main() -> None:
        async with aclosing(lines(log, None, 30.0)) as stream:
            snapshot = json.loads(await anext(stream))
            assert snapshot == snapshot_json(log)
            assert any("cache_salt" in block for block in snapshot["blocks"])
            assert any("cache_salt" not in block for block in snapshot["blocks"])
            _replayed(held, snapshot)
            end = log.next
            _use(manager, range(30, 200))
            while end < log.next:
                for line in (await anext(stream)).splitlines():
                    assert json.loads(line)["event_id"] == end
                    _replayed(held, json.loads(line))
                    end += 1

    asyncio.run(asyncio.wait_for(main(), 30))
    assert list(held.values()) == snapshot_json(log)["blocks"]
    replica = CacheMirror(log.snapshot().blocks)
    assert {hash_: block["cache_level"] for hash_, block in held.items()} == {
        hash_: block.level for hash_, block in replica.blocks.items()
    }


@pytest.mark.parametrize("asked", [3, 5_000])
def test_what_is_not_kept_is_a_gap_and_then_a_snapshot(asked: int) -> None:
    log = EventLog(most=10)
    manager = BlockManager([4], 2, log.add)
    _use(manager, range(50))
    after = log.next
    expected = [
        {"type": "gap", "asked": asked, "first": after - 10, "next_event_id": after},
        snapshot_json(log),
        event_json(after, ClearedEvent()),
    ]

    def enough(seen: list[Any]) -> bool:
        if len(seen) == 2:
            manager.clear()
        return len(seen) == 3

    assert _read(log, asked, enough) == expected


@pytest.mark.parametrize("start", [None, 3])
def test_what_happens_while_a_snapshot_is_taken_follows_it(start: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(most=10)
    manager = BlockManager([4], 2, log.add)
    _use(manager, range(50))
    after = log.next

    def slowly(log: EventLog) -> dict[str, Any]:
        made = snapshot_json(log)
        manager.clear()
        return made

    monkeypatch.setattr("inlay.serve.kv_events.json_feed.snapshot_json", slowly)
    *_, snapshot, event = _read(log, start, lambda seen: "event_id" in seen[-1])
    assert snapshot["next_event_id"] == after
    assert event == event_json(after, ClearedEvent())


def test_one_who_lags_is_told_and_catches_up() -> None:
    log = EventLog(most=20)
    manager = BlockManager([4, 4], 2, log.add)
    held: dict[int, dict[str, Any]] = {}
    kinds = []

    async def main() -> None:
        async with aclosing(lines(log, None, 30.0)) as stream:
            for _ in range(3):
                _use(manager, range(log.next, log.next + 100))
                while not held or list(held.values()) != snapshot_json(log)["blocks"]:
                    for line in (await anext(stream)).splitlines():
                        kinds.append(json.loads(line).get("type", "event"))
                        _replayed(held, json.loads(line))
                _use(manager, range(log.next, log.next + 3))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert kinds[:3] == ["snapshot", "gap", "snapshot"]
    assert kinds.count("gap") >= 2
    assert all(after == "snapshot" for kind, after in pairwise(kinds) if kind == "gap")


def test_when_all_is_quiet() -> None:
    log = EventLog()
    _use(BlockManager([4], 2, log.add), range(1))
    snapshot, *beats = _read(log, None, lambda seen: len(seen) == 3, heartbeat=0.01)
    assert snapshot["type"] == "snapshot"
    assert beats == [{"type": "heartbeat", "next_event_id": log.next}] * 2


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "sending"])
def test_a_client_that_leaves(is_waiting: bool) -> None:
    """The web framework cancels what writes the answer, and every wait after that again."""
    ended = []

    async def feed() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.sleep(60)
        finally:
            if is_waiting:
                await asyncio.sleep(0.01)  # what it reads from takes a while to end
            ended.append(True)

    async def run() -> None:
        started = asyncio.Event()

        async def write() -> None:
            async for _ in _stream_until_closed(asyncio.Event(), feed()):
                started.set()
                if not is_waiting:
                    await asyncio.sleep(60)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            await started.wait()
            await asyncio.sleep(0.01)
            group.cancel_scope.cancel()
        await asyncio.get_running_loop().shutdown_asyncgens()
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert ended == [True]
