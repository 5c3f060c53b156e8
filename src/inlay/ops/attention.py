"""Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.define import canonical


@canonical("attention")
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Attention with grouped heads: `query` may have a multiple of the heads of `key` and `value`.

    Shapes are `[batch, heads, length, head]`. `causal` hides later positions; `mask` is boolean (true: seen) or added.

    >>> attention(torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 3, 2), torch.ones(1, 2, 3, 2), None, 1.0, True).shape
    torch.Size([1, 4, 3, 2])
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        batch, heads, length, size = key.shape
        key = key[:, :, None].expand(batch, heads, groups, length, size).reshape(batch, heads * groups, length, size)
        size = value.shape[-1]
        value = value[:, :, None].expand(batch, heads, groups, length, size)
        value = value.reshape(batch, heads * groups, length, size)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )
