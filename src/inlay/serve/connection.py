"""A connection that can be cut off, whatever is still to be sent on it."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio

STUCK_SECONDS = 60.0
"""How long a connection that is to be closed may wait for a reader."""
FORGET = struct.pack("ii", 1, 0)
"""What is not sent when a socket is closed is thrown away, and the other side told so."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection. Closing one waits until its reader has taken everything, which may be never."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Let applications cut it off."""
        self.app_state: dict[str, Any] = {**self.app_state, "abort": self.abort}
        super().connection_made(transport)

    def timeout_keep_alive_handler(self) -> None:
        """Nobody asks any more on this connection."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STUCK_SECONDS, self.abort)

    def abort(self) -> None:
        """Cut it off."""
        line = self.transport.get_extra_info("socket")
        if line is not None and line.fileno() >= 0:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGET)
        self.transport.abort()
