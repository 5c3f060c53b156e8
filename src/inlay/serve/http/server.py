"""The server process. SIGTERM stops it after the requests in flight; a second SIGTERM stops it at once."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from inlay.errors import MachineError, UsageError
from inlay.package import store
from inlay.serve.http.app import create_app
from inlay.serve.http.connection import Connection, max_connections
from inlay.serve.http.request_log import LogHandler
from inlay.serve.http.server_context import ServerContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from inlay.runtime.engine import Engine
    from inlay.serve.http.embeddings import EncoderEngine
    from inlay.serve.http.settings import ServerSettings

SEND_BUFFER = 1 << 18
"""Socket send buffer in bytes. By default the kernel buffers megabytes for each slow client."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than the keep-alive of common clients and proxies."""
LAST_SECONDS = 5
"""Seconds that connections may take to close after the last response."""


class Server(uvicorn.Server):
    """uvicorn's server with a drain phase: at shutdown new requests get 503 while those in flight finish."""

    def __init__(
        self, context: ServerContext, engine: Engine | EncoderEngine, drain_seconds: float, ready: Callable[[], None]
    ) -> None:
        config = uvicorn.Config(
            create_app(context),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        Connection.read_seconds, Connection.max_connections = context.settings.read_seconds, max_connections()
        Connection.log_request = context.log_request
        self._context, self._engine, self._seconds, self._ready = context, engine, drain_seconds, ready
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then call `ready`."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a shutdown signal. The first one starts draining in the event loop; the second one forces the exit."""
        if self._context.is_draining:
            self.should_exit = self.force_exit = True
        self._context.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Start draining if it is due. uvicorn calls this several times a second."""
        if self._context.is_draining and self._drain_task is None:
            self._drain_task = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        self._context.log_writer.write(
            {"level": "info", "message": "shutting down", "active_requests": self._context.admission.active}
        )
        try:
            async with asyncio.timeout(self._seconds):
                await self._context.admission.wait_empty()
        except TimeoutError:
            await asyncio.to_thread(self._engine.close)  # aborts unfinished requests with an error
        self._context.shutdown_event.set()
        self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Bind the address to listen on. It is done first, so that a taken port fails before the slow start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it small packets are delayed by 40 ms
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        problem = f"Cannot listen on {host} port {port}: {error}."
        raise (MachineError if taken else UsageError)(problem, "Choose another --port.") from error
    return found


def fingerprint(package: Path | str) -> str:
    """Return the `system_fingerprint` of a package. It changes with the package's code or weights."""
    return f"fp_{store.locate(Path(package)).name[:12]}"


def serve(
    engine: Engine | EncoderEngine,
    settings: ServerSettings,
    listener: socket.socket,
    version: str,
    drain_seconds: float,
    ready: Callable[[ServerContext], None],
) -> None:
    """Serve an engine until a shutdown signal."""
    serving = ServerContext(engine, settings, version)
    logging.getLogger().addHandler(LogHandler(serving.log_writer))
    gc.freeze()  # loaded objects live to the end; scanning them in every collection would pause requests for 0.1 s
    try:
        engine.start(warm=True)
        Server(serving, engine, drain_seconds, lambda: ready(serving)).run([listener])
    finally:
        engine.close()
        serving.log_writer.close()
