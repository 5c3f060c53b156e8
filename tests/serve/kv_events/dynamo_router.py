"""Dynamo's selection service, which has a worker for each of several logs."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from inlay.serve.kv_events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from inlay.runtime.kv.events import EventLog

os.environ.setdefault("DYN_LOG", "error")  # before it is imported


class Router:
    """Says which log's cache a prompt should go to."""

    def __init__(self, service: Any, publishers: Sequence[Publisher]) -> None:
        self.service, self.publishers = service, publishers

    async def choice(self, tokens: Sequence[int]) -> int:
        """The number of the log."""
        return int((await self.service.select({"token_ids": list(tokens)}))["worker_id"])

    async def known(self, tokens: Sequence[int], **more: str) -> list[tuple[int, int]]:
        """Of each log: blocks of a prompt that lie near, and those that follow them further away."""
        found = (await self.service.overlap_scores({"token_ids": list(tokens), **more}))["workers"]
        by_worker = {each["worker_id"]: each for each in found}
        return [
            (by_worker[number]["device_blocks"], by_worker[number]["host_pinned_extension_blocks"])
            for number in range(len(self.publishers))
        ]

    async def until_known(self, tokens: Sequence[int], expected: Sequence[tuple[int, int]], **more: str) -> None:
        """Wait until it has heard of this."""
        found: list[tuple[int, int]] = []
        for _ in range(600):
            found = await self.known(tokens, **more)
            if found == list(expected):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the router knows {found}, not {expected}")


@asynccontextmanager
async def routing(logs: Sequence[EventLog], block_size: int, **options: Any) -> AsyncIterator[Router]:
    """A router that hears of these caches: `options` are those of `Publisher`."""
    from dynamo.llm import SelectionService

    with ExitStack() as stack:
        publishers = [stack.enter_context(Publisher(log, block_size, **options)) for log in logs]
        service = SelectionService(indexer_threads=1)
        stack.callback(service.shutdown)
        for number, publisher in enumerate(publishers):
            worker = {"worker_id": number, "endpoint": f"http://worker{number}", "block_size": block_size}
            wire = {"kv_events_endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
            record = await service.upsert_worker(worker | wire)
            assert record["lifecycle"] == "schedulable", record
        yield Router(service, publishers)
