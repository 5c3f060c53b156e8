"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op


@canonical_op("rope")
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin`: pairs are elements of the two halves of the last axis.

    >>> rope(torch.tensor([[1.0, 2.0]]), torch.zeros(2), torch.ones(2))
    tensor([[-2.,  1.]])
    """
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + rotated * sin


@canonical_op("rope_interleaved")
def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x * cos + rotate_pairs(x) * sin`: pairs are neighboring elements of the last axis.

    >>> rope_interleaved(torch.tensor([[1.0, 2.0]]), torch.zeros(2), torch.ones(2))
    tensor([[-2.,  1.]])
    """
    rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + rotated * sin
