"""Linear layers and embeddings over packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import check_range, custom_op
from inlay.ops.weight_layout import Packing, unpack_mixed

_TENSOR = "AtenTensorHandle"


@custom_op("packed_linear", f"{_TENSOR}, {_TENSOR}, {_TENSOR}*, int64_t, int64_t, int64_t, int64_t, int64_t")
def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    features: int,
    bits: int,
    zero: int,
    singly: int = 8,
    tiled: int = 16,
) -> Tensor:
    """`linear` with a packed weight, mixed if `bits` is 0. The reference multiplies in x's dtype.

    The number of rows selects the variant of the C++ kernel: up to `singly` rows are quantized to int8 and multiplied
    row by row, up to `tiled` rows in int8 tiles, and more rows in bfloat16 tiles. In every variant, a row of x with NaN
    or infinity gives non-finite results in all features, and other rows are not affected.

    >>> weight = Packing(4, 8).pack(torch.full((16, 32), 9), torch.full((16, 1), 2.0))
    >>> packed_linear(torch.ones(1, 32), weight, None, 16, 4, 8)[0, :3]
    tensor([64., 64., 64.])
    """
    if bits:
        plain = Packing(bits, zero, x.shape[-1] // weight.shape[1]).unpack(weight, features)
    else:
        plain = unpack_mixed(weight)
    return torch.nn.functional.linear(x, plain.to(x.dtype), bias)


@packed_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, features: int, *_: object, **__: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], features)


@custom_op("packed_embedding", f"{_TENSOR}, {_TENSOR}, int64_t, int64_t, int64_t, int64_t, int32_t")
def packed_embedding(
    weight: Tensor, tokens: Tensor, features: int, bits: int, zero: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of a packed weight. Tokens outside of `[0, features)` are an error, also in the C++ kernel."""
    check_range("token", tokens, features - 1)
    if not tokens.numel():
        return tokens.new_empty(*tokens.shape, weight.shape[1] * group, dtype=dtype)
    lanes = Packing(bits, zero, group).unpack(weight[tokens.reshape(-1) // 16], tokens.numel() * 16)
    rows = lanes.view(tokens.numel(), 16, -1)[torch.arange(tokens.numel()), tokens.reshape(-1) % 16]
    return rows.view(*tokens.shape, -1).to(dtype)


@packed_embedding.register_fake
def _(weight: Tensor, tokens: Tensor, features: int, bits: int, zero: int, group: int, dtype: torch.dtype) -> Tensor:
    return tokens.new_empty(*tokens.shape, weight.shape[1] * group, dtype=dtype)
