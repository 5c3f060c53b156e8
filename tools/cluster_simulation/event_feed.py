"""Feeds the KV events of simulated caches to the selection service through real event logs and publishers.

Virtual time must not pass the selection service, which applies events asynchronously. So events are collected and
handed over at fixed virtual times (`EventFeed.sync`), and the simulation waits until all of them are applied. For this
wait, every batch ends with a marker: a block whose tokens occur in no prompt. A worker has applied its batch when the
service reports the marker for it. There are two markers in turn, so that each worker always holds exactly one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING

from inlay.cluster.selector import EngineAddress, Selector
from inlay.runtime.kv.events import EventLog, RemovedEvent, StoredEvent
from inlay.serve.kv_events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from inlay.runtime.kv.events import CacheEvent

MOST_LOCAL = 300
"""Most replicas whose publishers run in this process. A publisher and its subscription need 35 file descriptors."""
_HEARTBEAT = 30.0
"""Seconds between empty batches of a publisher. No batch is lost here: all connections are local and drained."""
_EVENTS, _BATCHES = 2_000, 100
"""Events and batches that are kept of each cache. All are read at once, and thousands of logs need memory."""
_MARKER = 1 << 30
"""The first of two tokens that occur in no prompt."""
_SECONDS = 60.0
"""How long to wait for the selection service before giving up."""

Address = tuple[str, str]
"""Endpoints of the events and of the replay; the second is empty without replay."""


class Publishers:
    """An event log and a publisher for each name, in this process."""

    def __init__(self, block_size: int, *, has_replay: bool = True) -> None:
        self._block_size, self._replay = block_size, "tcp://127.0.0.1:0" if has_replay else None
        self._open: dict[str, tuple[EventLog, Publisher]] = {}

    def open(self, name: str) -> Address:
        """Start a publisher; return its addresses."""
        log = EventLog(_EVENTS)
        publisher = Publisher(log, self._block_size, replay=self._replay, heartbeat=_HEARTBEAT, most=_BATCHES)
        self._open[name] = log, publisher
        return publisher.endpoint, publisher.replay_endpoint or ""

    def add(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Add events to the logs of publishers."""
        for name, several in events.items():
            log, _ = self._open[name]
            for event in several:
                log.add(event)

    def close(self, names: Iterable[str]) -> None:
        """Stop publishers."""
        for name in list(names):
            self._open.pop(name)[1].close()

    def close_all(self) -> None:
        """Stop all publishers."""
        self.close(list(self._open))


def _serve(block_size: int, pipe: Connection) -> None:
    publishers = Publishers(block_size, has_replay=False)
    while (asked := pipe.recv()) is not None:
        method, argument = asked
        found = getattr(publishers, method)(argument)
        if method == "open":
            pipe.send(found)
    publishers.close_all()


class RemotePublishers:
    """Publishers in another process, because file descriptors of one process are limited. They have no replay."""

    def __init__(self, block_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(block_size, other), daemon=True)
        self._process.start()
        other.close()

    def open(self, name: str) -> Address:
        """Start a publisher; return its addresses."""
        self._pipe.send(("open", name))
        found: Address = self._pipe.recv()
        return found

    def add(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Add events to the logs of publishers."""
        self._pipe.send(("add", events))

    def close(self, names: Iterable[str]) -> None:
        """Stop publishers."""
        self._pipe.send(("close", list(names)))

    def close_all(self) -> None:
        """Stop all publishers and their process."""
        self._pipe.send(None)
        self._process.join(10)


class EventFeed:
    """The caches of a cluster as the selection service sees them."""

    def __init__(self, selector: Selector, block_size: int, replicas: int) -> None:
        self._selector, self._block_size = selector, block_size
        self._publishers = Publishers(block_size) if replicas <= MOST_LOCAL else RemotePublishers(block_size)
        self._workers: dict[str, EngineAddress] = {}
        self._markers: dict[str, int] = {}
        self._ids: dict[str, int] = {}

    async def open(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Start publishers of new caches, subscribe the service to them, and wait until it has their first events."""
        for name in events:
            address, replay = self._publishers.open(name)
            self._workers[name] = EngineAddress(name, address, replay, self._block_size)
            self._ids[name] = self._workers[name].id
        await self._selector.update([self._workers[name] for name in events], ())
        await self.sync(events)

    async def close(self, names: Sequence[str]) -> None:
        """Unsubscribe the service from publishers and stop them."""
        await self._selector.update((), names)
        self._publishers.close(names)
        for name in names:
            del self._workers[name], self._markers[name], self._ids[name]

    async def sync(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Publish events by name; return when the service has applied them all."""
        batches = {}
        for name, several in events.items():
            old = self._markers.get(name)
            new = self._markers[name] = 1 if old is None else 1 - old
            gone = [] if old is None else [RemovedEvent(_marker(old, self._block_size).hash, 0)]
            batches[name] = [*several, *gone, _marker(new, self._block_size)]
        self._publishers.add(batches)
        left: list[set[str]] = [{name for name in events if self._markers[name] == each} for each in (0, 1)]
        until, delay = time.monotonic() + _SECONDS, 0.001
        while any(left):
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.1)
            for each in (0, 1):
                if left[each]:
                    left[each] -= await self._holders(each, left[each])
            if any(left) and time.monotonic() > until:
                raise TimeoutError(
                    f"The selection service has not applied the events of {len(left[0] | left[1])} caches."
                )
            if delay > 0.05:
                self._repeat(left[0] | left[1])

    async def _holders(self, number: int, names: Iterable[str]) -> set[str]:
        """Return the names whose marker the service knows."""
        marker = _marker(number, self._block_size)
        found = await self._selector._service.overlap_scores({"token_ids": list(marker.tokens)})
        ids = {each["worker_id"] for each in found["workers"] if each["device_blocks"]}
        return {name for name in names if self._ids[name] in ids}

    def _repeat(self, names: Iterable[str]) -> None:
        """Send markers again: a batch from before the subscription was complete is lost without replay."""
        self._publishers.add({name: [_marker(self._markers[name], self._block_size)] for name in names})

    def stop(self) -> None:
        """Stop all publishers."""
        self._publishers.close_all()


def _marker(number: int, block_size: int) -> StoredEvent:
    return StoredEvent(None, number + 1, (_MARKER + number,) * block_size, "", 0, 0)


def new_selector(clock: Callable[[], float], predicted_seconds: float = 0.0) -> Selector:
    """Return the selector of Inlay on a virtual clock. `predicted_seconds` are real ones: the service has no clock."""
    return Selector(clock=clock, predicted_seconds=predicted_seconds)
