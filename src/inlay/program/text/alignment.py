"""Alignment of two long sequences in near-linear time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_WINDOW = 16
_MAX_EXACT_GAP = 400
"""Gaps of at most this many items on each side are aligned exactly, in quadratic time."""


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return pairs of positions of equal items, in order on both sides.

    Long sequences are first pinned at runs of items that occur once on each side (patience diff), then at single items
    that occur once. Only the gaps between pins are compared exactly.

    >>> align("abcdef", "abxdef")
    [(0, 0), (1, 1), (3, 3), (4, 4), (5, 5)]
    """
    pairs: list[tuple[int, int]] = []
    todo = [(0, len(left), 0, len(right))]
    while todo:
        a, b, c, d = todo.pop()
        while a < b and c < d and left[a] == right[c]:
            pairs.append((a, c))
            a, c = a + 1, c + 1
        while a < b and c < d and left[b - 1] == right[d - 1]:
            b, d = b - 1, d - 1
            pairs.append((b, d))
        if a == b or c == d:
            continue
        pins = _pins(left, right, a, b, c, d)
        if pins:
            edges = [(a - 1, c - 1), *pins, (b, d)]
            pairs.extend(pins)
            todo.extend((x + 1, u, y + 1, v) for (x, y), (u, v) in pairwise(edges) if u > x + 1 and v > y + 1)
        elif b - a <= _MAX_EXACT_GAP and d - c <= _MAX_EXACT_GAP:
            blocks = SequenceMatcher(None, left[a:b], right[c:d], autojunk=False).get_matching_blocks()
            pairs.extend((a + i + k, c + j + k) for i, j, size in blocks for k in range(size))
    return sorted(pairs)


def _pins(left: Sequence[Hashable], right: Sequence[Hashable], a: int, b: int, c: int, d: int) -> list[tuple[int, int]]:
    for width in (_WINDOW, 1):
        if min(b - a, d - c) < width:
            continue
        ours = _unique_windows(left, a, b, width)
        theirs = _unique_windows(right, c, d, width)
        common = sorted((ours[key], theirs[key]) for key in ours.keys() & theirs.keys())
        # Windows are compared by hash; a pin must be equal.
        common = [(i, j) for i, j in common if left[i] == right[j]]
        if common:
            return _longest_increasing(common)
    return []


def _unique_windows(items: Sequence[Hashable], start: int, stop: int, width: int) -> dict[Hashable, int]:
    keys: list[Hashable]
    if width == 1:
        keys = list(items[start:stop])
    else:
        hashes = [hash(item) for item in items[start:stop]]
        keys = [tuple(hashes[i : i + width]) for i in range(stop - start - width + 1)]
    counts = Counter(keys)
    return {key: start + index for index, key in enumerate(keys) if counts[key] == 1}


def _longest_increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of pairs that increases on both sides; `pairs` are sorted by the left."""
    tails: list[int] = []
    where: list[int] = []
    before: list[int] = []
    for index, (_, right) in enumerate(pairs):
        at = bisect_left(tails, right)
        before.append(where[at - 1] if at else -1)
        if at == len(tails):
            tails.append(right)
            where.append(index)
        else:
            tails[at], where[at] = right, index
    result, index = [], where[-1]
    while index >= 0:
        result.append(pairs[index])
        index = before[index]
    return result[::-1]
