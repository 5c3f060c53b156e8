"""Adapter: export without the assumption that no size is 1.

By default torch.export assumes that every dynamic size is at least 2, and its ranges start at 2 even if the model works
with 1. A decoder runs with one sequence and one token. Here a lower bound of 2 means that the model requires it.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx.experimental import _config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def size_oblivious() -> AbstractContextManager[None]:
    """Return a context in which torch does not treat size 1 specially."""
    context: AbstractContextManager[None] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context
