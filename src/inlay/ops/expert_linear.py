"""Linear layers whose weight is that of an expert, chosen for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from inlay.ops.registration import check_range, custom_op

_TENSOR = "AtenTensorHandle"


@custom_op("expert_linear", f"{_TENSOR}, {_TENSOR}, {_TENSOR}")
def expert_linear(x: Tensor, experts: Tensor, weight: Tensor) -> Tensor:
    """`linear(x[..., i, :], weight[experts[..., i]])`. Only the weights of chosen experts are read.

    `weight` is `[expert, feature, column]`. The axis before the last of x may have size 1: all experts of a token then
    read the same row. An expert that does not exist is an error, also in the C++ kernel.

    >>> weight = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> expert_linear(torch.tensor([[[5.0, 7.0]]]), torch.tensor([[1, 0, 1]]), weight)
    tensor([[[7.],
             [5.],
             [7.]]])
    """
    check_range("expert", experts, weight.shape[0] - 1)
    rows = x.expand(*experts.shape, x.shape[-1]).flatten(0, -2)
    chosen = experts.reshape(-1)
    result = x.new_empty(len(rows), weight.shape[1])
    for expert in sorted(set(chosen.tolist())):
        places = (chosen == expert).nonzero().squeeze(1)
        result[places] = torch.nn.functional.linear(rows[places], weight[expert])
    return result.view(*experts.shape, weight.shape[1])


@expert_linear.register_fake
def _(x: Tensor, experts: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*experts.shape, weight.shape[1])
