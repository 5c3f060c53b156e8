"""Prompt lookup: where the last tokens of a sequence occurred before, the tokens that followed are a draft.

Rewriting a text or editing code repeats long parts of the prompt.
"""

from __future__ import annotations

MATCH_SIZES = (4, 3, 2)
"""How many of the last tokens must have occurred before. The longest match counts."""
_INDEXED = 1 << 16
"""Tokens of a prompt that are indexed: the last ones."""
_KEPT_DRAFT, _KEPT_STEP = 0.85, 0.98
"""What remains of the weight of earlier drafts after a draft, and after a step. Without news, the estimate returns to
one half, so that drafts are tried again."""


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
