"""How many answers a server has in its hands at once. A place is held until the answer is sent, or nobody wants it.

A quarter of them is for others: neither one key nor requests for several choices can take it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

from inlay.serve.http.errors import overloaded_error

LONGEST = 60.0
"""Seconds that a client is told to wait at most."""
WEIGHT = 0.1
"""Of the last answer, in the mean of how long answers take."""


class AdmissionControl:
    """Counts places; `slots` is how many answers are made at once, the others wait.

    >>> places = AdmissionControl(most=2, slots=1)
    >>> one, two = places.admit(), places.admit()
    >>> places.admit()
    Traceback (most recent call last):
    ...
    inlay.serve.http.errors.ApiError: 429: This server has as many requests as it takes. Ask again later.
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
        """A place for somebody with a key, or with none; or an error that says when to ask again."""
        place = Permit(self, key)
        place.acquire(1)
        return place

    def retry_after(self) -> float:
        """How long it takes until those that wait now have their turn, if answers take as long as they did."""
        turns = max(1, self.active - self.slots) / self.slots
        return min(LONGEST, max(1.0, self._mean * turns))

    async def wait_empty(self) -> None:
        """Wait until nobody holds a place."""
        await self._empty.wait()

    def _check_capacity(self, key: str, count: int, mine: int) -> None:
        """Raise an error if somebody who holds `mine` for a request cannot have so many more."""
        several = mine + count > 1
        if self.active + count > (self.share if several else self.most):
            raise overloaded_error(self.retry_after())
        if key and self._by[key] + count > self.share:
            raise overloaded_error(self.retry_after(), " This key has its share of them.")

    def _change(self, key: str, count: int) -> None:
        self.active += count
        self._by[key] += count
        if not self._by[key]:
            del self._by[key]
        self._empty.set() if self.active == 0 else self._empty.clear()


class Permit:
    """The place of one request; as many as it has choices."""

    def __init__(self, places: AdmissionControl, key: str) -> None:
        self._places, self._key, self._count, self._since = places, key, 0, monotonic()

    def acquire(self, count: int) -> None:
        """Hold so many more, or none more."""
        if count:
            self._places._check_capacity(self._key, count, self._count)
            self._count += count
            self._places._change(self._key, count)

    def release(self, is_completed: bool = True) -> None:
        """Somebody else's turn. What was refused says nothing about how long answers take."""
        if is_completed:
            self._places._mean += WEIGHT * (monotonic() - self._since - self._places._mean)
        self._places._change(self._key, -self._count)
        self._count = 0
