"""Codegen: the code of a model, in Python and in C++, its kernels counted and its numbers right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from inlay.errors import UsageError
from inlay.testing import check_model, generated_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.testing.inputs import Inputs

pytestmark = pytest.mark.fast
F = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("wrapper", [False, True], ids=["python", "cpp"])
def test_one_kernel_serves_two_calls(wrapper: bool) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.silu(x @ w) * 2
        return x

    with torch.no_grad():
        code = generated_code(layers, (torch.ones(4, 8), torch.ones(8, 8)), options={"cpp_wrapper": wrapper})
    assert list(code.kernels.values()) == [2], code.kernels
    assert code.external_kernels["mm"] == 2


def test_pieces_are_files_of_their_own() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ y.t()

    code = generated_code(broken, torch.ones(3, 3))
    assert len(code.sources) == 2
    assert code.external_kernels == {"mm": 2}


def test_without_inductor_there_is_none() -> None:
    with pytest.raises(UsageError, match="Inductor generated no code"):
        generated_code(lambda x: x + 1, torch.ones(3), backend="eager")


def test_a_tail_of_a_vector_is_right() -> None:
    """Sizes around the width of a vector register, in two dtypes, and a sum along a strided axis."""
    sizes: list[Inputs] = [(torch.randn(size, 3),) for size in (2, 15, 17)]
    assert check_model(lambda x: (x.exp() / x.exp().sum(0)).t(), sizes, dynamic=True).runs == 6


def test_a_copy_of_the_state_is_seen() -> None:
    def scattered(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
        cache.scatter_(0, at, row)

    def appended(cache: torch.Tensor, row: torch.Tensor, at: torch.Tensor) -> None:
        cache.index_copy_(0, at[0, :1], row)

    given = torch.zeros(33, 17), torch.ones(1, 17), torch.full((1, 17), 5)
    assert "empty_strided_cpu((33, 17)" in generated_code(scattered, given).source
    assert "empty_strided_cpu((33, 17)" not in generated_code(appended, given).source
