"""Publishes KV events to routers over ZeroMQ, and replays batches that a subscriber missed.

A batch has three frames: topic, number (eight bytes) and payload (`kv_events.wire_format`). Numbers begin at 0 and are
consecutive, so a subscriber detects a lost batch at the next one. Recent batches are kept and replayed on request, on
another socket. The request is `["", first number]`; the reply is `["", topic, number, payload]` for each batch, then
an empty payload with number −1. vLLM has this format since July 2026; before, it left out the topic.

Two additions are compatible with subscribers of vLLM's wire. A request for a batch that was dropped is answered with a
single batch: it has the number of the last batch, clears all blocks and stores the current ones. An empty batch is sent
after a time without events, because the loss of the last batch would otherwise stay undetected until the next event.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from inlay.errors import UsageError, one_line
from inlay.runtime.kv.events import Gap
from inlay.serve.kv_events.encoding import WireEncoder
from inlay.serve.kv_events.wire_format import END_OF_REPLAY, encode_events, import_zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.kv.events import EventLog

_COLLECT = 0.002
"""Seconds between an event and its batch, so that the events of one engine step share a batch."""
_EVENTS = 1_000
"""The most events in one batch, in log form or in wire form."""
_BYTES = 64 << 20
"""The most bytes of batches that are kept for replay."""
_WAITING = 1_000
"""The most batches queued for a slow subscriber. It gets later ones by replay."""
_LINGER = 100
"""Milliseconds for sending the last batches when the publisher is closed."""


class Publisher:
    """Publishes the events of one cache from its own thread, until it is closed.

    With port 0 or *, the system chooses the port; see `endpoint` and `replay_endpoint`. There is no authentication, and
    tokens are readable: bind to an address that only routers can reach. `rank` distinguishes the ranks of a worker.
    """

    def __init__(
        self,
        log: EventLog,
        block_size: int,
        *,
        bind: str = "tcp://127.0.0.1:0",
        replay: str | None = "tcp://127.0.0.1:0",
        topic: str = "",
        encoding: str = "map",
        rank: int = 0,
        heartbeat: float = 1.0,
        most: int = 10_000,
    ) -> None:
        """`heartbeat`: seconds without events before an empty batch. `most`: batches that are kept for replay."""
        encode_events([], encoding)
        self._log, self._encoding, self._rank, self._heartbeat = log, encoding, rank, heartbeat
        self._topic, self._most = topic.encode(), most
        self._encoder = WireEncoder(block_size)
        self._replay_buffer: deque[tuple[int, bytes]] = deque()
        self._bytes = self._next = 0
        self._time = self._due = 0.0
        self._closing = self._is_woken = False
        self._counts = {"batches": 0, "events": 0, "gaps": 0, "replays": 0}
        zmq = import_zmq()
        self._context = zmq.Context()
        try:
            self._out = _bind(self._context.socket(zmq.PUB), bind, min(most, _WAITING))
            self._replay_socket = None if replay is None else _bind(self._context.socket(zmq.ROUTER), replay, most + 16)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(f"Cannot bind {bind} and {replay}: {one_line(error)}.", "Choose another port.") from error
        self.endpoint: str = self._out.last_endpoint.decode()
        self.replay_endpoint: str | None = (
            None if self._replay_socket is None else self._replay_socket.last_endpoint.decode()
        )
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, int]:
        """Counts of batches, log events, gaps (events dropped before being read) and replays."""
        return dict(self._counts)

    def close(self) -> None:
        """Publish the remaining events and stop the thread. May be called more than once."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
            self._wake_writer.close()
            self._wake_reader.close()

    def _wake(self) -> None:
        """Wake the publisher thread. The thread that adds to the log calls this; it sends one byte and never blocks."""
        if not self._is_woken:
            self._is_woken = True
            self._wake_writer.send(b"!")

    def _run(self) -> None:
        zmq = import_zmq()
        poller = zmq.Poller()
        for each in (self._wake_reader, self._replay_socket):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        try:
            with self._log.listener(self._wake):
                self._reader = self._log.subscribe()
                self._publish_snapshot()
                while not self._closing:
                    self._poll_once(poller)
                while self._publish_new():
                    pass
        finally:
            self._context.destroy(linger=_LINGER)

    def _poll_once(self, poller: Any) -> None:
        more = self._log.next > self._reader.cursor
        ready = dict(poller.poll(0 if more else max(0.0, self._due - time.monotonic()) * 1_000))
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(1)
            if not self._closing:
                time.sleep(_COLLECT)
            self._is_woken = False
        if self._replay_socket in ready:
            self._replay()
        if not self._publish_new() and time.monotonic() >= self._due:
            self._publish([])

    def _publish_new(self) -> bool:
        """Publish a batch of new log events; return whether there were any."""
        try:
            found = self._reader.read(_EVENTS)
        except Gap:
            self._counts["gaps"] += 1
            self._publish_snapshot()
            return True
        if not found:
            return False
        told = self._encoder.encode(event for _, event in found)
        if told:
            self._publish(told)
        self._counts["events"] += len(found)
        return True

    def _publish_snapshot(self) -> None:
        """Publish a clear event and all stored blocks, so a subscriber needs no earlier batch."""
        told = self._encoder.encode_snapshot(self._reader.catch_up().blocks)
        for start in range(0, len(told), _EVENTS):
            self._publish(told[start : start + _EVENTS])

    def _publish(self, told: Sequence[dict[str, Any]]) -> None:
        self._time = max(self._time, time.time())  # subscribers take an earlier time for a duplicate
        self._due = time.monotonic() + self._heartbeat
        payload = self._pack(told)
        self._keep(payload)
        self._out.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1
        self._counts["batches"] += 1

    def _keep(self, payload: bytes) -> None:
        self._replay_buffer.append((self._next, payload))
        self._bytes += len(payload)
        while len(self._replay_buffer) > self._most or (self._bytes > _BYTES and len(self._replay_buffer) > 1):
            self._bytes -= len(self._replay_buffer.popleft()[1])

    def _pack(self, told: Sequence[dict[str, Any]]) -> bytes:
        import msgspec

        return msgspec.msgpack.encode([self._time, encode_events(told, self._encoding), self._rank])

    def _replay(self) -> None:
        """Answer one replay request."""
        assert self._replay_socket is not None
        asker, *request = self._replay_socket.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return  # malformed request
        self._counts["replays"] += 1
        start = int.from_bytes(request[1], "big")
        kept = [each for each in self._replay_buffer if each[0] >= start]
        if not self._replay_buffer[0][0] <= start <= self._next:
            kept = [(self._next - 1, self._pack(self._encoder.encode_snapshot()))]
        for number, payload in kept:
            self._replay_socket.send_multipart((asker, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._replay_socket.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))


def _bind(made: Any, endpoint: str, most: int) -> Any:
    """Bind a socket that queues at most `most` messages for each subscriber and drops more."""
    made.sndhwm = most
    made.bind(endpoint)
    return made
