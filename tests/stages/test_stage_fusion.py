"""Fusion and codegen: how many kernels, called how often, and what is left to existing ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from inlay.errors import UsageError
from inlay.testing import generated_code

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.fast
F = torch.nn.functional


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


@torch.library.custom_op("inlay_stages::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_chain_of_elementwise_calls_is_one_kernel() -> None:
    code = generated_code(lambda x: (F.silu(x) * 3 + x).tanh(), torch.ones(4, 8))
    assert list(code.kernels.values()) == [1]
    assert not code.external
    assert "tanh" in code.source


def test_a_call_that_is_not_fused_cuts_the_chain() -> None:
    """The fault that a count of kernels shows: an operator in between that the compiler cannot see into."""
    code = generated_code(lambda x: twice(x.sin()).cos(), torch.ones(4, 8))
    assert list(code.kernels.values()) == [1, 1]
    assert code.external == {"inlay_stages.twice": 1}


@pytest.mark.parametrize("wrapper", [False, True], ids=["python", "cpp"])
def test_one_kernel_serves_two_calls(wrapper: bool) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.silu(x @ w) * 2
        return x

    with torch.no_grad():
        code = generated_code(layers, (torch.ones(4, 8), torch.ones(8, 8)), options={"cpp_wrapper": wrapper})
    assert list(code.kernels.values()) == [2], code.kernels
    assert code.external["mm"] == 2


def test_pieces_are_files_of_their_own() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        torch._dynamo.graph_break()
        return y @ y.t()

    code = generated_code(broken, torch.ones(3, 3))
    assert len(code.sources) == 2
    assert code.external == {"mm": 2}


def test_without_inductor_there_is_none() -> None:
    with pytest.raises(UsageError, match="Inductor generated no code"):
        generated_code(lambda x: x + 1, torch.ones(3), backend="eager")
