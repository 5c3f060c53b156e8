"""Attention under masks that are made of positions: comparisons, sums of whole and broken constants, and and or."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LENGTH = "length"
"""The name of the axis of positions."""
_COMPARE = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)
_LARGEST = 12
"""The largest constant; a side of a comparison adds up to four of them."""


def attention_under_masks(rng: random.Random) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function that makes a mask and reads it once or twice, and arguments for it."""
    mask = _mask(rng)
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    form = rng.choice(("seen", "seen", "lowest", "infinite"))
    layers = rng.choice((1, 1, 2))
    length, heads = rng.randint(3, 9), rng.choice((1, 2))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        seen = mask(places[:, None], places[None, :])[None, None]
        hidden = torch.finfo(q.dtype).min if form == "lowest" else float("-inf")
        given = seen if form == "seen" else torch.where(seen, 0.0, hidden).to(q.dtype)
        x = sdpa(q, k, v, attn_mask=given)
        return sdpa(x.tanh(), k, v, attn_mask=given) if layers == 2 else x

    return attention, [torch.ones(rng.choice((1, 2)), heads, length, 4, dtype=dtype)] * 3


def _mask(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Usually causal, or causal within a window, written in one of many ways; seldom anything else."""
    steps = [_causal(rng) if rng.random() < 0.9 else _any(rng)]
    steps += [_window(rng) if rng.random() < 0.75 else _any(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    joins = [operator.and_ if rng.random() < 0.9 else operator.or_ for _ in steps[1:]]

    def mask(rows: Tensor, columns: Tensor) -> Tensor:
        seen = steps[0](rows, columns)
        for join, step in zip(joins, steps[1:], strict=True):
            seen = join(seen, step(rows, columns))
        return seen

    return mask


def _causal(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Columns up to the row, the same constant added on both sides."""
    added = _constants(rng, rng.choice((0, 0, 1, 2)))
    if rng.random() < 0.5:
        return lambda rows, columns: _plus(columns, added) <= _plus(rows, added)
    return lambda rows, columns: _plus(rows, [*added, 1]) > _plus(columns, added)


def _window(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    """Columns later than the row less a window, the window in up to four parts."""
    parts = [-abs(each) for each in _constants(rng, rng.choice((1, 1, 2, 4)))]
    if rng.random() < 0.5:
        return lambda rows, columns: columns > _plus(rows, parts)
    return lambda rows, columns: rows - columns < -sum(parts)


def _any(rng: random.Random) -> Callable[[Tensor, Tensor], Tensor]:
    compare = rng.choice(_COMPARE)
    left, right = (_constants(rng, rng.choice((0, 1, 2))) for _ in range(2))
    return lambda rows, columns: compare(_plus(columns, left), _plus(rows, right))


def _constants(rng: random.Random, count: int) -> list[float]:
    whole = [rng.randint(1, _LARGEST) * rng.choice((1, 1, -1)) for _ in range(count)]
    return [each + rng.choice((0.0, 0.0, 0.5)) if rng.random() < 0.2 else each for each in whole]


def _plus(positions: Tensor, constants: list[float]) -> Tensor:
    for constant in constants:
        positions = positions + constant
    return positions
