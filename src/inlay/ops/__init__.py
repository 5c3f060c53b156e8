"""Canonical operators, which stand for an operation however the model writes it. Importing registers them.

Each has a reference in plain torch, which is both its CPU implementation and its decomposition, and a fake kernel.
"""

from inlay.ops import (
    attention,
    cached_attention,
    expert_linear,
    gated_activation,
    norm,
    packed_linear,
    rope,
    short_conv,
)

__all__ = [
    "attention",
    "cached_attention",
    "expert_linear",
    "gated_activation",
    "norm",
    "packed_linear",
    "rope",
    "short_conv",
]
