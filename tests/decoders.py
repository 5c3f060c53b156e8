"""Small decoders as functions of x, [batch, length, 8], and w, [8, 8], and how to run them over a cache in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from inlay.lowering.compiled_program import compile_program
from inlay.testing import program_of
from inlay.transforms.base import find_transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from inlay.program import Program
    from inlay.transforms.base import TransformResult

AXES = {"x": {0: "batch", 1: "length"}}
ROOM, SLOTS = 16, 4


def attend(x: Tensor, w: Tensor, **how: Any) -> Tensor:
    heads = linear(x, w).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    result = scaled_dot_product_attention(heads, heads, heads, **({"is_causal": True} | how))
    return result.transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)


def captured(function: Callable[..., Any], axes: Any = AXES) -> Program:
    made = torch.Generator().manual_seed(0)
    args = torch.randn(2, 5, 8, generator=made), torch.randn(8, 8, generator=made)
    return program_of(function, args, axes, ("clean_noops", "match_attention"))


def with_cache(program: Program) -> TransformResult:
    cls = find_transform("insert_kv_cache")
    return cls(cls.Options(max_length=ROOM, max_batch=SLOTS)).apply(program.copy())  # type: ignore[call-arg]


class Parts:
    """A program with a cache, run on some tokens of some sequences at a time. Caches hold nothing but NaN before."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.step = compile_program(program, "eager")
        self.caches = {
            row.name: torch.full(row.shape, float("nan"), dtype=getattr(torch, row.dtype))  # type: ignore[arg-type]
            for row in program.bindings.state
        }
        self.filled = [0] * SLOTS

    def forget(self) -> None:
        """As before the first call."""
        for cache in self.caches.values():
            cache.fill_(float("nan"))
        self.filled = [0] * SLOTS

    def __call__(self, slots: list[int], **inputs: Tensor) -> Any:
        """The next tokens of the sequences that lie in these slots."""
        lengths = torch.tensor([self.filled[slot] for slot in slots])
        count = next(iter(inputs.values())).shape[1]
        with torch.no_grad():
            result = self.step(**inputs, slots=torch.tensor(slots), lengths=lengths, **self.caches)
        for slot in slots:
            self.filled[slot] += count
        return result
