"""KV events as JSON lines over HTTP.

Events have the format of TensorRT-LLM (`KVCacheEventSerializer` in tensorrt_llm/_utils.py): `{"event_id", "data",
"window_size"}`, where `data` has a `type` of created, stored, removed or updated. `window_size` is always 0, because
one cache serves all layers. In updated, an unchanged property is null.
Inlay adds the type `cleared`, `block_size` in created, `cache_level` in removed, and `cache_salt` for salted blocks.

Lines that are not events have a top-level `type`: snapshot, gap or heartbeat.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import FastAPI, Query
from starlette.responses import Response, StreamingResponse

from inlay.runtime.engine import Engine
from inlay.runtime.kv.events import ClearedEvent, CreatedEvent, Gap, RemovedEvent, StoredEvent, UpdatedEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from inlay.runtime.kv.events import CacheEvent, EventLog
    from inlay.serve.http.server_context import ServerContext


_EVENTS = 100
"""The most events written at once, so that other tasks of the event loop can run in between."""


def event_json(number: int, event: CacheEvent) -> dict[str, Any]:
    """Return one event as JSON.

    >>> event_json(5, UpdatedEvent(7, level=(0, 1)))["data"]["cache_level"]
    {'type': 'event_diff', 'old_value': 0, 'new_value': 1}
    """
    return {"event_id": number, "data": _data(event), "window_size": 0}


def snapshot_json(log: EventLog) -> dict[str, Any]:
    """Return the content of a cache before the event `next_event_id`. Parents come before their children.

    >>> from inlay.runtime.kv.events import EventLog
    >>> event_log = EventLog()
    >>> event_log.add(StoredEvent(None, 7, (1, 2), "", 0, 0))
    >>> found = snapshot_json(event_log)
    >>> found["next_event_id"], [block["block_hash"] for block in found["blocks"]]
    (1, [7])
    """
    snapshot = log.snapshot()
    blocks = [{"parent_hash": block.parent} | _block(block) for block in snapshot.blocks]
    return {"type": "snapshot", "next_event_id": snapshot.next, "blocks": blocks}


async def lines(log: EventLog, start: int | None, heartbeat: float) -> AsyncGenerator[bytes, None]:
    """Yield events from the number `start` on, as they occur. Without `start`, yield a snapshot first.

    If the next event was dropped from the log, a gap line and a snapshot follow. After `heartbeat` seconds without
    events, a heartbeat line follows. Nothing is buffered for a slow subscriber: it gets a gap instead.
    """
    if start is None:
        made = await asyncio.to_thread(snapshot_json, log)
        start = made["next_event_id"]
        yield _line(made)
    reader = log.subscribe(start)
    while True:
        try:
            async with aclosing(reader.stream(_EVENTS, heartbeat)) as stream:
                async for found in stream:
                    quiet = {"type": "heartbeat", "next_event_id": reader.cursor}
                    yield b"".join(_line(event_json(*each)) for each in found) or _line(quiet)
        except Gap as gap:
            yield _line({"type": "gap", "asked": gap.requested, "first": gap.first, "next_event_id": gap.next})
            made = await asyncio.to_thread(snapshot_json, log)  # may be large: do not block the event loop
            reader = log.subscribe(made["next_event_id"])
            yield _line(made)


def _line(made: dict[str, Any]) -> bytes:
    return json.dumps(made, separators=(",", ":")).encode() + b"\n"


def _data(event: CacheEvent) -> dict[str, Any]:
    match event:
        case CreatedEvent():
            places = {"num_blocks_per_cache_level": list(event.capacities), "block_size": event.block_size}
            return {"type": "created", **places}
        case StoredEvent():
            return {"type": "stored", "parent_hash": event.parent, "blocks": [_block(event)]}
        case RemovedEvent():
            return {"type": "removed", "block_hashes": [event.hash], "cache_level": event.level}
        case UpdatedEvent():
            changes = {"cache_level": _change(event.level), "priority": _change(event.priority)}
            return {"type": "updated", "block_hash": event.hash, **changes}
        case ClearedEvent():
            return {"type": "cleared"}


def _block(block: StoredEvent) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in block.tokens]
    made: dict[str, Any] = {"type": "stored_block", "block_hash": block.hash, "tokens": tokens}
    made |= {"cache_level": block.level, "priority": block.priority}
    return made | ({"cache_salt": block.salt} if block.salt else {})


def _change(values: tuple[int, int] | None) -> dict[str, Any] | None:
    return None if values is None else {"type": "event_diff", "old_value": values[0], "new_value": values[1]}


HEARTBEAT = 1.0
"""Seconds without events after which a heartbeat line is sent."""
LINES = "application/jsonl"


def add_kv_routes(app: FastAPI, context: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes for KV events. They expose the tokens of all requests."""
    assert isinstance(context.engine, Engine), "replicas of a cluster publish their own events"
    log = context.engine.event_log
    written: dict[str, Any] = {"content": {LINES: {"schema": {"type": "string"}}}}

    @app.get(
        "/v1/kv_cache/snapshot",
        response_class=Response,
        responses={**errors, 200: {"content": {"application/json": {}}}},
    )
    async def snapshot() -> Response:
        """The current blocks of the prefix cache, and the number of the next event."""
        made = await asyncio.to_thread(lambda: json.dumps(snapshot_json(log)))
        return Response(made, media_type="application/json")

    @app.get("/v1/kv_cache/events", response_class=StreamingResponse, responses={**errors, 200: written})
    async def events(start: Annotated[int | None, Query(ge=0, lt=2**63)] = None) -> StreamingResponse:
        """KV events as JSON lines, from the number `start` on. Without `start`, a snapshot comes first."""
        return StreamingResponse(
            _stream_until_closed(context.shutdown_event, lines(log, start, HEARTBEAT)), media_type=LINES
        )


async def _stream_until_closed(closing: asyncio.Event, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines until the server shuts down or the client disconnects, which cancels every wait here."""
    ending, coming = asyncio.ensure_future(closing.wait()), None
    try:
        while not ending.done():
            coming = asyncio.ensure_future(anext(lines))
            await asyncio.wait((coming, ending), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                yield coming.result()
    finally:
        ending.cancel()
        if coming is not None and not coming.done():
            coming.cancel()  # ends `lines`, which cannot be closed while it runs
        else:
            await cast("AsyncGenerator[bytes, None]", lines).aclose()
