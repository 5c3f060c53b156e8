"""Routed experts in C++ against their reference: dtypes, layouts of the weight, and packages."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch

from inlay import Example
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.ops import native
from inlay.ops.expert_linear import expert_linear
from inlay.transforms.library.match_routed_experts import MatchRoutedExperts

if TYPE_CHECKING:
    from pathlib import Path

TYPES = [torch.float32, torch.bfloat16, torch.float16]
Pointer, Int, Long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@pytest.fixture(scope="module", params=["native", "portable"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    file: Path = tmp_path_factory.mktemp("kernels") / native.LIBRARY_NAME
    native.install(file, request.param)
    return native.load(file)


def _call(kernels: ctypes.CDLL, x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | str:
    shared = experts.shape[1] if x.shape[1] == 1 else 1
    y = torch.full((*experts.shape, weight.shape[1]), float("nan"), dtype=x.dtype)
    numbers = [experts.numel(), shared, *weight.shape]
    failed = kernels.inlay_expert_linear(
        *(Pointer(each.data_ptr()) for each in (x, experts, weight, y)),
        *(Int(TYPES.index(each.dtype)) for each in (x, weight)),
        *map(Long, numbers),
        (Long * 3)(*weight.stride()),
    )
    return str(kernels.inlay_last_error().decode()) if failed else y


SIZES = ((1, 2, 4, 7, 5), (6, 3, 5, 33, 64), (40, 8, 16, 96, 128), (0, 2, 3, 4, 4))
"""Tokens, chosen experts, experts, features, columns."""


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers(kernels: ctypes.CDLL, dtype: torch.dtype, is_transposed: bool) -> None:
    for tokens, chosen, held, features, depth in SIZES:
        weight = (
            torch.randn(held, depth, features).transpose(1, 2) if is_transposed else torch.randn(held, features, depth)
        )
        for rows in (1, chosen):
            x, weight = torch.randn(tokens, rows, depth).to(dtype), weight.to(dtype)
            experts = torch.randint(0, held, (tokens, chosen))
            found, wanted = _call(kernels, x, experts, weight), expert_linear(x.double(), experts, weight.double())
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps * 2, atol=1e-4)


def test_a_row_depends_on_no_other(kernels: ctypes.CDLL) -> None:
    x, weight, experts = torch.randn(9, 1, 70), torch.randn(5, 33, 70), torch.randint(0, 5, (9, 3))
    spoiled = torch.cat([x[:3], torch.full((6, 1, 70), float("nan"))])
    alone = [_call(kernels, x[place : place + 1], experts[place : place + 1], weight) for place in range(3)]
    for rows in (x, spoiled):
        together = _call(kernels, rows, experts, weight)
        assert torch.equal(torch.cat(alone), together[:3])  # type: ignore[arg-type]


def test_experts_that_do_not_exist(kernels: ctypes.CDLL) -> None:
    x, weight = torch.randn(1, 1, 8), torch.randn(4, 3, 8)
    for expert in (4, -1):
        wanted = f"expert {expert} at 1 is not from 0 to 3"
        assert wanted in str(_call(kernels, x, torch.tensor([[0, expert]]), weight))
        with pytest.raises(IndexError, match=wanted):
            expert_linear(x, torch.tensor([[0, expert]]), weight)


def test_in_compiled_code() -> None:
    """A case of the transform, with the library that packages contain."""
    case = MatchRoutedExperts.positive_cases()[1]

    class Experts(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return case.function(*given)

    program = capture(Example(Experts(), case.args))
    result = MatchRoutedExperts().apply(program.copy())
    assert result.sites == 1
    torch.testing.assert_close(compile_program(result.program, "aot")(*case.args), program.module()(*case.args))
