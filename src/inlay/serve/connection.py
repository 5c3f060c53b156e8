"""A connection that can be cut off, whatever is still to be sent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio

STUCK_SECONDS = 60.0
"""How long a connection that is to be closed may wait for a reader."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's connection. Closing one waits until its reader has taken everything, which may be never."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Let applications cut it off."""
        self.app_state: dict[str, Any] = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)

    def timeout_keep_alive_handler(self) -> None:
        """Nobody asks any more on this connection."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(STUCK_SECONDS, self.transport.abort)
