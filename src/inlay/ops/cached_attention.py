"""Attention over a cache with one slot per sequence. Only filled rows are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inlay.ops.attention import attention
from inlay.ops.registration import check_range, custom_op

_TENSOR = "AtenTensorHandle"
_MOST_POSITIONS = 2**31 - 1
_SHIM = f"{', '.join([_TENSOR] * 5)}, double, int64_t, double, {_TENSOR}*, {_TENSOR}*, int32_t"


@custom_op("cached_attention", _SHIM)
def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tiled: bool = False,
) -> Tensor:
    """Causal attention of `query`, `[batch, heads, length, head]`, over the cached rows of its sequences.

    Sequence i is in `keys[slots[i]]` and `values[slots[i]]`, `[slot, heads, room, head]`: `lengths[i]` rows of
    earlier calls, then the rows of this call, which are already written. No other row is read. With a window, a
    slot may be a ring: the row of a position is the position modulo `room`, and a sequence may be longer than
    `room`, which must cover the window and the rows of this call (`window + length - 1`). Caches may have another
    dtype than `query`. With `tiled`, the C++ kernel multiplies many rows at once if the processor supports it. The
    result of a row depends on `tiled`, but never on other rows. The other arguments are those of `attention`. A
    slot that does not exist, or a length without room for the rows of this call, is an error, also in the C++
    kernel.

    >>> rows = torch.full((2, 1, 4, 2), float("nan"))
    >>> rows[1, :, :3] = 1.0
    >>> cached_attention(torch.ones(1, 1, 1, 2), rows, rows, torch.tensor([1]), torch.tensor([2]), 1.0, 0, 0.0)
    tensor([[[[1., 1.]]]])
    """
    batch, _, length, _ = query.shape
    room = keys.shape[2]
    is_ring = window and length and window + length - 1 <= room
    check_range("slot", slots, keys.shape[0] - 1)
    check_range("length", lengths, max(room - length, _MOST_POSITIONS - room - length if is_ring else 0))
    results = _empty_result(query, values)
    plain = not softcap and slopes is None and sinks is None
    for index, (slot, before) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        filled = before + length
        first = max(0, filled - window - length + 1) if window else 0
        rows = query[index : index + 1]
        key, value = (_read(each[slot : slot + 1], first, filled).to(query.dtype) for each in (keys, values))
        if plain and (length == 1 or (before == 0 and not window)):
            causal = length > 1
            result = scaled_dot_product_attention(rows, key, value, scale=scale, is_causal=causal, enable_gqa=True)
        else:
            mask = _causal_mask(before, length, first, window)
            bias = slopes.reshape(-1) if slopes is not None else None
            # Slopes count keys from the first one that is read, so the scores of sinks are moved as far.
            moved = sinks if sinks is None or bias is None else (sinks.reshape(-1) - bias * first).to(sinks.dtype)
            result = attention(rows, key, value, mask, scale, False, 0, softcap, slopes=bias, sinks=moved)
        if batch == 1 and result.transpose(1, 2).is_contiguous():
            return result
        results[index : index + 1] = result
    return results


@cached_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *_: object, **__: object) -> Tensor:
    return _empty_result(query, values)


def _empty_result(query: Tensor, values: Tensor) -> Tensor:
    """Allocate the result with adjacent heads in memory, the layout that its readers use."""
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, values.shape[3]).transpose(1, 2)


def _read(cache: Tensor, first: int, filled: int) -> Tensor:
    """Return the rows of the positions from `first` to `filled` of one slot."""
    room = cache.shape[2]
    return cache[:, :, first:filled] if filled <= room else cache[:, :, torch.arange(first, filled) % room]


def _causal_mask(before: int, length: int, first: int, window: int) -> Tensor:
    """Return which rows from `first` on are visible to each new position."""
    rows = torch.arange(before, before + length)[:, None]
    columns = torch.arange(first, before + length)[None, :]
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen
