"""How many answers a server has in its hands at once. A place is held until the answer is sent, or nobody wants it.

A quarter of them is for others: neither one key nor requests for several choices can take it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

from inlay.serve.errors import overloaded

LONGEST = 60.0
"""Seconds that a client is told to wait at most."""
WEIGHT = 0.1
"""Of the last answer, in the mean of how long answers take."""


class Places:
    """Counts places; `answering` is how many answers are made at once, the others wait.

    >>> places = Places(most=2, answering=1)
    >>> one, two = places.take(), places.take()
    >>> places.take()
    Traceback (most recent call last):
    ...
    inlay.serve.errors.ApiError: 429: This server has as many requests as it takes. Ask again later.
    >>> one.give_back()
    >>> places.held
    1
    """

    def __init__(self, most: int, answering: int) -> None:
        self.most, self.answering, self.held = most, answering, 0
        self.share = max(1, most - most // 4)
        self._by: Counter[str] = Counter()
        self._mean = 1.0
        self._empty = asyncio.Event()
        self._empty.set()

    def take(self, key: str = "") -> Place:
        """A place for somebody with a key, or with none; or an error that says when to ask again."""
        place = Place(self, key)
        place.more(1)
        return place

    def seconds(self) -> float:
        """How long it takes until those that wait now have their turn, if answers take as long as they did."""
        turns = max(1, self.held - self.answering) / self.answering
        return min(LONGEST, max(1.0, self._mean * turns))

    async def empty(self) -> None:
        """Wait until nobody holds a place."""
        await self._empty.wait()

    def _refuse(self, key: str, count: int, mine: int) -> None:
        """Raise an error if somebody who holds `mine` for a request cannot have so many more."""
        several = mine + count > 1
        if self.held + count > (self.share if several else self.most):
            raise overloaded(self.seconds())
        if key and self._by[key] + count > self.share:
            raise overloaded(self.seconds(), " This key has its share of them.")

    def _change(self, key: str, count: int) -> None:
        self.held += count
        self._by[key] += count
        if not self._by[key]:
            del self._by[key]
        self._empty.set() if self.held == 0 else self._empty.clear()


class Place:
    """The place of one request; as many as it has choices."""

    def __init__(self, places: Places, key: str) -> None:
        self._places, self._key, self._count, self._since = places, key, 0, monotonic()

    def more(self, count: int) -> None:
        """Hold so many more, or none more."""
        if count:
            self._places._refuse(self._key, count, self._count)
            self._count += count
            self._places._change(self._key, count)

    def give_back(self, answered: bool = True) -> None:
        """Somebody else's turn. What was refused says nothing about how long answers take."""
        if answered:
            self._places._mean += WEIGHT * (monotonic() - self._since - self._places._mean)
        self._places._change(self._key, -self._count)
        self._count = 0
