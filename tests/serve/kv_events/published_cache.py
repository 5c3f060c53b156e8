"""A cache that is published, requests that use it, and what a router knows of it from what it was told."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog
from inlay.serve.kv_events.publisher import Publisher
from inlay.serve.kv_events.subscriber import Reader
from inlay.serve.kv_events.wire_format import MEDIA

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from inlay.serve.kv_events.subscriber import Batch

SIZE = 4

Held = dict[int, tuple[int | None, tuple[int, ...], str, str]]
"""Hash → parent, tokens, medium, salt."""


def apply(held: Held, events: Iterable[dict[str, Any]]) -> None:
    """Do what events say. One that contradicts what is known is a defect of who sent it."""
    for event in events:
        match event["type"]:
            case "AllBlocksCleared":
                held.clear()
            case "BlockRemoved":
                for hash_ in event["block_hashes"]:
                    assert held.pop(hash_)[2] == event["medium"]
            case "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                assert (event["lora_id"], event["lora_name"]) == (None, None)
                keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
                for at, (hash_, key) in enumerate(zip(event["block_hashes"], keys, strict=True)):
                    assert hash_ not in held
                    assert key is None or parent is None, "only the first block of a prompt has the salt"
                    tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                    salt = (key or [""])[0] if parent is None else held[parent][3]
                    assert event.get("cache_salt", salt) == salt
                    held[hash_] = (parent, tokens, event["medium"], salt)
                    parent = hash_
            case other:
                raise AssertionError(other)


def expected(manager: BlockManager) -> Held:
    """What a router has to know."""
    return {
        block.hash: (block.parent.hash if block.parent else None, block.tokens, MEDIA[block.level], block.salt)
        for block in manager
    }


def follow(reader: Reader, held: Held, until: Held, seconds: float = 60.0) -> list[Batch]:
    """Read until what is known is this; what was read. What is expected must not change meanwhile."""
    seen: list[Batch] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for batch in reader.read(0.1):
            apply(held, batch.events)
            seen.append(batch)
        if held == until:
            return seen
    raise AssertionError(f"{len(held)} blocks are known and {len(until)} are held, after {len(seen)} batches")


@contextmanager
def publishing(
    places: tuple[int, ...] = (20, 20), log: EventLog | None = None, **options: Any
) -> Iterator[tuple[BlockManager, Publisher]]:
    """A cache that is published: `options` are those of `Publisher`."""
    log = log or EventLog()
    manager = BlockManager(places, SIZE, log.add)
    with Publisher(log, SIZE, **{"heartbeat": 0.05, **options}) as publisher:
        yield manager, publisher


def use(
    manager: BlockManager, requests: int, seed: int = 0, salts: tuple[str, ...] = ("",), pause: float = 0.0
) -> None:
    """Requests with common beginnings, some of which are held for a while."""
    rng = random.Random(seed)
    held: list[Any] = []
    for _ in range(requests):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
        salt = rng.choice(salts)
        line = manager.lookup(tokens, salt)
        manager.acquire(line)
        while len(line) * SIZE < len(tokens):
            part = tuple(tokens[len(line) * SIZE :][:SIZE])
            placed = manager.store(line[-1] if line else None, part, salt, rng.randrange(3))
            if placed is None:
                break
            manager.acquire([placed.block])
            line.append(placed.block)
        for block in line:
            manager.promote(block)
        if line:
            manager.set_priority(line[0], rng.randrange(3))
        held.append(line)
        if len(held) > 2:
            manager.release(held.pop(0))
        if pause:
            time.sleep(pause)
    for line in held:
        manager.release(line)


def reading(publisher: Publisher) -> Reader:
    """One who reads it."""
    return Reader(publisher.endpoint, publisher.replay_endpoint)
