"""What the ingress tells the request router about a request, and what it learns: the state of one ingress process.

Serve calls the request router in the process of the ingress, with the arguments of the call. So `Placement` carries
both what is sent to the replica and, in this process only, the `Fleet` that all requests share.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from inlay.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from inlay.cluster.selector import EngineAddress, Selection
    from inlay.runtime.outputs import TokenOutput
    from inlay.runtime.request import Request

LOGGER = logging.getLogger("ray.serve")
SELECT_SECONDS = 0.25
"""Time limit of the selector for one answer. Without one, the least loaded replica is chosen."""
SUSPICION = 15.0
"""Seconds for which a replica that went silent gets no new requests, if there is another one."""
PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Seconds for which the selector is not asked after the first, second, … failure in a row."""
WRONG_SHARE = 0.5
"""Share of recent predictions that may be too high before the selector counts as behind."""
CHOICES = 4
"""How many replicas without room a request tries before all are considered again."""
RECENT = 1 / 16
"""Weight of the latest prediction in that share."""


class Message(NamedTuple):
    """A part of an answer of a replica."""

    package: str
    """The hash of the package that made it."""
    cached_tokens: int
    outputs: list[TokenOutput]
    """May be empty."""


@dataclass
class Placement:
    """One attempt to run a request: its identity, and where it may go and went."""

    request_id: str
    text: str
    """The tokenizer and chat template that made the tokens (`text_fingerprint`)."""
    package: str | None = None
    """The package that must answer, because an earlier attempt has sent tokens from it."""
    trace: dict[str, str] = field(default_factory=dict)
    """W3C trace context."""
    fleet: Fleet | None = None
    avoid: frozenset[str] = frozenset()
    """Replicas that earlier attempts failed on."""
    load: int = 0
    """Tokens of the prompt and at most of the answer."""
    replica: str | None = None
    """The replica that was chosen last. `Fleet.charge` sets it."""
    full: set[str] = field(default_factory=set)
    """Replicas that were chosen before it and had no room."""
    is_over: bool = False
    policy: str = ""
    """How it was chosen: kv, least_loaded or random."""
    predicted_tokens: int | None = None
    """Prompt tokens that the selector expects in the cache of that replica; None if it was not asked."""
    start_time: float = field(default_factory=monotonic)
    accept_time: float | None = None
    """When a replica accepted the request."""
    last_sign: float | None = None
    """When the request last made progress: a choice, or a message. None while it waits for its first choice."""

    def __getstate__(self) -> dict[str, Any]:
        """Send only what the replica needs."""
        return {"request_id": self.request_id, "text": self.text, "package": self.package, "trace": self.trace}


class SelectorClient:
    """Asks the selector, and stops asking for a while when it fails, is slow or is behind the caches."""

    def __init__(self, connect: Callable[[], Any], counts: Counter[str]) -> None:
        """`connect` returns a handle of the selector's actor; it is called again after each failure."""
        self._connect, self._counts = connect, counts
        self._actor: Any = None
        self._failures, self._failure_time, self._closed_until = 0, -inf, 0.0
        self._added: dict[str, EngineAddress] = {}
        self.wrong_share = 0.0
        """Share of recent predictions that were too high."""

    async def select(
        self, request_id: str, asked: Request, names: Collection[str], workers: Mapping[str, EngineAddress]
    ) -> Selection | None:
        """Return the selector's choice among `names`; None if there is none in time. `workers` are all that exist."""
        if monotonic() < self._closed_until:
            return None
        try:
            async with asyncio.timeout(SELECT_SECONDS):
                actor = self._actor  # another request may fail meanwhile and reset it
                if actor is None:
                    actor, self._added = await asyncio.to_thread(self._connect), {}
                    self._actor = actor
                if self._added != workers:
                    await self._update(actor, workers)
                excluded = workers.keys() - names  # usually none: fewer names to send
                arguments = request_id, asked.prompt, asked.salt, excluded, asked.max_tokens
                found: Selection | None = await actor.select.remote(*arguments)
        except Exception as error:  # dead, restarting, slow: all mean that nobody can be asked
            self._fail("timeout" if isinstance(error, TimeoutError) else "failed", one_line(error))
            return None
        self._failures = 0
        return found

    async def _update(self, actor: Any, workers: Mapping[str, EngineAddress]) -> None:
        gone = self._added.keys() - workers.keys()
        new = [worker for name, worker in workers.items() if self._added.get(name) != worker]
        await actor.update.remote(new, list(gone))
        self._added = dict(workers)

    def report(self, placement: Placement, cached: int, block_size: int) -> None:
        """Compare a prediction with the tokens that were really cached."""
        if placement.predicted_tokens is None:
            return
        self._counts["predicted_tokens"] += placement.predicted_tokens
        wrong = cached < placement.predicted_tokens - block_size
        self.wrong_share += RECENT * (wrong - self.wrong_share)
        if self.wrong_share > WRONG_SHARE:
            self.wrong_share = 0.0
            self._failures = max(1, self._failures)  # the next answers would be wrong too
            self._fail("behind", "it expects more cached tokens than there are")

    def tell(self, method: str, request_id: str) -> None:
        """Tell the selector of a request's progress, without waiting."""
        if self._actor is not None:
            with suppress(Exception):  # the reservation of a selector that is away is lost with it
                getattr(self._actor, method).remote(request_id)

    def _fail(self, kind: str, problem: str) -> None:
        self._counts[f"selector_failures.{kind}"] += 1
        now = monotonic()
        if kind == "failed":  # Serve may have started another one; a slow one must still be told what ends
            self._actor = None
        if now - self._failure_time < SELECT_SECONDS:  # the same failure, of requests that came at once
            return
        LOGGER.warning("selector %s: %s", kind, problem)
        self._failure_time, self._closed_until = now, now + PAUSES[min(self._failures, len(PAUSES) - 1)]
        self._failures += 1


