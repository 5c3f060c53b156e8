"""Seeded workloads: sessions of several turns with shared prefixes and growing context."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from inlay.runtime.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Range = tuple[int, int]
"""Lowest and highest value, both included."""


@dataclass(frozen=True)
class WorkloadShape:
    """What sessions look like. Numbers of tokens are drawn uniformly from ranges."""

    prefixes: int
    """Number of different shared prefixes (system prompts, tool descriptions)."""
    prefix_tokens: Range
    popularity: float
    """Exponent of the Zipf distribution of the prefixes; 0: all equally popular."""
    task_tokens: Range
    """Tokens after the prefix that all sessions of a burst share."""
    burst: Range
    """Sessions that start at once."""
    turns: Range
    input_tokens: Range
    """New tokens in each turn: a user's message or the result of a tool."""
    answer_tokens: Range
    pause: float
    """Mean seconds between an answer and the next turn; exponentially distributed."""


CHAT = WorkloadShape(100, (200, 600), 1.0, (0, 0), (1, 1), (2, 8), (10, 100), (16, 96), 8.0)
"""Conversations: a system prompt for each application, think time between turns."""
AGENT = WorkloadShape(60, (500, 900), 1.0, (40, 120), (1, 6), (4, 14), (16, 80), (8, 32), 0.5)
"""Agents: long tool descriptions, bursts of subagents with the same task, many short turns in rapid succession."""
SHAPES = {"chat": CHAT, "agent": AGENT}


class Session:
    """The turns of one session. Everything is drawn from its own random generator, whatever the cluster does."""

    def __init__(
        self,
        number: int,
        shape: WorkloadShape,
        rng: random.Random,
        start: Sequence[int],
        tokens: Sequence[int],
        room: int,
    ) -> None:
        self.number, self._shape, self._rng, self._tokens, self._room = number, shape, rng, tokens, room
        self._history = list(start)
        self._turns_left = rng.randint(*shape.turns)
        self.turn = 0

    def next_turn(self) -> tuple[Request, list[int]] | None:
        """Return the next request and its answer; None after the last turn, or if the context is full."""
        if not self._turns_left:
            return None
        rng, shape = self._rng, self._shape
        self._history += rng.choices(self._tokens, k=max(1, rng.randint(*shape.input_tokens)))
        count = rng.randint(*shape.answer_tokens)
        if len(self._history) + count > self._room:
            self._turns_left = 0
            return None
        request = Request(tuple(self._history), max_tokens=count, ignore_eos=True)
        answer = rng.choices(self._tokens, k=count)
        self._history += answer
        self._turns_left -= 1
        self.turn += 1
        return request, answer

    def pause(self) -> float:
        """Return the seconds until the next turn."""
        return self._rng.expovariate(1 / self._shape.pause) if self._shape.pause else 0.0


@dataclass(frozen=True)
class Workload:
    """Sessions that arrive at random times, whether or not earlier ones have ended."""

    shape: WorkloadShape
    rate: float
    """Sessions per second."""
    seconds: float
    """Duration of the arrivals."""
    seed: int = 0
    room: int = 2048
    """Most tokens in the context of a session."""
    vocabulary: Range = (1000, 40000)

    def sessions(self) -> Iterator[tuple[float, Session]]:
        """Yield sessions with their arrival times, in order.

        >>> few = Workload(CHAT, rate=2.0, seconds=10.0)
        >>> [at for at, _ in few.sessions()] == [at for at, _ in few.sessions()]
        True
        """
        shape, rng = self.shape, random.Random(f"{self.seed} arrivals")
        tokens = list(range(*self.vocabulary))  # all prompts share these objects, which saves memory
        prefixes = [self._prefix(each, tokens) for each in range(shape.prefixes)]
        weights = list(accumulate(1 / (each + 1) ** shape.popularity for each in range(shape.prefixes)))
        mean = (shape.burst[0] + shape.burst[1]) / 2
        at, number = 0.0, 0
        while (at := at + rng.expovariate(self.rate / mean)) < self.seconds:
            (prefix,) = rng.choices(prefixes, cum_weights=weights)
            start = [*prefix, *rng.choices(tokens, k=rng.randint(*shape.task_tokens))]
            for _ in range(rng.randint(*shape.burst)):
                own = random.Random(f"{self.seed} session {number}")
                yield at, Session(number, shape, own, start, tokens, self.room)
                number += 1

    def _prefix(self, number: int, tokens: Sequence[int]) -> list[int]:
        rng = random.Random(f"{self.seed} prefix {number}")
        return rng.choices(tokens, k=rng.randint(*self.shape.prefix_tokens))
