"""Short convolutions between two gates."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op, register_kernel


@canonical_op("gated_short_conv")
def gated_short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """`after * conv(before * value)`, a causal convolution of each channel over a few rows.

    `x` is `[batch, length, 3 * channels]`: `before`, `after` and `value` concatenated. `weight` is
    `[channels, 1, taps]`; its last tap applies to the current row.

    >>> rows = torch.tensor([[[1.0, 1.0, 2.0], [1.0, 1.0, 3.0]]])
    >>> gated_short_conv(rows, torch.tensor([[[10.0, 1.0]]])).flatten()
    tensor([ 2., 23.])
    """
    channels, _, taps = weight.shape
    before, after, value = torch.split(x.transpose(-1, -2), channels, -2)
    convolved = torch.nn.functional.conv1d(before * value, weight, None, 1, taps - 1, 1, channels)
    return (after * convolved[..., : x.shape[-2]]).transpose(-1, -2).contiguous()


@register_kernel("gated_short_conv", "CUDA")
def _gated_short_conv_cuda(x: Tensor, weight: Tensor) -> Tensor:
    """One Triton kernel. Not timed, and not verified on a GPU."""
    from inlay.ops.short_conv_triton import launch

    return launch(x, weight)