class Fleet:
    """The replicas as one ingress sees them: tokens in flight, replicas that went silent, and counters."""

    def __init__(self, policy: str, connect: Callable[[], Any]) -> None:
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.selector = SelectorClient(connect, self.counts)
        self._tokens: Counter[str] = Counter()
        """Tokens in flight for each replica, from this ingress."""
        self._suspects: dict[str, float] = {}

    def charge(self, placement: Placement, replica: str | None) -> None:
        """Count the load of a request on a replica, and no longer on the one that was chosen before."""
        if placement.replica is not None:
            self._tokens[placement.replica] -= placement.load
            if not self._tokens[placement.replica]:
                del self._tokens[placement.replica]
        placement.replica = None if placement.is_over else replica
        if placement.replica is not None:
            self._tokens[placement.replica] += placement.load

    def accept(self, placement: Placement) -> None:
        """Record that the chosen replica accepted a request."""
        placement.last_sign = placement.accept_time = monotonic()
        self.counts[f"placements.{placement.policy}"] += 1

    def start_decode(self, placement: Placement, cached: int, block_size: int) -> None:
        """Record the first token of a request, and how many tokens of its prompt were cached."""
        self.counts["cached_tokens"] += cached
        self.selector.report(placement, cached, block_size)
        self.selector.tell("start_decode", placement.request_id)
        if placement.replica is not None:
            self._suspects.pop(placement.replica, None)

    def end(self, placement: Placement) -> None:
        """Release what an attempt holds. It may still be in the request router's hands."""
        placement.is_over = True
        self.charge(placement, None)
        self.selector.tell("release", placement.request_id)

    def suspect(self, replica: str) -> None:
        """Give a replica no new requests for a while."""
        self._suspects[replica] = monotonic() + SUSPICION

    def is_suspect(self, replica: str) -> bool:
        """Whether a replica went silent recently."""
        return self._suspects.get(replica, 0.0) > monotonic()

    async def choose(
        self, placement: Placement, asked: Request, workers: Mapping[str, EngineAddress], fitting: Collection[str]
    ) -> str:
        """Choose one of the replicas that fit a request. `workers` are all replicas.

        It is called again if the chosen replica has no room. The selector is asked first, then the load decides.
        """
        if placement.replica is not None:
            placement.full.add(placement.replica)
        placement.last_sign = monotonic()
        names = [name for name in fitting if name not in placement.avoid and not self.is_suspect(name)] or fitting
        free = [name for name in names if name not in placement.full]
        if not free or len(placement.full) >= CHOICES:
            placement.full.clear()
            free = list(names)
        found = None
        if self.policy == "kv" and not placement.full and len(free) > 1:
            found = await self.selector.select(placement.request_id, asked, free, workers)
        if found is not None and found.worker in free:  # another ingress may know other replicas
            placement.policy, placement.predicted_tokens = "kv", found.cached_tokens
            chosen = found.worker
        elif self.policy == "random":
            placement.policy, placement.predicted_tokens = "random", None
            chosen = random.choice(free)
        else:
            placement.policy, placement.predicted_tokens = "least_loaded", None
            chosen = min(free, key=lambda name: (self._tokens[name], random.random()))
        self.charge(placement, chosen)
        return chosen
