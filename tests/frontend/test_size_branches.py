"""Guarded control flow: `torch.cond` on a size keeps both branches from capture to package; `if` on a size does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import inlay
from inlay import BuildOptions, Example
from inlay.errors import CaptureError
from inlay.frontend import SourceModel, capture
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.lower import compile_lowered, lower
from inlay.package import load_package
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from inlay.testing import assert_no_recompiles, check_model
from inlay.transforms.base import find_transform

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.program import Program
    from inlay.testing.inputs import Inputs

ROWS = (1, 4, 5, 9)
"""Both branches, and both sides of the boundary."""


class Branching(nn.Module):
    """More than four rows take a gated layer, others a subtraction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def gated(self, x: Tensor) -> Tensor:
        return functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.shape[0] > 4, self.gated, lambda v: v - 1, (self.gated(x),))
        return chosen


def branching() -> Example:
    return Example(Branching(), (torch.randn(3, 8),), axes={"x": {0: "rows"}})


def _program() -> Program:
    return find_transform("match_swiglu")().apply(capture(branching()).copy()).program


def _assert_same(run: Callable[[Tensor], Any]) -> None:
    module = Branching()
    for rows in ROWS:
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x), module(x))


@pytest.mark.fast
def test_capture_text_and_transforms() -> None:
    program = capture(branching())
    assert program.op_counts()["higher_order.cond"] == 1
    text = dump(program)
    assert "operator.gt(sym_size_int_1, 4)  # rows > 4" in text
    read = parse(text, program.tensors)
    assert dump(read) == text
    _assert_same(program.module())
    _assert_same(read.module())
    made = find_transform("match_swiglu")().apply(program.copy())
    assert made.sites == 2, "one of them in a branch"
    _assert_same(made.program.module())


@pytest.mark.fast
def test_lowered() -> None:
    """The piece of a plan holds the nested graphs. A bucket of one size, or of one branch, computes the same."""
    program = _program()
    _assert_same(compile_program(program, "eager"))
    lowered = lower(program, ("rows=1", "rows=5..64"))
    assert [len(plan.pieces) for _, _, plan in lowered.buckets] == [1] * 3
    run = compile_lowered(lowered, "eager")
    _assert_same(lambda x: run({"x": x})["output"])


@pytest.mark.fast
@pytest.mark.parametrize("backend", ["eager", pytest.param("inlay", marks=pytest.mark.nightly)])
def test_one_compilation_serves_both_branches(backend: str) -> None:
    sets: list[Inputs] = [(torch.randn(rows, 8),) for rows in (3, *ROWS[1:])]
    with torch.no_grad():
        made = assert_no_recompiles(torch.compile(Branching(), backend=backend, dynamic=True), sets)
    assert (made.frames, made.graph_breaks) == (1, 0)


def _as_if(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 4 else x - 1


def _as_cond(x: Tensor) -> Tensor:
    chosen: Tensor = torch.cond(x.shape[0] > 4, lambda v: v * 2, lambda v: v - 1, (x,))
    return chosen


class Calls(nn.Module):
    kept: Tensor

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _captured(module: nn.Module, limit: int | None = None) -> Program:
    example = Example(module, (torch.randn(3, 8),), axes={"x": {0: "rows"}})
    return capture(SourceModel("it", "module", example, {}, max_sizes={"rows": limit} if limit else {}))


@pytest.mark.fast
def test_a_branch_in_python_is_refused_or_guarded() -> None:
    """The same choice without `torch.cond` exists for one side only."""
    with pytest.raises(
        CaptureError, match=r"requires rows <= 4, which is false for rows 5\. Replace the loop or branch"
    ):
        _captured(Calls(_as_if), limit=64)
    (rows,) = _captured(Calls(_as_if)).symbols.values()
    assert (rows.low, rows.high) == (1, 4), "without a declared limit, the range ends where the branch does"
    with pytest.raises(RuntimeError, match="to be <= 4, but got 9"):
        _captured(Calls(_as_if)).module()(torch.randn(9, 8))
    (rows,) = _captured(Calls(_as_cond), limit=64).symbols.values()
    assert (rows.low, rows.high) == (1, 64)


@pytest.mark.fast
def test_a_branch_that_writes_is_refused() -> None:
    module = Calls(_as_cond)

    def update(v: Tensor) -> Tensor:
        module.kept.add_(1)
        return v * 2

    module.function = lambda x: torch.cond(x.shape[0] > 4, update, lambda v: v - 1, (x,))
    with pytest.raises(CaptureError, match=r"it cannot be captured: .*test_size_branches\.py:\d+.*torch\.export"):
        _captured(module)


@pytest.mark.nightly
def test_inductor() -> None:
    _assert_same(compile_program(_program(), "inductor"))
    sets: list[Inputs] = [(torch.randn(rows, 8),) for rows in (3, *ROWS[1:])]
    for backend, options in (("inductor", None), ("inlay", {"inner_backend": "inductor"})):
        check_model(_as_cond, sets, backend=backend, options=options, dynamic=True)


@pytest.mark.nightly
@pytest.mark.parametrize("buckets", [(), ("rows=1", "rows=5..64")])
def test_package(buckets: tuple[str, ...], tmp_path: Path) -> None:
    inlay.build("tests.frontend.test_size_branches:branching", tmp_path / "package", BuildOptions(buckets=buckets))
    package = load_package(tmp_path / "package")
    _assert_same(lambda x: package({"x": x})["output"])
