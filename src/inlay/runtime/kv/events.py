"""KV-cache events: what the cache tells the outside world about its blocks, and a log that several may read.

Events are numbered without gaps. Every subscriber has a cursor of its own; reading takes nothing away from others. The
log keeps a bounded number of them: who asks for one that is gone is told so (`Gap`) and goes on from a snapshot, which
is the content of the cache as of a number.
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
    """A cache with so many places on each level came to be."""

    capacities: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A block is held from now on."""

    parent: int | None
    hash: int
    tokens: tuple[int, ...]
    salt: str
    level: int
    priority: int


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """A block is held no longer."""

    hash: int
    level: int


@dataclass(frozen=True, slots=True)
class UpdatedEvent:
    """A block moved to another level, or has another priority: old and new."""

    hash: int
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """No block is held any more."""


CacheEvent = CreatedEvent | StoredEvent | RemovedEvent | UpdatedEvent | ClearedEvent


class Gap(Exception):  # noqa: N818 - a state of affairs that its reader has to deal with
    """Events that were asked for are not kept any more, or are of another log: numbers begin anew with every cache."""

    def __init__(self, requested: int, first: int, upcoming: int) -> None:
        gone = f"event {requested} is gone, the oldest one kept is {first}"
        ahead = f"event {requested} is ahead of this log, whose next one is {upcoming}"
        super().__init__(gone if requested < first else ahead)
        self.requested, self.first, self.next = requested, first, upcoming


class CacheMirror:
    """The content of a cache, rebuilt from its events."""

    def __init__(self, blocks: Iterable[StoredEvent] = ()) -> None:
        self.blocks = {block.hash: block for block in blocks}

    def apply(self, event: CacheEvent) -> None:
        """What an event changes."""
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
    """The content of a cache before the event of a number."""

    next: int
    blocks: tuple[StoredEvent, ...]
    """In the order in which they came, so parents before what follows them."""


class EventLog:
    """The events of one cache. Any thread may read; the cache's own writes.

    >>> log = EventLog(most=2)
    >>> reader = log.subscribe()
    >>> for hash in (1, 2, 3):
    ...     log.add(StoredEvent(None, hash, (hash,), "", 0, 0))
    >>> reader.read()
    Traceback (most recent call last):
    ...
    inlay.runtime.kv.events.Gap: event 0 is gone, the oldest one kept is 1
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
        """The number of the event that comes next."""
        return self._next

    def add(self, event: CacheEvent) -> None:
        """One event more. Never waits for a reader."""
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
        """Events from a number on, at most so many."""
        with self._changed:
            first = self._next - len(self._ring)
            if not first <= number <= self._next:
                raise Gap(number, first, self._next)
            stop = self._next if most is None else min(self._next, number + most)
            return [(each, self._ring[each % self._most]) for each in range(number, stop)]

    def snapshot(self) -> Snapshot:
        """The content now."""
        with self._changed:
            return Snapshot(self._next, tuple(self._replica.blocks.values()))

    def wait(self, number: int, seconds: float | None = None) -> bool:
        """Until there is an event of this number, or the time is up; whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next > number, seconds)

    @contextmanager
    def listener(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake`, which must not wait, after every event, until the context ends."""
        with self._changed:
            self._wake.add(wake)
        try:
            yield
        finally:
            with self._changed:
                self._wake.discard(wake)

    def subscribe(self, start: int | None = None) -> Subscriber:
        """A reader with a cursor of its own: from now on, or from a number."""
        return Subscriber(self, self._next if start is None else start)


class Subscriber:
    """One reader of a log."""

    def __init__(self, log: EventLog, cursor: int) -> None:
        self.log, self.cursor = log, cursor

    def read(self, most: int | None = None, seconds: float = 0.0) -> list[tuple[int, CacheEvent]]:
        """What is new, numbered; waits for something so long. A gap is an error, never silence."""
        if seconds:
            self.log.wait(self.cursor, seconds)
        found = self.log.read(self.cursor, most)
        self.cursor += len(found)
        return found

    def catch_up(self) -> Snapshot:
        """Skip to now: the content of the cache, after which reading goes on."""
        snapshot = self.log.snapshot()
        self.cursor = snapshot.next
        return snapshot

    async def stream(
        self, most: int = 1_000, timeout: float | None = None
    ) -> AsyncGenerator[list[tuple[int, CacheEvent]], None]:
        """What is new, whenever something is; for an event loop. Nothing, after so many seconds with nothing new."""
        loop, new = asyncio.get_running_loop(), asyncio.Event()
        told = False

        def wake() -> None:
            nonlocal told
            if not told:  # the loop is told once, however many events there are before it looks
                told = True
                with suppress(RuntimeError):  # it was closed: nobody reads any more
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
                await asyncio.sleep(0)  # others of the loop have their turn, however much is new
