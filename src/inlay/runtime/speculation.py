"""Speculation: which drafted tokens a step verifies, and whether the package gives the same logits for them.

A verify call is a decode call in which a sequence has several rows: its last token, and its draft. All rows are sampled
as in single steps, up to the first that differs from the draft, so the tokens are those of single steps.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inlay.lowering.executable import Executable
    from inlay.runtime.kv.prefix_cache import SequenceState

    Row = tuple[list[int], int, int]
    """Tokens, their slot, and the number of tokens before them."""

_WEIGHT = 0.2
"""The weight of a call in the moving average of its cost."""
_LIFETIME = 1000
"""Calls after which a cost that was not measured again is forgotten."""
_CHECKED_ROWS = 3
"""Rows of the first verify call of each size that are compared with single steps."""


class Speculation:
    """The drafts of an engine. `most`: the maximum of drafted tokens of a sequence in a step."""

    def __init__(self, package: Executable, most: int) -> None:
        self._most = most
        self._most_rows = package.buckets[-1][0].sizes.get("batch", (1, 1))[1] or 1
        self.costs = CallCosts()
        self._exact: set[int] = set()
        self._may_share_problem = self.problem = package.shared_slot_problem
        """Why no tokens are drafted; empty if they may be."""
        if most < 1 or self._most_rows < 2:
            self.problem = "it is disabled" if most < 1 else "the package decodes one token at a time"

    @property
    def max_rows(self) -> int:
        """How many rows of a call may share a slot."""
        return 1 if self._may_share_problem else self._most_rows

    def draft(self, sequences: Iterable[SequenceState]) -> dict[int, list[int]]:
        """Return the tokens that the next step verifies, by sequence. It decodes all of these sequences."""
        if self.problem:
            return {}
        found = [
            (each.handle.id, *each.drafter.draft(each.generation.history, min(self._most, each.generation.left - 1)))
            for each in sequences
        ]
        counts = choose_lengths([(len(tokens), chance) for _, tokens, chance in found], self._most_rows, self.costs)
        return {id_: tokens[:count] for (id_, tokens, _), count in zip(found, counts, strict=True) if count}

    def is_exact(
        self, rows: Sequence[Row], scores: torch.Tensor, run: Callable[[list[Row]], torch.Tensor | None]
    ) -> bool:
        """Whether single steps give the logits of a verify call bit by bit; if not, no tokens are drafted any more.

        The first call of each number of rows is checked: `run` repeats some rows of one sequence, one by one. If it
        returns None, it has ended the sequences.
        """
        if len(rows) in self._exact:
            return True
        slot, _ = Counter(slot for _, slot, _ in rows).most_common(1)[0]
        for place in [place for place, row in enumerate(rows) if row[1] == slot][:_CHECKED_ROWS]:
            if (alone := run([rows[place]])) is None:
                return False
            if not torch.equal(alone[0].view(torch.int32), scores[place].view(torch.int32)):
                self.problem = f"last bits of the logits differ between calls of 1 and {len(rows)} rows"
                return False
        self._exact.add(len(rows))
        return True


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
