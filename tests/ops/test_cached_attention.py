"""Attention over a cache: what attention over the whole sequence gives, and no row read that was not filled."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import inlay.ops  # noqa: F401 - registers the operators

pytestmark = pytest.mark.fast
inlay_ops: Any = torch.ops.inlay
ROOM, SLOTS, SCALE = 24, 5, 0.3
HEADS = ((4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 4))
"""Heads of queries and of keys, size of a key, size of a value."""
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "slopes": {"slopes": True},
    "slopes in a column": {"slopes": "column"},
    "sinks": {"sinks": True},
    "softcap and slopes": {"softcap": 5.0, "slopes": True},
    "softcap and sinks": {"softcap": 5.0, "sinks": True},
}
BOTH = {"slopes": True, "sinks": True}
BEFORE = ([0], [7], [0, 0], [3, 9, 0], [11, 4])


def _check(
    shape: tuple[int, ...],
    how: dict[str, Any],
    window: int,
    before: list[int],
    new: int,
    dtype: Any,
    room: int = ROOM,
) -> None:
    heads, groups, size, out = shape
    made = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=made).to(dtype)

    keys, values = (torch.full((SLOTS, groups, room, each), float("nan"), dtype=dtype) for each in (size, out))
    slots = [4, 0, 2][: len(before)]
    longest = max(before) + new
    sizes = ((heads, longest, size), (groups, longest, size), (groups, longest, out))
    query, key, value = (random(len(before), *each) for each in sizes)
    for row, (slot, held) in enumerate(zip(slots, before, strict=True)):
        # Rows that left the window stay NaN.
        positions = torch.arange(max(0, held - window + 1) if window else 0, held + new)
        keys[slot, :, positions % room] = key[row, :, positions]
        values[slot, :, positions % room] = value[row, :, positions]
    slopes = torch.linspace(0.1, 0.5, heads) if how.get("slopes") else None
    slopes = slopes.view(-1, 1, 1) if slopes is not None and how["slopes"] == "column" else slopes
    rest = (SCALE, window, how.get("softcap", 0.0), slopes, random(heads) if how.get("sinks") else None)
    asked = torch.stack([query[row, :, held : held + new] for row, held in enumerate(before)])
    found = inlay_ops.cached_attention(asked, keys, values, torch.tensor(slots), torch.tensor(before), *rest)
    assert found.shape == (len(before), heads, new, out)
    assert found.dtype == dtype
    for row, held in enumerate(before):
        whole = [each[row : row + 1, :, : held + new] for each in (query, key, value)]
        expected = inlay_ops.attention(*whole, None, rest[0], True, *rest[1:3], slopes=slopes, sinks=rest[4])
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[row], expected[0, :, held:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("window", [0, 1, 5])
def test_as_over_the_whole_sequence(how: str, window: int) -> None:
    for shape, before, new in itertools.product(HEADS, BEFORE, (1, 4)):
        _check(shape, HOW[how], window, before, new, torch.float32)


def test_slopes_and_sinks() -> None:
    for before, new in itertools.product(BEFORE, (1, 4)):
        _check(HEADS[1], BOTH, 0, before, new, torch.float32)


def test_slopes_and_sinks_in_a_window() -> None:
    """Keys count from the first of the sequence, not of the window: a sink can tell."""
    for before, new in itertools.product(BEFORE, (1, 4)):
        _check(HEADS[1], BOTH, 5, before, new, torch.float32)


@pytest.mark.parametrize("how", ["plain", "softcap", "slopes", "sinks"])
@pytest.mark.parametrize("window", [0, 5])
def test_half_precision(how: str, window: int) -> None:
    for before, new in itertools.product(BEFORE, (1, 4)):
        _check(HEADS[1], HOW[how], window, before, new, torch.bfloat16)


def test_a_slot_filled_to_the_brim() -> None:
    _check(HEADS[1], {}, 0, [ROOM - 4, 0], 4, torch.float32)


@pytest.mark.parametrize(
    ("how", "dtype"),
    [*((each, torch.float32) for each in (*HOW, "slopes and sinks")), ("plain", torch.bfloat16)],
)
def test_rings(how: str, dtype: torch.dtype) -> None:
    """Sequences of several times the rows of a slot, which are as few as may be, or more."""
    for (window, new), more, before in itertools.product(
        ((1, 1), (5, 1), (5, 4), (3, 7), (7, 3)), (0, 1, 4), ([0], [60, 3], [11, 7, 26])
    ):
        _check(HEADS[1], HOW.get(how, BOTH), window, before, new, dtype, window + new - 1 + more)


@pytest.mark.parametrize(("window", "room"), [(0, 8), (8, 8), (6, 8)])
def test_a_ring_without_room(window: int, room: int) -> None:
    """A slot must cover the window before the first of 4 new rows, and these."""
    with pytest.raises(IndexError, match="length 5 at 0 is not from 0 to 4"):
        _check(HEADS[1], {}, window, [5], 4, torch.float32, room)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (4, 20.0)])
def test_opcheck(new: int, window: int, softcap: float) -> None:
    held = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    query = torch.randn(2, 4, new, 4, generator=torch.Generator().manual_seed(1))
    args = (query, held, held * 2, torch.tensor([2, 0]), torch.tensor([4, 1]), SCALE, window, softcap)
    torch.library.opcheck(inlay_ops.cached_attention.default, args)
    torch.library.opcheck(inlay_ops.cached_attention.default, (*args, torch.ones(4), torch.ones(4)))
