"""Speculation by prompt lookup: drafts come from the sequence itself, and a decode call verifies them.

Rewriting a text or editing code repeats long parts of the prompt. Where the last tokens of a sequence occurred before,
the tokens that followed are a draft of the next ones. A verify call is a decode call in which the sequence has several
rows: its last token, and the draft. All rows are sampled as in single steps, up to the first that differs from the
draft, so the tokens are those of single steps.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MATCH_SIZES = (4, 3, 2)
"""How many of the last tokens must have occurred before. The longest match counts."""
_INDEXED = 1 << 16
"""Tokens of a prompt that are indexed: the last ones."""
_KEPT_DRAFT, _KEPT_STEP = 0.85, 0.98
"""What remains of the weight of earlier drafts after a draft, and after a step. Without news, the estimate returns to
one half, so that drafts are tried again."""
_WEIGHT = 0.2
"""The weight of a call in the moving average of its cost."""
_LIFETIME = 1000
"""Calls after which a cost that was not measured again is forgotten."""


class PromptLookup:
    """An index of the n-grams of one growing sequence."""

    def __init__(self) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in MATCH_SIZES}
        """Size → n-gram → the position after its latest occurrence, which is not the end of the sequence."""
        self._next = 0

    def find(self, tokens: list[int], most: int) -> tuple[list[int], int]:
        """Return `most` tokens that may follow, and how many of the last tokens occurred before them; or `[], 0`.

        Each call passes the same sequence, grown or not. A match that overlaps the end is repeated.

        >>> PromptLookup().find([7, 8, 9, 5, 7, 8], 3)
        ([9, 5, 7], 2)
        >>> PromptLookup().find([1, 2, 1, 2], 3)
        ([1, 2, 1], 2)
        """
        end = len(tokens)
        for stop in range(max(self._next, end - _INDEXED, MATCH_SIZES[-1]), end):
            for size, ends in self._ends.items():
                if size <= stop:
                    ends[tuple(tokens[stop - size : stop])] = stop
        self._next = end
        for size, ends in self._ends.items():
            start = ends.get(tuple(tokens[-size:]))
            if start is not None:
                return [tokens[start + place % (end - start)] for place in range(most)], size
        return [], 0


class Drafter:
    """Drafts tokens of one sequence, and estimates how many of them are accepted."""

    def __init__(self) -> None:
        self._lookup = PromptLookup()
        self._accepted, self._tried = dict.fromkeys((*MATCH_SIZES, 0), 0.0), dict.fromkeys((*MATCH_SIZES, 0), 0.0)
        """Size of the match → weight of the drafted tokens that were accepted, and of those that were sampled."""
        self._size = 0

    def draft(self, tokens: list[int], most: int) -> tuple[list[int], float]:
        """Return a draft, and the probability that a token of it is accepted if those before it are."""
        self._fade(_KEPT_STEP)
        found, self._size = self._lookup.find(tokens, most)
        return found, (self._accepted[self._size] + 1) / (self._tried[self._size] + 2)

    def note(self, accepted: int, *, rejected: bool) -> None:
        """Record how many tokens of the last draft were accepted, and whether the next one was rejected."""
        self._fade(_KEPT_DRAFT)
        self._accepted[self._size] += accepted
        self._tried[self._size] += accepted + rejected

    def _fade(self, kept: float) -> None:
        for weights in (self._accepted, self._tried):
            for size in weights:
                weights[size] *= kept


class CallCosts:
    """Seconds of decode calls by number of rows, measured by the engine that makes the calls.

    >>> costs = CallCosts()
    >>> for seconds in (9.0, 1.0):
    ...     costs.note(1, seconds)
    ...     costs.note(5, 2 * seconds)
    >>> [costs.seconds(rows) for rows in (1, 3, 5, 8)]
    [1.0, 1.5, 2.0, 2.0]
    """

    def __init__(self) -> None:
        self._calls = 0
        self._seen: set[int] = set()
        self._known: dict[int, tuple[float, int]] = {}
        """Rows → the moving average, and the number of the last call."""

    def note(self, rows: int, seconds: float) -> None:
        """Record a call. The first of each size is ignored, because it allocates memory."""
        self._calls += 1
        if rows in self._seen:
            average, _ = self._known.get(rows, (seconds, 0))
            average += _WEIGHT * (seconds - average)
            self._known[rows] = max(average, 1e-9), self._calls  # a coarse clock may measure 0
        self._seen.add(rows)
        self._known = {size: row for size, row in self._known.items() if row[1] > self._calls - _LIFETIME}

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a call: between two measured sizes a line, beyond them a constant.

        So a larger call that was never made seems to cost nothing more, and is tried.
        """
        below = max((size for size in self._known if size <= rows), default=None)
        above = min((size for size in self._known if size >= rows), default=None)
        if below is None or above is None:
            nearest = below or above
            return self._known[nearest][0] if nearest else 1.0
        low, high = self._known[below][0], self._known[above][0]
        return low + (high - low) * (rows - below) / (above - below) if above > below else low


def choose_lengths(drafts: Sequence[tuple[int, float]], rows: int, costs: CallCosts) -> list[int]:
    """Return how many tokens of each draft to verify, so that a call gives the most tokens per second.

    `drafts`: the length of each sequence's draft, and the probability that a token of it is accepted if those before it
    are. Token n of a draft is accepted with the n-th power. The likeliest tokens are added as long as the expected
    tokens divided by the expected seconds of the call is largest. Without drafts, a call gives one token per sequence.
    `rows` is the maximum of rows in a call.

    >>> costs = CallCosts()
    >>> for rows, seconds in [(1, 1.0), (8, 2.0)] * 2:
    ...     costs.note(rows, seconds)
    >>> choose_lengths([(7, 0.9)], 8, costs), choose_lengths([(7, 0.1)], 8, costs)
    ([7], [0])
    """
    gains = sorted(((-(chance ** (n + 1)), place) for place, (most, chance) in enumerate(drafts) for n in range(most)))
    gains = gains[: max(0, rows - len(drafts))]
    if not gains:
        return [0] * len(drafts)
    tokens = accumulate((-gain for gain, _ in gains), initial=float(len(drafts)))
    rates = [expected / costs.seconds(len(drafts) + count) for count, expected in enumerate(tokens)]
    chosen = Counter(place for _, place in gains[: rates.index(max(rates))])
    return [chosen[place] for place in range(len(drafts))]
