"""Gated activations of feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import canonical_op


@canonical_op("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`

    >>> swiglu(torch.zeros(2), torch.ones(2))
    tensor([0., 0.])
    """
    return torch.nn.functional.silu(gate) * up


@canonical_op("geglu")
def geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """`gelu(gate) * up`"""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


@canonical_op("clamped_swiglu")
def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with gate clamped to `limit` and up to `[-limit, limit]`.

    >>> clamped_swiglu(torch.tensor([9.0]), torch.tensor([-9.0]), 1.0, 1.0)
    tensor([0.])
    """
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))
