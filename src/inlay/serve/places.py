"""How many answers a server has in its hands at once. A place is held until the answer is sent, or nobody wants it."""

from __future__ import annotations

import asyncio
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
        self._mean = 1.0
        self._empty = asyncio.Event()
        self._empty.set()

    def take(self) -> Place:
        """A place, or an error that says when to ask again."""
        place = Place(self)
        place.more(1)
        return place

    def seconds(self) -> float:
        """How long it takes until those that wait now have their turn, if answers take as long as they did."""
        turns = max(1, self.held - self.answering) / self.answering
        return min(LONGEST, max(1.0, self._mean * turns))

    async def empty(self) -> None:
        """Wait until nobody holds a place."""
        await self._empty.wait()

    def _change(self, count: int) -> None:
        self.held += count
        self._empty.set() if self.held == 0 else self._empty.clear()


class Place:
    """The place of one request; as many as it has choices."""

    def __init__(self, places: Places) -> None:
        self._places, self._count, self._since = places, 0, monotonic()

    def more(self, count: int) -> None:
        """Hold so many more, or none more."""
        if self._places.held + count > self._places.most:
            raise overloaded(self._places.seconds())
        self._count += count
        self._places._change(count)

    def give_back(self, answered: bool = True) -> None:
        """Somebody else's turn. What was refused says nothing about how long answers take."""
        if answered:
            self._places._mean += WEIGHT * (monotonic() - self._since - self._places._mean)
        self._places._change(-self._count)
        self._count = 0
