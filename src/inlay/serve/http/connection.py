"""A connection that ends: when no request comes, when one does not come to an end, or when there are too many."""

from __future__ import annotations

import resource
import socket
import struct
import uuid
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from inlay.serve.http.errors import ApiError
from inlay.serve.http.request_log import RequestRecord

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_Base: Any = H11Protocol  # the only one whose headers have a limit
STUCK_SECONDS = 60.0
"""How long a connection that is to be closed may wait for a reader."""
LINGER_DISCARD = struct.pack("ii", 1, 0)
"""What is not sent when a socket is closed is thrown away, and the other side told so."""
DEFAULT_MAX_CONNECTIONS = 1024
"""Connections at once, where the system allows that many files."""
OTHER_FILES = 64
"""Files that the process needs beside connections."""


def max_connections() -> int:
    """How many connections may be open at once."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        DEFAULT_MAX_CONNECTIONS
        if allowed == resource.RLIM_INFINITY
        else max(1, min(DEFAULT_MAX_CONNECTIONS, allowed - OTHER_FILES))
    )


class Connection(_Base):  # type: ignore[misc]
    """uvicorn's connection, with limits.

    `read_seconds` after it was opened, or after the first byte of a later request, the header has to be complete.
    Where there are too many connections, those go that are not being answered and were not for longest: a newcomer who
    asks quickly is served, however many others hold a line and say nothing.
    """

    read_seconds = 30.0
    max_connections = DEFAULT_MAX_CONNECTIONS
    log_request: Callable[[RequestRecord], None] = staticmethod(lambda record: None)
    """Told of what was answered before it was a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Let applications cut it off, and wait for a request."""
        self.app_state: dict[str, Any] = {**self.app_state, "abort": self.abort}
        super().connection_made(transport)
        self._since = monotonic()
        self._header_timer: asyncio.TimerHandle | None = self.loop.call_later(
            self.read_seconds, self._on_header_timeout
        )
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        idle = sorted((each for each in open_ones if not each.is_responding), key=lambda each: each._since)
        for each in idle[: max(0, len(open_ones) - self.max_connections)]:
            each.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._wait(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request: its header has to be complete in time."""
        super().data_received(data)
        if self.has_request:
            self._since = monotonic()
        self._wait(not self.has_request)

    def on_response_complete(self) -> None:
        """An answer is sent."""
        self._since = monotonic()
        super().on_response_complete()

    @property
    def has_request(self) -> bool:
        """Whether the header of a request is there, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_responding(self) -> bool:
        """Whether the whole of a request is there, and its answer is not complete."""
        return self.has_request and not self.cycle.more_body

    def _wait(self, header: bool) -> None:
        if not header and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif header and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.read_seconds, self._on_header_timeout)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self.has_request or self.transport.is_closing():
            return
        if self.cycle is not None and not self.conn.trailing_data[0]:
            self.transport.close()  # nobody asks: a client that is about to would take this for its answer
            return
        self._refuse(ApiError(408, f"No request came in within {self.read_seconds:.0f} s.", code="timeout"))

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP that is understood. An answer that is being sent is not disturbed."""
        if self.is_responding:
            return
        reason = "it is malformed, or its header is too large"
        self._refuse(ApiError(400, f"This HTTP request cannot be read: {reason}.", code="bad_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request, and close."""
        body, phrase = error.body(), HTTPStatus(error.status_code).phrase
        head = f"HTTP/1.1 {error.status_code} {phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
        self.loop.call_later(STUCK_SECONDS, self.abort)
        client = self.client[0] if self.client else ""
        record = self.scope["state"].get("record") if self.has_request else None
        if record is not None:
            record.status, record.error = error.status_code, error.brief  # it has a line of its own
        else:
            self.log_request(
                RequestRecord(uuid.uuid4().hex, "other", client, status=error.status_code, error=error.brief)
            )

    def timeout_keep_alive_handler(self) -> None:
        """Nobody asks any more on this connection."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STUCK_SECONDS, self.abort)

    def abort(self) -> None:
        """Cut it off."""
        line = self.transport.get_extra_info("socket")
        if line is not None and line.fileno() >= 0:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_DISCARD)
        self.transport.abort()
