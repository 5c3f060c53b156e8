"""RMS norms and the additions before them: found by Inlay's passes, and by TensorRT-LLM's where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from inlay.testing import program_of
from inlay.transforms import run
from inlay.transforms.base import find_transform
from inlay.transforms.pass_manager import TransformStep
from tests.pass_sources import expect_match, found, run_external

if TYPE_CHECKING:
    from inlay.program import Program

pytestmark = pytest.mark.fast
LAYERS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Norm(torch.nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(torch.nn.Module):
    """norm, linear, add; twice, and a norm at the end: LAYERS + 1 norms, LAYERS of them after an addition."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = torch.nn.ModuleList(Norm(16, dtype) for _ in range(LAYERS + 1))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=False):
            x = x + linear(norm(x))
        return self.norms[-1](x)


def _program(dtype: torch.dtype) -> Program:
    return program_of(Residual(dtype), [_input(dtype)], axes={"x": {0: "batch"}})


def _input(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def _same_numbers(before: Program, after: Program, dtype: torch.dtype, tolerance: float) -> None:
    x = _input(dtype)
    for value in (x, torch.cat([x, x * 3])):
        with torch.no_grad():
            want, got = (each.module()(value) for each in (before, after))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inlay(dtype: torch.dtype) -> None:
    program = _program(dtype)
    names = ("match_rms_norm", "fuse_add_rms_norm")
    result, records = run(program, [TransformStep(name, find_transform(name)()) for name in names])
    assert [record.sites for record in records] == [LAYERS + 1, LAYERS]
    counts = result.op_counts()
    assert counts["inlay.add_rms_norm.default"] == LAYERS
    assert counts["inlay.rms_norm.default"] == 1
    assert "aten.rsqrt.default" not in counts
    _same_numbers(program, result, dtype, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autodeploy(dtype: torch.dtype) -> None:
    program = _program(dtype)
    result, record = run_external(program, found("fuse_rmsnorm"))
    expect_match(record, "its pattern casts with aten.to.dtype, which Inlay's functional form spells aten._to_copy")
    assert record.sites == LAYERS + 1
    _same_numbers(program, result, dtype, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_legacy(dtype: torch.dtype) -> None:
    program = _program(dtype)
    result, record = run_external(program, found("register_add_norm"))
    expect_match(record, "its pattern starts at trtllm.flashinfer_rmsnorm, which stock models do not call")
    _same_numbers(program, result, dtype, TOLERANCE[dtype])
