"""Normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op


@canonical_op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool) -> Tensor:
    """`x / rms(x) * (weight + offset)`, computed in float32 at least.

    `cast_first` rounds to x's dtype before the weight is applied, as Llama does; Gemma applies it first.

    >>> rms_norm(torch.ones(1, 4), torch.ones(4), 0.0, 0.0, True)
    tensor([[1., 1., 1., 1.]])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        return (weight + offset if offset else weight) * normed.to(x.dtype)
    scale = weight.to(wide.dtype)
    return (normed * (scale + offset if offset else scale)).to(x.dtype)


@canonical_op("add_rms_norm")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the normalized sum of x and residual, and the sum itself."""
    total = x + residual
    return rms_norm(total, weight, eps, offset, cast_first), total
