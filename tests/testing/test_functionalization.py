"""Functionalization and decompositions: what a model writes to arrives, and nobody else's memory changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tools.fuzz_writes import operators  # noqa: F401 - registers torch.ops.inlay_fuzz

from inlay.integrations.post_grad import FixFunctionalization
from inlay.testing import check_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.fast
fuzz = torch.ops.inlay_fuzz


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def into_a_view(x: torch.Tensor) -> torch.Tensor:
    x[1:].t()[0].mul_(3)
    return x * 2


def returned_view(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x[1:]


def grown(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.reshape(-1)
    y += 1
    return y, x


@pytest.mark.parametrize("function", [into_a_view, returned_view, grown])
@pytest.mark.parametrize("backend", ["aot_eager", "inlay"])
def test_writes_through_views(function: Callable[..., Any], backend: str) -> None:
    check_model(function, [(torch.randn(3, 4),), (torch.randn(5, 2).t(),)], backend=backend, dtypes=(torch.float32,))


def overwritten(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    fuzz.put(x, row)
    return x.clone()


def clone_and_origin(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """pytorch#198031"""
    x = x + 1
    y = x.clone()
    fuzz.put(y, x)
    return y


@pytest.mark.parametrize(
    ("function", "told"),
    [(overwritten, r"memory of output +value +'not shared' +'input\[0\]'"), (clone_and_origin, r"output +value")],
)
def test_what_inductor_alone_gets_wrong(function: Callable[..., Any], told: str) -> None:
    """Both are defects of torch 2.13 (docs/in_place.md), and gone with the pass."""
    given = torch.arange(512).reshape(32, 16) % 7, torch.arange(4) + 1
    with pytest.raises(AssertionError, match=told):
        check_model(function, given, dtypes=(None,))
    check_model(function, given, dtypes=(None,), options={"post_grad_custom_post_pass": FixFunctionalization()})
