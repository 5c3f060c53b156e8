"""Modules that own their state, as factories for `package.module:factory`."""

from __future__ import annotations

from typing import Any

import torch

from inlay import Example


class RingConvolution(torch.nn.Module):
    """A causal convolution over streamed frames: a ring buffer, a position that starts at 3, and a running peak."""

    frames: torch.Tensor
    at: torch.Tensor
    peak: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("frames", torch.zeros(16, 4))
        self.register_buffer("at", torch.tensor([3]))
        self.register_buffer("peak", torch.full((40,), 0.25))

    def forward(self, frame: torch.Tensor) -> torch.Tensor:
        self.frames.index_copy_(0, self.at % 16, frame)
        taps = [self.frames[(self.at - tap) % 16] @ self.weight[tap] for tap in range(3)]
        self.at.add_(1)
        self.peak.copy_(torch.maximum(self.peak, frame.abs().max()))
        return taps[0] + taps[1] + taps[2] + self.peak[:4]


def ring_convolution() -> Example:
    return Example(RingConvolution(), (torch.ones(1, 4),))


class StockCache(torch.nn.Module):
    """A stock decoder with the tensors of its static cache as buffers."""

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        from inlay.frontend.huggingface.static_cache import StaticCacheStep

        self.decoder = StaticCacheStep(model, max_length)
        for name, value in self.decoder.make_caches(1).items():
            self.register_buffer(name, value)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        caches = {name: getattr(self, name) for name in self.decoder.cache_names}
        return self.decoder.step(input_ids, **caches)


def stock_cache() -> Example:
    from tests.greedy_tokens import stock_model

    return Example(StockCache(stock_model("llama"), 32).eval(), (torch.tensor([[3]]),))
