"""Arguments that compiled code would misread: refused, or laid out as it expects. Outputs that are allocated once."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.frontend import Example, capture
from inlay.lowering.compiled_program import CompiledProgram, compile_program
from inlay.package.memory_profiler import record_torch_allocations
from inlay.program import bindings


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


class Returned(torch.nn.Module):
    """Two states that are returned, each also as a view."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        self.total.add_(x)
        rows.add_(x)
        return self.total, self.total[1:3], rows, rows.t()


@pytest.mark.parametrize(
    ("backend", "lift"),
    [
        ("eager", False),
        pytest.param("inductor", False, marks=pytest.mark.nightly),
        pytest.param("aot", False, marks=pytest.mark.nightly),
        pytest.param("aot", True, marks=pytest.mark.nightly),
    ],
)
def test_returned_state(backend: str, lift: bool) -> None:
    """It is the state itself, which the next call changes; AOTInductor copies buffers of the program, and views."""
    program = capture(Example(Returned(), (torch.ones(4, 8), torch.zeros(4, 8))))
    step = compile_program(program, backend, lift_mutable_buffers=lift)
    rows, total = torch.zeros(4, 8), torch.zeros(4, 8)
    lifted = {"total": total} if lift else {}
    made = step(torch.ones(4, 8), rows, **lifted)
    step(torch.ones(4, 8), rows, **lifted)
    own = total if lift else step.state["total"]
    assert [made[0] is own, made[2] is rows] == [backend != "aot" or lift, True]
    shared = [made[1].data_ptr() == own[1:3].data_ptr(), made[3].data_ptr() == rows.data_ptr()]
    assert shared == [backend != "aot"] * 2
    is_state = (made[0] is own, shared[0], True, shared[1])
    assert [value.unique().tolist() for value in made] == [[2 if each else 1] for each in is_state]


class Outputs(torch.nn.Module):
    """A state that is returned, two outputs of their own, and a view of an input."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> Any:
        self.total.add_(x)
        return x * 2 + 1, self.total, x.view(10, 100), (x * 3).view(10, 100)


@pytest.mark.fast
def test_a_call_reads_no_table() -> None:
    """Which output is which state, and where arguments go, is known since compilation."""
    program = capture(Example(Outputs(), (torch.ones(1000),)))
    step = compile_program(program, "eager", alias={0: "x"})
    table, calls = Path(bindings.__file__).name, list[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(table):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        assert len(step.bindings.outs) == 6
        assert calls, "reading the table is noted"
        calls.clear()
        x = torch.ones(1000)
        made = step(x)
    finally:
        sys.setprofile(None)
    assert calls == []
    assert made[0] is x
    assert made[1] is step.state["total"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_preallocated_outputs(backend: str) -> None:
    """They stay where they are and are overwritten; what aliases something is as without; nothing is silent."""
    program = capture(Example(Outputs(), (torch.ones(1000),)))
    plain, fixed = compile_program(program, backend), compile_program(program, backend, preallocate=True)
    first, second = torch.randn(1000), torch.randn(1000)
    kept, held = plain(first), fixed(first)
    for one, two in zip(kept, held, strict=True):
        torch.testing.assert_close(two, one)
    plain(second)
    again = fixed(second)
    assert torch.equal(kept[0], first * 2 + 1), "an output that is not preallocated is the caller's"
    assert [one is two for one, two in zip(held, again, strict=True)] == [True, True, False, True]
    torch.testing.assert_close(held[0], second * 2 + 1)
    torch.testing.assert_close(held[3], (second * 3).view(10, 100))
    assert held[2].data_ptr() == first.data_ptr()
    assert list(fixed.state) == ["total"], "an output is not state: it is neither saved nor reset"
    sizes, fewer = (record_torch_allocations(partial(each, first)) for each in (plain, fixed))
    assert sizes.count(4000) >= 2
    if backend == "inductor":
        assert fewer == []
        assert not fixed.remarks
    else:
        told = [remark.reason for remark in fixed.remarks]
        assert [text.endswith("4,000 bytes, is copied at every call") for text in told] == [True, True]


@pytest.mark.fast
def test_what_is_not_preallocated() -> None:
    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            twice = x * 2
            return twice, twice, x.sum(), 3

    program = capture(Example(Rows(), (torch.ones(4, 2),), axes={"x": {0: "rows"}}))
    step = compile_program(program, "eager", preallocate=True)
    kinds = [row.alias.kind if row.alias else "" for row in step.bindings.outs]
    assert kinds == ["preallocated", "", "", "", ""], "only the sum has a shape that is known"
    assert step(torch.ones(5, 2))[2:] == (10, 3)
    with pytest.raises(UsageError, match=r"allocates the outputs of a library at each call\. Use inductor or eager"):
        compile_program(program, "aot", preallocate=True)
