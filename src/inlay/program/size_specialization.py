"""Adapter: exporting without the assumption that a size is never 1.

By default torch.export takes every dynamic size to be at least 2, and says so in its ranges whether or not the model
cares. A decoder runs with one sequence and one token; here a lower bound of 2 means that the model asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx.experimental import _config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def size_oblivious() -> AbstractContextManager[None]:
    """Within this context, size 1 is an ordinary size."""
    context: AbstractContextManager[None] = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return context
