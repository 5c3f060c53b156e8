"""KV-cache events as JSON lines, for people and programs that speak HTTP.

An event has the form in which TensorRT-LLM gives its own (`KVCacheEventSerializer` in tensorrt_llm/_utils.py):
`{"event_id", "data", "window_size"}`, where `data` has a `type` of created, stored, removed or updated. Names and shape
are the same. `window_size` is always 0, because one cache serves all layers; a change that did not happen is null.
Added are `cleared`, `block_size` in created, `cache_level` in removed, and `cache_salt` of a block that has one.

Lines that are no events have a `type` of their own: snapshot, gap, heartbeat.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import FastAPI, Query
from starlette.responses import Response, StreamingResponse

from inlay.runtime.kv.events import ClearedEvent, CreatedEvent, Gap, RemovedEvent, StoredEvent, UpdatedEvent

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from inlay.runtime.kv.events import CacheEvent, EventLog
    from inlay.serve.http.server_context import ServerContext


_EVENTS = 100
"""The most events that are written at once: others of the event loop have their turn after them."""


def event_json(number: int, event: CacheEvent) -> dict[str, Any]:
    """One event.

    >>> event_json(5, UpdatedEvent(7, level=(0, 1)))["data"]["cache_level"]
    {'type': 'event_diff', 'old_value': 0, 'new_value': 1}
    """
    return {"event_id": number, "data": _data(event), "window_size": 0}


def snapshot_json(log: EventLog) -> dict[str, Any]:
    """The content of a cache before the event `next_event_id`: blocks, each after what it follows.

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
    """Events from a number on, as they come; without a number, first a snapshot.

    When the next event is not kept any more, a line says so and a snapshot follows. After so many seconds of quiet a
    line says that all is well. Nothing is kept for a reader who is slow: it gets a gap instead.
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
            made = await asyncio.to_thread(snapshot_json, log)  # may be large, and others of the loop are not to wait
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
"""Seconds of quiet after which a line says that all is well."""
LINES = "application/jsonl"


def add_kv_routes(app: FastAPI, context: ServerContext, errors: dict[int | str, dict[str, Any]]) -> None:
    """Let the cache be watched. Whoever watches it sees the tokens of all requests."""

    log = context.engine.event_log
    written: dict[str, Any] = {"content": {LINES: {"schema": {"type": "string"}}}}

    @app.get(
        "/v1/kv_cache/snapshot",
        response_class=Response,
        responses={**errors, 200: {"content": {"application/json": {}}}},
    )
    async def snapshot() -> Response:
        """What the cache holds now, and the number of the event that comes next."""
        made = await asyncio.to_thread(lambda: json.dumps(snapshot_json(log)))
        return Response(made, media_type="application/json")

    @app.get("/v1/kv_cache/events", response_class=StreamingResponse, responses={**errors, 200: written})
    async def events(start: Annotated[int | None, Query(ge=0, lt=2**63)] = None) -> StreamingResponse:
        """Events from a number on, as they come; without a number, first what the cache holds."""
        return StreamingResponse(
            _stream_until_closed(context.shutdown_event, lines(log, start, HEARTBEAT)), media_type=LINES
        )


async def _stream_until_closed(closing: asyncio.Event, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines, until the server ends or the client leaves, which cancels every wait in here."""
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
            coming.cancel()  # this ends `lines`, which cannot be closed while it runs
        else:
            await cast("AsyncGenerator[bytes, None]", lines).aclose()
