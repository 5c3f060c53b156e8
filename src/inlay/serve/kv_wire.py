"""KV-cache events over ZeroMQ, for routers: published as they come, and again to those who missed some.

A batch is three frames: topic, number as eight bytes, and a payload (`inlay.serve.kv_form`). Numbers begin at 0 and
have no holes, so whoever misses one sees it at the next. What was published lately is kept, and sent again on request,
on another socket: `["", first number]` is answered with `["", topic, number, payload]` for each batch, and number −1
with nothing in it at the end, which is what vLLM does since July 2026. Before that it left out the topic.

Two things are added that no reader of vLLM's wire stumbles over. A batch that is asked for and not kept any more is
answered with a single one instead: it has the number of the last one, clears all and stores all that is held. And an
empty batch goes out when nothing happened for a while: the loss of the last batch before a quiet time would not be
noticed otherwise.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from inlay.errors import UsageError, one_line
from inlay.runtime.kv.events import Gap
from inlay.serve.kv_form import LAST, encoded, need_zmq
from inlay.serve.kv_told import Told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.kv.events import Log

_COLLECT = 0.002
"""Seconds between the first event and the batch that holds it: those of one step of the engine travel together."""
_EVENTS = 1_000
"""The most events of the log, or of the wire, in one batch."""
_BYTES = 64 << 20
"""The most bytes of batches that are kept, however few they are."""
_WAITING = 1_000
"""The most batches that wait for a reader who is slow. Of others it is told when it asks."""
_LINGER = 100
"""Milliseconds that the last batch has to leave when the publisher is closed."""


class Publisher:
    """Publishes the events of one cache, in a thread of its own, until it is closed.

    A port of 0 or * is chosen by the system: `endpoint` and `replay_endpoint` say which. There is no authentication,
    and tokens are readable: bind to an address that only routers can reach. `rank` tells the parts of a worker apart.
    """

    def __init__(
        self,
        log: Log,
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
        """`heartbeat`: seconds of quiet before an empty batch. `most`: batches that are kept for who missed them."""
        encoded([], encoding)
        self._log, self._encoding, self._rank, self._heartbeat = log, encoding, rank, heartbeat
        self._topic, self._most = topic.encode(), most
        self._told = Told(block_size)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = self._next = 0
        self._time = self._due = 0.0
        self._closing = self._rung = False
        self._counts = {"batches": 0, "events": 0, "gaps": 0, "replays": 0}
        zmq = need_zmq()
        self._context = zmq.Context()
        try:
            self._out = _bound(self._context.socket(zmq.PUB), bind, min(most, _WAITING))
            self._again = None if replay is None else _bound(self._context.socket(zmq.ROUTER), replay, most + 16)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UsageError(f"Cannot bind {bind} and {replay}: {one_line(error)}.", "Choose another port.") from error
        self.endpoint: str = self._out.last_endpoint.decode()
        self.replay_endpoint: str | None = None if self._again is None else self._again.last_endpoint.decode()
        self._bell, self._heard = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> dict[str, int]:
        """What happened so far: batches, events of the log, gaps (the log was faster than this), replays, withheld."""
        return {**self._counts, "withheld": self._told.withheld}

    def close(self) -> None:
        """Publish what there is, and end. May be called more than once."""
        self._closing = True
        if self._thread.is_alive():
            self._ring()
            self._thread.join()
            self._bell.close()
            self._heard.close()

    def _ring(self) -> None:
        """There is something to do. Called by whoever adds to the log: it costs a byte a batch, and never waits."""
        if not self._rung:
            self._rung = True
            self._bell.send(b"!")

    def _run(self) -> None:
        zmq = need_zmq()
        poller = zmq.Poller()
        for each in (self._heard, self._again):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        try:
            with self._log.waking(self._ring):
                self._reader = self._log.subscribe()
                self._publish_all()
                while not self._closing:
                    self._turn(poller)
                while self._publish_new():
                    pass
        finally:
            self._context.destroy(linger=_LINGER)

    def _turn(self, poller: Any) -> None:
        more = self._log.next > self._reader.cursor
        ready = dict(poller.poll(0 if more else max(0.0, self._due - time.monotonic()) * 1_000))
        if self._heard.fileno() in ready:
            self._heard.recv(1)
            if not self._closing:
                time.sleep(_COLLECT)
            self._rung = False
        if self._again in ready:
            self._replay()
        if not self._publish_new() and time.monotonic() >= self._due:
            self._publish([])

    def _publish_new(self) -> bool:
        """Publish a batch of what is new; whether there was anything."""
        try:
            found = self._reader.read(_EVENTS)
        except Gap:
            self._counts["gaps"] += 1
            self._publish_all()
            return True
        if not found:
            return False
        told = self._told.of(event for _, event in found)
        if told:
            self._publish(told)
        self._counts["events"] += len(found)
        return True

    def _publish_all(self) -> None:
        """Publish that all is cleared, and then what is held: there is nothing that a reader has to know before it."""
        told = self._told.whole(self._reader.catch_up().blocks)
        for start in range(0, len(told), _EVENTS):
            self._publish(told[start : start + _EVENTS])

    def _publish(self, told: Sequence[dict[str, Any]]) -> None:
        self._time = max(self._time, time.time())  # a reader takes an earlier time for a batch it had
        self._due = time.monotonic() + self._heartbeat
        payload = self._packed(told)
        self._keep(payload)
        self._out.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1
        self._counts["batches"] += 1

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self._next, payload))
        self._bytes += len(payload)
        while len(self._kept) > self._most or (self._bytes > _BYTES and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft()[1])

    def _packed(self, told: Sequence[dict[str, Any]]) -> bytes:
        import msgspec

        return msgspec.msgpack.encode([self._time, encoded(told, self._encoding), self._rank])

    def _replay(self) -> None:
        """Answer one who missed something."""
        assert self._again is not None
        asker, *request = self._again.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            return  # this is no request
        self._counts["replays"] += 1
        start = int.from_bytes(request[1], "big")
        kept = [each for each in self._kept if each[0] >= start]
        if not self._kept[0][0] <= start <= self._next:
            kept = [(self._next - 1, self._packed(self._told.whole()))]
        for number, payload in kept:
            self._again.send_multipart((asker, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._again.send_multipart((asker, b"", b"", LAST, b""))


def _bound(made: Any, endpoint: str, most: int) -> Any:
    """A socket that listens, and drops what is more than so many messages for one reader."""
    made.sndhwm = most
    made.bind(endpoint)
    return made
