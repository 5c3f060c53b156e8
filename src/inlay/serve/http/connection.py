"""Client connections with timeouts for idle and incomplete requests, and a limit of open connections."""

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

_Base: Any = H11Protocol  # the only uvicorn protocol that limits the header size
STUCK_SECONDS = 60.0
"""Seconds that a closing connection waits for its client to read, before it is aborted."""
LINGER_DISCARD = struct.pack("ii", 1, 0)
"""SO_LINGER with timeout 0: closing discards unsent data and sends a TCP reset."""
DEFAULT_MAX_CONNECTIONS = 1024
"""Limit of open connections, where the system allows that many open files."""
OTHER_FILES = 64
"""Open files reserved for purposes other than connections."""


def max_connections() -> int:
    """Return the limit of open connections."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        DEFAULT_MAX_CONNECTIONS
        if allowed == resource.RLIM_INFINITY
        else max(1, min(DEFAULT_MAX_CONNECTIONS, allowed - OTHER_FILES))
    )


class Connection(_Base):  # type: ignore[misc]
    """uvicorn's connection, with limits.

    The header must be complete within `read_seconds` after the connection opens, or after the first byte of a later
    request. Above `max_connections`, the connections that were idle for longest are aborted. So idle connections cannot
    block new clients.
    """

    read_seconds = 30.0
    max_connections = DEFAULT_MAX_CONNECTIONS
    log_request: Callable[[RequestRecord], None] = staticmethod(lambda record: None)
    """Called for error responses that are sent before a request reaches the application."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the header timeout, make `abort` available to the application, and enforce `max_connections`."""
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
        """Stop the header timeout."""
        self._wait(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a request; start or stop the header timeout."""
        super().data_received(data)
        if self.has_request:
            self._since = monotonic()
        self._wait(not self.has_request)

    def on_response_complete(self) -> None:
        """Record the time at which a response was sent."""
        self._since = monotonic()
        super().on_response_complete()

    @property
    def has_request(self) -> bool:
        """Whether the header of a request was received and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_responding(self) -> bool:
        """Whether a whole request was received and its response is not complete."""
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
            self.transport.close()  # idle; a client that sends now would take an error for its response
            return
        message = f"No complete request header was received within {self.read_seconds:.0f} s."
        self._refuse(ApiError(408, message, code="timeout"))

    def send_400_response(self, msg: str) -> None:
        """Reject malformed HTTP. A response that is being sent is not interrupted."""
        if self.is_responding:
            return
        reason = "it is malformed, or its header is too large"
        self._refuse(ApiError(400, f"The HTTP request cannot be parsed: {reason}.", code="bad_http"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error outside the application, and close the connection."""
        body, phrase = error.body(), HTTPStatus(error.status_code).phrase
        head = f"HTTP/1.1 {error.status_code} {phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
        self.loop.call_later(STUCK_SECONDS, self.abort)
        client = self.client[0] if self.client else ""
        record = self.scope["state"].get("record") if self.has_request else None
        if record is not None:
            record.status, record.error = error.status_code, error.brief  # the middleware logs it
        else:
            self.log_request(
                RequestRecord(uuid.uuid4().hex, "other", client, status=error.status_code, error=error.brief)
            )

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; abort it if the client does not read."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STUCK_SECONDS, self.abort)

    def abort(self) -> None:
        """Abort the connection and discard unsent data."""
        line = self.transport.get_extra_info("socket")
        if line is not None and line.fileno() >= 0:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_DISCARD)
        self.transport.abort()
