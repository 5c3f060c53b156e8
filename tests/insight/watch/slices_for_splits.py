"""A pattern of q, k and v of one split, and a graph of six layers in two forms: `split` and `slices`.

`python -m tests.insight.watch.slices_for_splits FORM` applies the pattern and prints the number of matches.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch._subclasses.fake_tensor import FakeTensorMode

LAYERS = 6


@torch.library.custom_op("slices_for_splits::rotate", mutates_args=("query", "key"))
def rotate(positions: Tensor, query: Tensor, key: Tensor) -> None:
    """Rotate in place."""


def _attention(q: Tensor, k: Tensor, positions: Tensor, weight: Tensor) -> Any:
    q = torch.nn.functional.gelu(q.view(3, 2, 4)).mul(weight).view(3, 8)
    k = torch.nn.functional.gelu(k.view(3, 1, 4)).mul(weight).view(3, 4)
    operator = torch.ops.slices_for_splits.rotate.default
    rotated: Any = auto_functionalized(operator, positions=positions, query=q, key=k)
    return rotated[1], rotated[2]


def search(qkv: Tensor, positions: Tensor, weight: Tensor) -> Any:
    """Match q, k and v of a split."""
    q, k, v = qkv.split_with_sizes([8, 4, 4], -1)
    return *_attention(q, k, positions, weight), v


def _replace(qkv: Tensor, positions: Tensor, weight: Tensor) -> Any:
    return qkv[:, :8] + 1, qkv[:, 8:12] + 1, qkv[:, 12:] + 1


def _model(form: str) -> Any:
    def model(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        for _ in range(LAYERS):
            qkv = x.exp()
            parts: Any = (qkv[:, :8], qkv[:, 8:12], qkv[:, 12:])
            q, k, v = qkv.split_with_sizes([8, 4, 4], -1) if form == "split" else parts
            x = torch.cat([*_attention(q, k, positions, weight), v], -1)
        return x

    return model


def count_matches(form: str) -> int:
    """Apply the pattern to the graph in a form."""
    with FakeTensorMode():
        inputs = [torch.empty(3, 16), torch.empty(3), torch.empty(4)]
        passes = PatternMatcherPass(pass_name="rotations")
        register_replacement(search, _replace, inputs, fwd_only, [passes])
        return passes.apply(fwd_only(_model(form), inputs))


if __name__ == "__main__":
    print("matches", count_matches(sys.argv[1]))
