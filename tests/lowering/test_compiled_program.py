"""Arguments that compiled code would misread: refused, or laid out as it expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import CompiledProgram, compile_program


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return 2 * x


def _compiled(backend: str = "eager") -> CompiledProgram:
    return compile_program(capture(Example(Sum(), (torch.ones(2, 3), torch.zeros(2, 3)))), backend)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("x", "state", "sentence"),
    [
        (torch.ones(2, 4), torch.zeros(2, 3), r"x must be f32\[2, 3\]; got f32\[2, 4\]."),
        (torch.ones(6), torch.zeros(2, 3), r"x must be f32\[2, 3\]; got f32\[6\]."),
        (torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.float64), r"state must be f32\[2, 3\]; got f64\[2, 3\]."),
        (
            torch.ones(2, 3),
            torch.zeros(3, 2).t(),
            "state is state and must be contiguous; got a view of another tensor",
        ),
        (3, torch.zeros(2, 3), r"x must be f32\[2, 3\]; got a value of type int."),
    ],
)
def test_refused(x: Any, state: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        _compiled()(x, state)


@pytest.mark.parametrize("backend", ["eager", "inductor", pytest.param("aot", marks=pytest.mark.nightly)])
def test_part_of_a_tensor(backend: str) -> None:
    """A column of a table of tokens: not in order in memory."""
    x, state = torch.arange(12.0).view(2, 6)[:, ::2], torch.zeros(2, 3)
    assert torch.equal(_compiled(backend)(x, state), 2 * x)
    assert torch.equal(state, x)


@pytest.mark.nightly
def test_small_weights_under_aot() -> None:
    """AOTInductor makes weights of a few values part of its code, and keeps those that are state."""

    class Small(torch.nn.Module):
        scale: torch.Tensor
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.arange(4.0), persistent=False)
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)
            return x * self.scale + self.count

    compiled = compile_program(capture(Example(Small(), (torch.ones(4),))), "aot")
    for step in (1, 2):
        assert torch.equal(compiled(torch.ones(4)), torch.arange(4.0) + step)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_sizes_outside_the_captured_range_are_refused(backend: str) -> None:
    """Tracing took one branch, and torch recorded for which sizes it is right."""

    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + 1 if x.shape[0] < 10 else x - 1) + y

    axes = {"x": {0: "rows"}, "y": {0: "rows"}}
    model = Branch()
    step = compile_program(capture(Example(model, (torch.ones(4), torch.ones(4)), axes=axes)), backend)
    assert torch.equal(step(torch.ones(7), torch.ones(7)), model(torch.ones(7), torch.ones(7)))
    with pytest.raises(UsageError, match=r"rows is 20; the program takes one size, \d … 9\."):
        step(torch.ones(20), torch.ones(20))
    with pytest.raises(UsageError, match=r"rows is 1 and 5; the program takes one size"):
        step(torch.ones(5), torch.ones(1))
    with pytest.raises(UsageError, match=r"rows is 0; the program takes one size, \d … 9\."):
        step(torch.ones(0), torch.ones(0))
