"""Routed experts in forms near those of stock models: what fires gives the same numbers, and nothing fails."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product
from torch import Tensor

from inlay import Example
from inlay.frontend import capture
from inlay.transforms.library.match_routed_experts import MatchRoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program

product: Any = torch.ops.transformers.grouped_mm_fallback


class Routing:
    """The rows of tokens in the order of their experts, and back."""

    def __init__(self, scores: Tensor, chosen: int) -> None:
        held = scores.shape[-1]
        self.experts, self.order = scores.topk(chosen)[1].view(-1).sort()
        self.ends = torch.histc(self.experts.float(), held, 0, held - 1).cumsum(0, dtype=torch.int32)
        self.inverse = torch.empty_like(self.order)
        self.inverse[self.order] = torch.arange(self.order.shape[0])
        self.tokens = self.order // chosen


def _compare(function: Callable[..., Any], *given: Tensor, axes: Any = None) -> int:
    """Return whether the transform fired; its result is that of the program before it."""

    class Experts(torch.nn.Module):
        def forward(self, x: Tensor, scores: Tensor, weight: Tensor) -> Any:
            return function(x, scores, weight)

    program: Program = capture(Example(Experts(), given, axes=axes or {}))
    result = MatchRoutedExperts().apply(program.copy())
    assert len(result.misses) == 1 - result.sites
    torch.testing.assert_close(result.program.module()(*given), program.module()(*given))
    return result.sites


def _given(tokens: int = 6, held: int = 4, depth: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, depth), torch.randn(tokens, held), torch.randn(held, depth, depth)


def _plain(chosen: int) -> Callable[..., Tensor]:
    def function(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(scores, chosen)
        result: Tensor = product(x[routing.tokens], weight, routing.ends)[routing.inverse]
        return result

    return function


@pytest.mark.parametrize(("tokens", "held", "chosen"), [(6, 4, 2), (6, 4, 1), (5, 4, 4), (1, 4, 3), (3, 1, 1)])
def test_sizes(tokens: int, held: int, chosen: int) -> None:
    assert _compare(_plain(chosen), *_given(tokens, held)) == 1


def test_columns_of_size_zero() -> None:
    assert _compare(_plain(2), torch.randn(6, 0), torch.randn(6, 4), torch.randn(4, 0, 8)) == 1
    assert _compare(_plain(2), torch.randn(6, 8), torch.randn(6, 4), torch.randn(4, 8, 0)) == 0


def test_sizes_that_depend_on_values_are_refused() -> None:
    """A residual that is added to sorted rows has one row for each, or a single one: nobody knows."""

    def residual(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        kept = (x[:, 0] < 9).nonzero().squeeze(1)
        rows, routing = x[kept], Routing(scores[kept], 1)
        result: Tensor = (product(rows[routing.tokens], weight, routing.ends) + rows)[routing.inverse].sum(0)
        return result

    def more_tokens(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(scores[(x[:4, 0] < 9).nonzero().squeeze(1)], 2)
        result: Tensor = product(x[(x[:, 0] < 9).nonzero().squeeze(1)][routing.tokens], weight, routing.ends)
        return result[routing.inverse]

    for function in (residual, more_tokens):
        assert _compare(function, *_given()) == 0


def test_a_row_of_the_size_of_the_batch_is_refused() -> None:
    def function(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(x @ scores, 2)
        result: Tensor = (product(x[routing.tokens], weight, routing.ends)[..., :1] + x[:, 0])[routing.inverse]
        return result

    x, _, weight = _given()
    assert _compare(function, x, torch.randn(8, 4), weight, axes={"x": {0: "batch"}}) == 0


def test_other_forms_of_products_are_refused() -> None:
    def columns(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(scores, 2)
        rows = x[routing.tokens].unsqueeze(1) * torch.ones(1, 8, 1, dtype=x.dtype)
        result: Tensor = torch._grouped_mm(rows, weight, routing.ends)[routing.inverse]
        return result

    assert _compare(columns, torch.randn(4, 8).bfloat16(), torch.randn(4, 8), torch.randn(8, 8).bfloat16()) == 0
    assert _compare(_plain(2), *(each.double() for each in _given())) == 0, "no kernel computes in float64"


def test_layouts_are_refused() -> None:
    def function(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(scores, 2)
        rows = product(x[routing.tokens], weight, routing.ends)[:, None, None] * torch.ones(1, 3, 2, 1)
        result: Tensor = rows.contiguous(memory_format=torch.channels_last)[routing.inverse]
        return result

    assert _compare(function, *_given()) == 0


def test_more_experts_than_a_histogram_counts() -> None:
    x, weight = torch.randn(40, 2), torch.randn(4200, 2, 2)
    assert _compare(_plain(1), x, torch.eye(4200)[4160:], weight) == 0


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda rows, x: rows.relu(),
    "shared row": lambda rows, x: rows * x[0],
    "first columns": lambda rows, x: rows[..., :4].exp(),
    "halves": lambda rows, x: rows.chunk(2, -1)[0] * rows.chunk(2, -1)[1],
    "odd and even": lambda rows, x: rows[..., ::2] - rows[..., 1::2],
    "rows that differ": lambda rows, x: rows + torch.arange(rows.shape[0]).unsqueeze(1),
    "sum over rows": lambda rows, x: rows - rows.sum(0),
    "softmax of a row": lambda rows, x: rows.softmax(-1),
    "reversed": lambda rows, x: rows.flip(0),
    "weighted": lambda rows, x: rows * rows[..., :1].sigmoid(),
}


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_between(seed: int) -> None:
    """Some may be repeated on unsorted rows, others not: the numbers are the same in any case."""
    rng = random.Random(seed)
    names = rng.choices(sorted(CALLS), k=rng.randrange(1, 4))

    def function(x: Tensor, scores: Tensor, weight: Tensor) -> Tensor:
        routing = Routing(scores, 2)
        rows = product(x[routing.tokens], weight, routing.ends)
        for name in names:
            if rows.shape[1] == 8 or name in ("relu", "softmax of a row", "weighted", "reversed", "sum over rows"):
                rows = CALLS[name](rows, x)
        result: Tensor = rows[routing.inverse]
        return result

    _compare(function, *_given())
