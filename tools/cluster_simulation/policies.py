"""Policies that choose a replica for a request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

from tools.cluster_simulation.event_feed import EventFeed, new_selector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.runtime.kv.events import CacheEvent
    from inlay.runtime.request import Request

POLICIES = ("random", "round_robin", "least_loaded", "kv_aware")
_SELECT_SECONDS = 5.0
"""Real seconds after which a request is placed without the selection service."""


class Policy:
    """Chooses replicas, and is told what happens to the requests. This base class ignores what it is told."""

    has_events = False
    """Whether it uses KV events."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"{seed} policy")
        self.counts: Counter[str] = Counter()

    async def open(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Add replicas, with the first events of their caches."""

    async def close(self, name: str) -> None:
        """Remove a replica that ended."""

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose one of these replicas and reserve its load under a key."""
        raise NotImplementedError

    async def start_decode(self, key: str) -> None:
        """A request has its first token."""

    async def release(self, key: str) -> None:
        """A request ended or lost its replica."""

    async def sync(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Learn the events of caches."""

    def stop(self) -> None:
        """Release what the policy holds."""


class RandomPolicy(Policy):
    """Any replica, at random."""

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose a replica."""
        return self.rng.choice(names)


class RoundRobinPolicy(Policy):
    """One replica after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._next = -1

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose a replica."""
        self._next += 1
        return names[self._next % len(names)]


class LeastLoadedPolicy(Policy):
    """The replica with the fewest tokens in flight (prompts and answers); among equals, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._loads: Counter[str] = Counter()
        self._placed: dict[str, tuple[str, int]] = {}

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose a replica."""
        loads = self._loads
        least = min(loads[name] for name in names)
        name = self.rng.choice([name for name in names if loads[name] == least])
        self.reserve(key, request, name)
        return name

    def reserve(self, key: str, request: Request, name: str) -> None:
        """Count the tokens of a request for a replica."""
        self._forget(key)
        tokens = len(request.prompt) + request.max_tokens
        self._loads[name] += tokens
        self._placed[key] = name, tokens

    async def release(self, key: str) -> None:
        """A request ended."""
        self._forget(key)

    def _forget(self, key: str) -> None:
        if key in self._placed:
            name, tokens = self._placed.pop(key)
            self._loads[name] -= tokens


class KVAwarePolicy(LeastLoadedPolicy):
    """Inlay's selector, which asks Dynamo's selection service; the least loaded replica if it does not answer.

    The service breaks ties at random and takes no seed, so two runs with one seed may differ.
    """

    has_events = True

    def __init__(
        self, seed: int, block_size: int, replicas: int, clock: Callable[[], float], predicted_seconds: float = 0.0
    ) -> None:
        """`predicted_seconds`: as for `new_selector`."""
        super().__init__(seed)
        self._selector = new_selector(clock, predicted_seconds)
        self._feed = EventFeed(self._selector, block_size, replicas)

    async def open(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Add replicas, with the first events of their caches."""
        await self._feed.open(events)

    async def close(self, name: str) -> None:
        """Remove a replica that ended."""
        await self._feed.close([name])

    async def choose(self, key: str, request: Request, names: Sequence[str]) -> str:
        """Choose a replica."""
        self.counts["selections"] += 1
        try:
            found = await asyncio.wait_for(
                self._selector.select(key, request.prompt, request.salt, (), request.max_tokens), _SELECT_SECONDS
            )
        except TimeoutError:
            found = None
        if found is None:
            self.counts["selections_failed"] += 1
            return await super().choose(key, request, names)
        self.counts["expected_cached_tokens"] += found.cached_tokens
        self.reserve(key, request, found.worker)
        return found.worker

    async def start_decode(self, key: str) -> None:
        """A request has its first token."""
        await self._selector.start_decode(key)

    async def release(self, key: str) -> None:
        """A request ended."""
        await super().release(key)
        await self._selector.release(key)

    async def sync(self, events: Mapping[str, Sequence[CacheEvent]]) -> None:
        """Learn the events of caches."""
        await self._feed.sync(events)

    def stop(self) -> None:
        """Stop the publishers and the service."""
        self._feed.stop()
        self._selector.close()


def new_policy(
    name: str, seed: int, block_size: int, replicas: int, clock: Callable[[], float], predicted_seconds: float = 0.0
) -> Policy:
    """Return a policy by name."""
    if name == "kv_aware":
        return KVAwarePolicy(seed, block_size, replicas, clock, predicted_seconds)
    kinds: dict[str, type[Policy]] = {
        "random": RandomPolicy,
        "round_robin": RoundRobinPolicy,
        "least_loaded": LeastLoadedPolicy,
    }
    return kinds[name](seed)
