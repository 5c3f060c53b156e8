"""A reader of KV-cache events over ZeroMQ, which misses nothing without saying so."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from inlay.serve.kv_form import decoded, need_zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 1_000
"""The most batches that are read at once, however fast they come."""
_PATIENCE = 2_000
"""Milliseconds until a replay that says nothing more is given up."""


@dataclass(frozen=True)
class Batch:
    """Events that were published together."""

    number: int
    time: float
    events: tuple[dict[str, Any], ...]
    rank: int | None
    gap: bool = False
    """Batches before this one are lost. If it clears all first, as a publisher of Inlay does then, nothing else is."""


class Reader:
    """Reads what a publisher of vLLM's wire says: each batch once, in order.

    It asks for the past when it begins, and for what is missing when a number was left out.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        zmq = need_zmq()
        self._zmq, self._replay = zmq, replay
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(topic)
        self._in.connect(endpoint)
        self._next: int | None = None
        self._time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more."""
        self._context.destroy(linger=0)

    def read(self, seconds: float = 0.0) -> list[Batch]:
        """What is new; waits for something so long."""
        found: list[Batch] = []
        if self._next is None and self._replay is not None:
            found += self._ask(0)
        until = time.monotonic() + seconds
        for _ in range(_MOST):
            if not self._in.poll(0 if found else max(0.0, until - time.monotonic()) * 1_000):
                break
            frames = self._in.recv_multipart()
            if len(frames) == 3:
                found += self._take(_unpacked(frames))
        return found

    def _take(self, batch: Batch) -> list[Batch]:
        """What follows from a batch that came: itself, and what was missed before it."""
        if self._next is not None and batch.number < self._next:
            if batch.time <= self._time:
                return []  # a replay brought it already
            self._next = None  # a later batch of a lower number: the publisher was started again
            return self._ask(0, lost=True) or [self._accept(batch, lost=True)]
        expected = self._next or 0
        missed = self._ask(expected) if batch.number > expected else []
        if self._next is not None and batch.number < self._next:
            return missed
        return [*missed, self._accept(batch)]

    def _accept(self, batch: Batch, lost: bool = False) -> Batch:
        gap = lost or batch.number != (self._next or 0)
        self._next, self._time = batch.number + 1, batch.time
        return Batch(batch.number, batch.time, batch.events, batch.rank, gap)

    def _ask(self, start: int, lost: bool = False) -> list[Batch]:
        """Batches from a number on, as far as they can be had."""
        found: list[Batch] = []
        if self._replay is None:
            return found
        with self._context.socket(self._zmq.DEALER) as asking:  # a new one: nothing of an earlier answer comes late
            asking.linger = 0
            asking.connect(self._replay)
            asking.send_multipart((b"", start.to_bytes(8, "big")))
            while asking.poll(_PATIENCE):
                frames = asking.recv_multipart()
                if not frames[-1]:
                    break
                found.append(self._accept(_unpacked(frames), lost and not found))
        return found


def _unpacked(frames: Sequence[bytes]) -> Batch:
    import msgspec

    at, events, *rank = msgspec.msgpack.decode(frames[-1])
    events = tuple(decoded(event) for event in events)
    return Batch(int.from_bytes(frames[-2], "big"), at, events, rank[0] if rank else None)
