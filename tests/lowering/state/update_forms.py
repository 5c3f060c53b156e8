"""Every way in which a model writes to its state: cache `[batch, heads, length, head]`, new rows, their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, SIZE = 3, 16


@torch.library.custom_op("inlay_test::write_rows", mutates_args={"cache"})
def write_rows(cache: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
    cache.index_copy_(2, positions, rows)


@write_rows.register_fake
def _(cache: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
    return None


def index_copy(cache: Any, rows: Any, at: Any) -> None:
    cache.index_copy_(2, at, rows)


def index_put(cache: Any, rows: Any, at: Any) -> None:
    cache[:, :, at] = rows


def index_put_each(cache: Any, rows: Any, at: Any) -> None:
    """Each sequence at a position of its own."""
    cache[torch.arange(cache.shape[0]), :, at[0] + torch.arange(cache.shape[0])] = rows[:, :, 0]


def slice_scatter(cache: Any, rows: Any, at: Any) -> None:
    cache[:, :, 4:6] = rows


def slice_scatter_symbolic(cache: Any, rows: Any, at: Any) -> None:
    """From a size that is known only when the program runs."""
    start = cache.shape[2] // 2
    cache[:, :, start : start + 2] = rows


def slice_scatter_tensor(cache: Any, rows: Any, at: Any) -> None:
    """From a position in a tensor."""
    start = at[0].item()
    torch._check(start >= 0)
    torch._check(start + 2 <= cache.shape[2])
    cache.narrow(2, start, 2).copy_(rows)


def select_scatter(cache: Any, rows: Any, at: Any) -> None:
    cache[:, :, 5] = rows[:, :, 0]


def scatter(cache: Any, rows: Any, at: Any) -> None:
    cache.scatter_(2, at.view(1, 1, -1, 1).expand(rows.shape), rows)


def copy_to_view(cache: Any, rows: Any, at: Any) -> None:
    """Another axis first, as models with `[batch, length, heads, head]` caches do."""
    cache.transpose(1, 2).index_copy_(1, at, rows.transpose(1, 2))


def part_of_part(cache: Any, rows: Any, at: Any) -> None:
    cache[0][:, at] = rows[0]


def two_updates(cache: Any, rows: Any, at: Any) -> None:
    cache.index_copy_(2, at, rows)
    cache[:, :, 0:2] = 2 * rows


def custom_operator(cache: Any, rows: Any, at: Any) -> None:
    write_rows(cache, rows, at)


def custom_operator_on_part(cache: Any, rows: Any, at: Any) -> None:
    write_rows(cache[:, :1], rows[:, :1], at)


FORMS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        index_copy,
        index_put,
        index_put_each,
        slice_scatter,
        slice_scatter_symbolic,
        slice_scatter_tensor,
        select_scatter,
        scatter,
        copy_to_view,
        part_of_part,
        two_updates,
        custom_operator,
        custom_operator_on_part,
    )
}


def old_value_read(cache: Any, rows: Any, at: Any) -> Any:
    """The update is made, and what was there before is still wanted."""
    before = cache[:, :, 4:6].clone()
    cache.index_copy_(2, at, rows)
    return before


def shifted(cache: Any, rows: Any, at: Any) -> None:
    """A window: everything moves, the new rows come last."""
    cache.copy_(torch.cat([cache[:, :, 2:], rows], 2))


def moved_within(cache: Any, rows: Any, at: Any) -> None:
    """What is written comes from the same storage."""
    cache[:, :, 0:2] = cache[:, :, 2:4].flip(2) + 0 * rows
