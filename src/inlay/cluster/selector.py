"""Chooses a worker for each request with Dynamo's selection service.

The service subscribes to the KV events of every worker, so it knows which worker has the beginning of a prompt cached,
and it counts the requests that it placed. It is asked, never relied on: a caller that gets no answer in time places the
request itself (`request_router`).
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

LEASE = 600.0
"""Seconds after which a reservation is released that nobody released: the process that made it is gone."""

PREFILL_SCALE = 4.0
"""Cost of computing a block of a prompt, in blocks that are read while an answer of some 50 tokens is decoded.

Measured on CPUs (docs/scale.md): 32 tokens take 18 ms to prefill; decoding 50 tokens beside them takes 4.7 ms more."""

PREDICTED_SECONDS = 30.0
"""How long the prompt of a placed request counts as cached before its KV events arrive. Without it, requests with one
prefix that arrive at once would be spread, and each replica would compute the prefix."""


@dataclass(frozen=True)
class EngineAddress:
    """An engine that can be chosen: its name, and where it publishes its KV events. `replay` may be empty."""

    name: str
    events: str
    replay: str
    block_size: int

    @cached_property
    def id(self) -> int:
        """The number that stands for the name in the selection service. Each selection needs those of all workers."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "big")


class Selection(NamedTuple):
    """The chosen worker, and how many prompt tokens it is expected to have cached."""

    worker: str
    cached_tokens: int


class Selector:
    """The selection service and its workers. All methods must be called in one event loop.

    A selection reserves the load of its request on the worker, so that requests that arrive at once do not all go to
    the same one. `start_decode` and `release` keep that load current.
    """

    def __init__(self, clock: Callable[[], float] = monotonic, predicted_seconds: float = PREDICTED_SECONDS) -> None:
        """`predicted_seconds` 0: only KV events say what is cached."""
        os.environ.setdefault("DYN_LOG", "error")  # it logs every selection otherwise
        try:
            from dynamo.llm import SelectionService
        except ImportError as error:
            raise UsageError("KV-aware routing needs ai-dynamo-runtime.", "pip install 'inlay[cluster]'") from error
        self._type, self._clock, self._predicted_seconds = SelectionService, clock, predicted_seconds
        self._workers: dict[str, EngineAddress] = {}
        self._reservations: OrderedDict[str, float] = OrderedDict()
        self._placing: set[str] = set()
        """Requests whose selection is under way."""

    @cached_property
    def _service(self) -> Any:
        """Dynamo's service. It belongs to the event loop in which it is used first."""
        os.environ["DYN_ROUTER_PREFILL_LOAD_SCALE"] = str(PREFILL_SCALE)  # the service has no arguments for these
        os.environ.pop("DYN_ROUTER_PREDICTED_TTL_SECS", None)
        if self._predicted_seconds:
            os.environ["DYN_ROUTER_PREDICTED_TTL_SECS"] = str(self._predicted_seconds)
        return self._type(indexer_threads=1)

    async def update(self, new: Iterable[EngineAddress], gone: Iterable[str]) -> None:
        """Subscribe to the KV events of workers, and forget others. One that is known at its address is left alone."""
        for worker in new:
            if self._workers.get(worker.name) == worker:
                continue
            await self._service.upsert_worker(
                {
                    "worker_id": worker.id,
                    "endpoint": worker.name,
                    "block_size": worker.block_size,
                    "kv_events_endpoint": worker.events,
                    "replay_endpoint": worker.replay or None,
                }
            )
            self._workers[worker.name] = worker
        for name in gone:
            if name in self._workers:
                await _ignore_unknown(self._service.delete_worker(self._workers[name].id))
                self._workers.pop(name, None)

    async def select(
        self, request: str, tokens: Sequence[int], salt: str, excluded: Collection[str], max_tokens: int
    ) -> Selection | None:
        """Choose a worker that is not excluded for a prompt, and reserve its load; None if there is none.

        `request` is the name of the reservation. An earlier reservation of that name is released.
        """
        allowed = [worker.id for name, worker in self._workers.items() if name not in excluded]
        if not allowed:
            return None
        await self.release(request)
        await self._release_expired()
        asked: dict[str, Any] = {
            "selection_id": request,
            "token_ids": list(tokens),
            "expected_output_tokens": max_tokens,
        }
        if len(allowed) < len(self._workers):
            asked["allowed_worker_ids"] = allowed
        if salt:
            asked["cache_salt"] = salt
        self._placing.add(request)
        try:
            found = await self._service.select_and_reserve(asked)
            self._reservations[request] = self._clock()
            if request not in self._placing:  # it ended meanwhile
                await self.release(request)
        finally:
            self._placing.discard(request)
        return Selection(found["endpoint"], int(found["overlap"]["longest_matched"]))

    async def start_decode(self, request: str) -> None:
        """State that a request has its first token, so its prompt is no load any more."""
        if request in self._reservations:
            await _ignore_unknown(self._service.prefill_complete(request))

    async def release(self, request: str) -> None:
        """Release the reservation of a request that ended; a name without reservation is ignored."""
        self._placing.discard(request)
        if self._reservations.pop(request, None) is not None:
            await _ignore_unknown(self._service.free_reservation(request))

    async def _release_expired(self) -> None:
        due = self._clock() - LEASE
        while self._reservations and next(iter(self._reservations.values())) < due:
            await self.release(next(iter(self._reservations)))

    def close(self) -> None:
        """Stop the service."""
        self._service.shutdown()


async def _ignore_unknown(call: Awaitable[object]) -> None:
    """Await a call about a reservation that the service may have dropped, because its worker was removed."""
    try:
        await call
    except Exception as error:
        if getattr(error, "kind", None) != "not_found":
            raise
