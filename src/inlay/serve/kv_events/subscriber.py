"""A subscriber to KV events over ZeroMQ that reports every gap."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from inlay.serve.kv_events.wire_format import decode_event, import_zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST = 1_000
"""The most batches returned by one `read`."""
_REPLAY_TIMEOUT_MS = 2_000
"""Milliseconds without a message after which a replay is abandoned."""


@dataclass(frozen=True)
class Batch:
    """Events that were published together."""

    number: int
    time: float
    events: tuple[dict[str, Any], ...]
    rank: int | None
    has_gap: bool = False
    """Batches before this one were lost. If it begins with a clear event, as Inlay's publisher sends, nothing is
    missing."""


class Reader:
    """A subscriber to a publisher of vLLM's wire format. It returns each batch once, in order.

    It requests a replay at the start, when a number is missing, and after a reconnect. After a reconnect the publisher
    may be a new one, which counts from 0 and may already have passed the last number.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        zmq = import_zmq()
        self._zmq, self._replay = zmq, replay
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._connections = self._in.get_monitor_socket(zmq.EVENT_CONNECTED)
        self._in.subscribe(topic)
        self._in.connect(endpoint)
        self._last: Batch | None = None
        self._connected = False
        self._is_complete = True
        """Whether all batches up to the last one were received."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._in.disable_monitor()
        self._context.destroy(linger=0)

    def read(self, seconds: float = 0.0) -> list[Batch]:
        """Return new batches; wait up to `seconds` for the first."""
        found = self._catch_up() if self._last is None else []
        until = time.monotonic() + seconds
        for _ in range(_MOST):
            if not self._in.poll(0 if found else max(0.0, until - time.monotonic()) * 1_000):
                break
            frames = self._in.recv_multipart()
            while self._connections.poll(0):
                self._connections.recv_multipart()
                self._is_complete, self._connected = self._is_complete and not self._connected, True
            if len(frames) == 3:
                found += self._take(_unpack(frames))
        return found

    def _take(self, batch: Batch) -> list[Batch]:
        """Return a received batch, after the batches that were missed before it."""
        missed = [] if self._is_complete and (self._is_duplicate(batch) or self._is_next(batch)) else self._catch_up()
        if self._is_complete and self._is_duplicate(batch):
            return missed
        gap = not (self._is_complete and self._is_next(batch))
        self._is_complete = True
        return [*missed, self._accept(batch, gap)]

    def _is_duplicate(self, batch: Batch) -> bool:
        """Whether the batch was received before. A lower number at a later time is from a restarted publisher."""
        return self._last is not None and batch.number <= self._last.number and batch.time <= self._last.time

    def _is_next(self, batch: Batch) -> bool:
        return batch.number == (0 if self._last is None else self._last.number + 1)

    def _catch_up(self) -> list[Batch]:
        """Return the batches after the last one. The last one is requested too: if it differs, the publisher is new."""
        last = self._last
        found = self._request_replay(last.number if last else 0)
        if not found:
            return []
        self._is_complete = True
        if last is not None and (found[0].number, found[0].time) == (last.number, last.time):
            return [self._accept(batch) for batch in found[1:]]
        if last is not None and found[0].number == last.number:
            found = self._request_replay(0) or found
        whole = last is None and found[0].number == 0
        return [self._accept(batch, gap=not whole and batch is found[0]) for batch in found]

    def _accept(self, batch: Batch, gap: bool = False) -> Batch:
        self._last = batch
        return replace(batch, has_gap=gap)

    def _request_replay(self, start: int) -> list[Batch]:
        """Return the batches from a number on, as far as the publisher has them."""
        found: list[Batch] = []
        if self._replay is None:
            return found
        with self._context.socket(self._zmq.DEALER) as asking:  # new socket: no late reply of an earlier request
            asking.linger = 0
            asking.connect(self._replay)
            asking.send_multipart((b"", start.to_bytes(8, "big")))
            while asking.poll(_REPLAY_TIMEOUT_MS):
                frames = asking.recv_multipart()
                if not frames[-1]:
                    break
                found.append(_unpack(frames))
        return found


def _unpack(frames: Sequence[bytes]) -> Batch:
    import msgspec

    at, events, *rank = msgspec.msgpack.decode(frames[-1])
    events = tuple(decode_event(event) for event in events)
    return Batch(int.from_bytes(frames[-2], "big"), at, events, rank[0] if rank else None)
