"""Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op


@canonical_op("attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    zero_rows: bool = True,
) -> Tensor:
    """Attention with grouped heads: `query` may have a multiple of the heads of `key` and `value`.

    Shapes are `[batch, heads, length, head]`. `causal` masks later positions, and with it `window` (if not 0) masks
    positions that many steps back or more. `mask` is boolean (true: visible) or added. `softcap` (if not 0) bounds
    scores by a tanh. `slopes`, one per head in any shape, adds slope times key position (ALiBi). `sinks`, one per head,
    is a score in the softmax without a value. If all scores of a row are -inf, its result is 0 with `zero_rows`, as in
    torch's attention, and otherwise NaN, as in a softmax. With sinks it is always 0, with a soft cap always NaN.

    >>> zeros = torch.zeros(1, 2, 3, 2)
    >>> attention(torch.zeros(1, 4, 3, 2), zeros, zeros + 1, None, 1.0, True, 0, 0.0).shape
    torch.Size([1, 4, 3, 2])
    >>> attention(zeros, zeros, zeros + 1, None, 1.0, True, 0, 0.0, sinks=torch.zeros(2))[0, 0]
    tensor([[0.5000, 0.5000],
            [0.6667, 0.6667],
            [0.7500, 0.7500]])
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeat_kv(each, groups) for each in (key, value))
    if causal:
        mask = _causal_mask(query, key, window)
    if slopes is not None:
        mask = _add_alibi_bias(mask, slopes, query, key)
    if zero_rows and not softcap and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + _additive_mask(mask, scores.dtype)
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    return torch.matmul(weights, value)


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as a tensor to add to the scores."""
    return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype) if mask.dtype == torch.bool else mask


def _add_alibi_bias(mask: Tensor | None, slopes: Tensor, query: Tensor, key: Tensor) -> Tensor:
    positions = torch.arange(key.shape[2], device=key.device)
    bias = (slopes.reshape(1, -1, 1, 1) * positions).to(query.dtype)
    return bias if mask is None else bias + _additive_mask(mask, query.dtype)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    batch, heads, rows, _ = scores.shape
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1]


def _repeat_kv(heads: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return heads
    batch, count, length, size = heads.shape
    return heads[:, :, None].expand(batch, count, groups, length, size).reshape(batch, count * groups, length, size)


def _causal_mask(query: Tensor, key: Tensor, window: int) -> Tensor:
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)[None, :]
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen
