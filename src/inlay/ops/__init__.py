"""Canonical operators: what a program means, whatever the model's author wrote. Importing registers them.

Each has a reference in plain torch (its CPU implementation and its decomposition are the same code) and a fake kernel.
"""

from inlay.ops import attention, cached_attention, gated_activation, norm, packed_linear, rope, short_conv

__all__ = ["attention", "cached_attention", "gated_activation", "norm", "packed_linear", "rope", "short_conv"]
