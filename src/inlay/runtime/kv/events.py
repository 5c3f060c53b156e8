"""KV events about the blocks of a cache, and a log with several subscribers.

Events have consecutive numbers. Each subscriber has its own cursor. The log keeps a bounded number of events. Reading
a dropped event raises `Gap`. The subscriber then continues from a snapshot: the content of the cache before the event
of a given number.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class CreatedEvent:
    """A cache was created, with this capacity in blocks on each level."""

    capacities: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A block was stored."""

    parent: int | None
    hash: int
    tokens: tuple[int, ...]
    salt: str
    level: int
    priority: int


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """A block was removed."""

    hash: int
    level: int


@dataclass(frozen=True, slots=True)
class UpdatedEvent:
    """A block moved to another level or changed its priority: (old, new)."""

    hash: int
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """All blocks were removed."""


CacheEvent = CreatedEvent | StoredEvent | RemovedEvent | UpdatedEvent | ClearedEvent


class Gap(Exception):  # noqa: N818 - a condition that every subscriber must handle
    """The requested events were dropped, or belong to another log: numbers restart with every cache."""

    def __init__(self, requested: int, first: int, upcoming: int) -> None:
        gone = f"event {requested} was dropped; the oldest event in the log is {first}"
        ahead = f"event {requested} is ahead of this log; its next event is {upcoming}"
        super().__init__(gone if requested < first else ahead)
        self.requested, self.first, self.next = requested, first, upcoming


class CacheMirror:
    """The content of a cache, rebuilt from its events."""

    def __init__(self, blocks: Iterable[StoredEvent] = ()) -> None:
        self.blocks = {block.hash: block for block in blocks}

    def apply(self, event: CacheEvent) -> None:
        """Apply an event."""
        match event:
            case StoredEvent():
                self.blocks[event.hash] = event
            case RemovedEvent():
                del self.blocks[event.hash]
            case UpdatedEvent():
                block = self.blocks[event.hash]
                level = event.level[1] if event.level else block.level
                priority = event.priority[1] if event.priority else block.priority
                self.blocks[event.hash] = replace(block, level=level, priority=priority)
            case CreatedEvent() | ClearedEvent():
                self.blocks.clear()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a cache before the event with the number `next`."""

    next: int
    blocks: tuple[StoredEvent, ...]
    """In the order in which they were stored, so parents come before their children."""


class EventLog:
    """The events of one cache. Any thread may read; only the thread of the cache writes.

    >>> log = EventLog(most=2)
    >>> reader = log.subscribe()
    >>> for hash in (1, 2, 3):
    ...     log.add(StoredEvent(None, hash, (hash,), "", 0, 0))
    >>> reader.read()
    Traceback (most recent call last):
    ...
    inlay.runtime.kv.events.Gap: event 0 was dropped; the oldest event in the log is 1
    >>> [block.hash for block in reader.catch_up().blocks], reader.read()
    ([1, 2, 3], [])
    """

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._ring: list[CacheEvent] = []
        self._next = 0
        self._replica = CacheMirror()
        self._changed = threading.Condition()
        self._wake: set[Callable[[], None]] = set()

    @property
    def next(self) -> int:
        """The number of the next event."""
        return self._next

    def add(self, event: CacheEvent) -> None:
        """Add an event. Never waits for subscribers."""
        with self._changed:
            if len(self._ring) < self._most:
                self._ring.append(event)
            else:
                self._ring[self._next % self._most] = event
            self._next += 1
            self._replica.apply(event)
            self._changed.notify_all()
            for wake in self._wake:
                wake()

    def read(self, number: int, most: int | None = None) -> list[tuple[int, CacheEvent]]:
        """Return up to `most` events from a number on."""
        with self._changed:
            first = self._next - len(self._ring)
            if not first <= number <= self._next:
                raise Gap(number, first, self._next)
            stop = self._next if most is None else min(self._next, number + most)
            return [(each, self._ring[each % self._most]) for each in range(number, stop)]

    def snapshot(self) -> Snapshot:
        """Return the current content of the cache."""
        with self._changed:
            return Snapshot(self._next, tuple(self._replica.blocks.values()))

    def wait(self, number: int, seconds: float | None = None) -> bool:
        """Wait until the event with this number exists, for at most `seconds`; return whether it does."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next > number, seconds)

    @contextmanager
    def listener(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` after every event until the context ends. It must not block."""
        with self._changed:
            self._wake.add(wake)
        try:
            yield
        finally:
            with self._changed:
                self._wake.discard(wake)

    def subscribe(self, start: int | None = None) -> Subscriber:
        """Return a subscriber with its own cursor: from the next event on, or from the number `start`."""
        return Subscriber(self, self._next if start is None else start)


class Subscriber:
    """One subscriber of a log."""

    def __init__(self, log: EventLog, cursor: int) -> None:
        self.log, self.cursor = log, cursor

    def read(self, most: int | None = None, seconds: float = 0.0) -> list[tuple[int, CacheEvent]]:
        """Return new events with their numbers; wait up to `seconds` for the first. Dropped events raise `Gap`."""
        if seconds:
            self.log.wait(self.cursor, seconds)
        found = self.log.read(self.cursor, most)
        self.cursor += len(found)
        return found

    def catch_up(self) -> Snapshot:
        """Return a snapshot and move the cursor behind it."""
        snapshot = self.log.snapshot()
        self.cursor = snapshot.next
        return snapshot

    async def stream(
        self, most: int = 1_000, timeout: float | None = None
    ) -> AsyncGenerator[list[tuple[int, CacheEvent]], None]:
        """Yield new events as they occur, for an event loop; an empty list after `timeout` seconds without events."""
        loop, new = asyncio.get_running_loop(), asyncio.Event()
        told = False

        def wake() -> None:
            nonlocal told
            if not told:  # wake the loop once for all events until it reads
                told = True
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(new.set)

        with self.log.listener(wake):
            while True:
                new.clear()
                told = False
                found = self.read(most)
                if not found:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(new.wait(), timeout)
                        continue
                yield found
                await asyncio.sleep(0)  # let other tasks of the loop run
