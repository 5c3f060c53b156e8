"""A small model whose layers contain a pattern without a known kernel: a short convolution with tanh and a gate.

    inlay candidates mixer:mixer

docs/candidate_to_transform.md uses this model.
"""

from __future__ import annotations

import torch
from torch import nn

from inlay import Example


class Layer(nn.Module):
    """Convolves each channel over three rows and gates the result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(channels, 1, 3))
        self.gate = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.conv1d(x.transpose(1, 2), self.taps, padding=2, groups=x.shape[-1])[..., : x.shape[1]]
        result: torch.Tensor = x + self.out(torch.tanh(mixed).transpose(1, 2) * torch.sigmoid(self.gate(x)))
        return result


def mixer(layers: int = 3, channels: int = 32) -> Example:
    """Return a model with random weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(channels) for _ in range(layers)))
    return Example(model, (torch.randn(2, 6, channels),), axes={"input": {0: "batch", 1: "length"}})
