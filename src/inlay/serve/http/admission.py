"""Admission control: limits the requests in flight. A permit is held until the response is sent or cancelled.

A quarter of the permits is reserved: neither a single API key nor requests with several choices can use it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

from inlay.serve.http.errors import overloaded_error

LONGEST = 60.0
"""Upper bound of Retry-After, in seconds."""
WEIGHT = 0.1
"""Weight of the latest response in the moving average of response times."""


class AdmissionControl:
    """Counts permits. `most` is the limit; `slots` requests run at once and the others wait.

    >>> places = AdmissionControl(most=2, slots=1)
    >>> one, two = places.admit(), places.admit()
    >>> places.admit()
    Traceback (most recent call last):
    ...
    inlay.serve.http.errors.ApiError: 429: This server is at its request limit. Retry later.
    >>> one.release()
    >>> places.active
    1
    """

    def __init__(self, most: int, slots: int) -> None:
        self.most, self.slots, self.active = most, slots, 0
        self.share = max(1, most - most // 4)
        self._by: Counter[str] = Counter()
        self._mean = 1.0
        self._empty = asyncio.Event()
        self._empty.set()

    def admit(self, key: str = "") -> Permit:
        """Return a permit for a key (empty: no key), or raise a 429 error with Retry-After."""
        place = Permit(self, key)
        place.acquire(1)
        return place

    def retry_after(self) -> float:
        """Estimate the seconds until the requests that wait now have run, from the average response time."""
        turns = max(1, self.active - self.slots) / self.slots
        return min(LONGEST, max(1.0, self._mean * turns))

    async def wait_empty(self) -> None:
        """Wait until no permit is held."""
        await self._empty.wait()

    def _check_capacity(self, key: str, count: int, mine: int) -> None:
        """Raise an error if a request that holds `mine` permits cannot have `count` more."""
        several = mine + count > 1
        if self.active + count > (self.share if several else self.most):
            raise overloaded_error(self.retry_after())
        if key and self._by[key] + count > self.share:
            raise overloaded_error(self.retry_after(), " This API key has used its share.")

    def _change(self, key: str, count: int) -> None:
        self.active += count
        self._by[key] += count
        if not self._by[key]:
            del self._by[key]
        self._empty.set() if self.active == 0 else self._empty.clear()


class Permit:
    """The permits of one request: one for each completion it generates."""

    def __init__(self, places: AdmissionControl, key: str) -> None:
        self._places, self._key, self._count, self._since = places, key, 0, monotonic()

    def acquire(self, count: int) -> None:
        """Acquire `count` more permits, or raise an error and acquire none."""
        if count:
            self._places._check_capacity(self._key, count, self._count)
            self._count += count
            self._places._change(self._key, count)

    def release(self, is_completed: bool = True) -> None:
        """Return all permits. Only completed requests count in the average response time."""
        if is_completed:
            self._places._mean += WEIGHT * (monotonic() - self._since - self._places._mean)
        self._places._change(self._key, -self._count)
        self._count = 0
