"""Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.define import canonical


@canonical("attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention with grouped heads: `query` may have a multiple of the heads of `key` and `value`.

    Shapes are `[batch, heads, length, head]`. `causal` hides later positions, `window` (when not 0) those that many
    steps back or more; `mask` is boolean (true: seen) or added. `softcap` (when not 0) bounds scores by a tanh.

    >>> zeros = torch.zeros(1, 2, 3, 2)
    >>> attention(torch.zeros(1, 4, 3, 2), zeros, zeros + 1, None, 1.0, True, 0, 0.0).shape
    torch.Size([1, 4, 3, 2])
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated(each, groups) for each in (key, value))
    if causal:
        mask = _causal(query, key, window)
    if not softcap:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        added = (
            torch.where(mask, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype) if mask.dtype == torch.bool else mask
        )
        scores = scores + added
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)


def _repeated(heads: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return heads
    batch, count, length, size = heads.shape
    return heads[:, :, None].expand(batch, count, groups, length, size).reshape(batch, count * groups, length, size)


def _causal(query: Tensor, key: Tensor, window: int) -> Tensor:
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)[None, :]
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen
