"""Fusion: how many kernels there are, and what cuts them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

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
    assert not code.external_kernels
    assert "tanh" in code.source


def test_a_call_that_is_not_fused_cuts_the_chain() -> None:
    """The fault that a count of kernels shows: an operator in between that the compiler cannot see into."""
    code = generated_code(lambda x: twice(x.sin()).cos(), torch.ones(4, 8))
    assert list(code.kernels.values()) == [1, 1]
    assert code.external_kernels == {"inlay_stages.twice": 1}
