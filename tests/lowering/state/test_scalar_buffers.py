"""State of one value that the module owns: compilers take it for a constant unless told (pytorch#165444)."""

from __future__ import annotations

import pytest
import torch

from inlay.frontend import Example, capture
from inlay.lowering.backends import BACKENDS
from inlay.lowering.compiled_program import compile_program


class Counter(torch.nn.Module):
    """How often it was called."""

    count: torch.Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(shape, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_counts(backend: str, shape: tuple[int, ...]) -> None:
    step = compile_program(capture(Example(Counter(shape), (torch.zeros(2),))), backend)
    assert [step(torch.zeros(2)).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert step.owned_tensors["b_count"].tolist() in (3, [3])
