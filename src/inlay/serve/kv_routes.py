"""The cache over HTTP: what it holds, and what changes, as JSON lines."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import FastAPI, Query
from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from inlay.serve.serving import Serving

HEARTBEAT = 1.0
"""Seconds of quiet after which a line says that all is well."""
LINES = "application/jsonl"


def add_kv_routes(app: FastAPI, serving: Serving, errors: dict[int | str, dict[str, Any]]) -> None:
    """Let the cache be watched. Whoever watches it sees the tokens of all requests."""
    from inlay.serve import kv_json

    log = serving.engine.log
    written: dict[str, Any] = {"content": {LINES: {"schema": {"type": "string"}}}}

    @app.get(
        "/v1/kv_cache/snapshot",
        response_class=Response,
        responses={**errors, 200: {"content": {"application/json": {}}}},
    )
    async def snapshot() -> Response:
        """What the cache holds now, and the number of the event that comes next."""
        made = await asyncio.to_thread(lambda: json.dumps(kv_json.snapshot_json(log)))
        return Response(made, media_type="application/json")

    @app.get("/v1/kv_cache/events", response_class=StreamingResponse, responses={**errors, 200: written})
    async def events(start: Annotated[int | None, Query(ge=0, lt=2**63)] = None) -> StreamingResponse:
        """Events from a number on, as they come; without a number, first what the cache holds."""
        return StreamingResponse(_until(serving.closing, kv_json.lines(log, start, HEARTBEAT)), media_type=LINES)


async def _until(closing: asyncio.Event, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines, until the server ends."""
    ending = asyncio.ensure_future(closing.wait())
    try:
        async with aclosing(cast("AsyncGenerator[bytes, None]", lines)):
            while not ending.done():
                coming = asyncio.ensure_future(anext(lines))
                try:
                    await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.wait((coming,))
                if not coming.cancelled():
                    yield coming.result()
    finally:
        ending.cancel()
