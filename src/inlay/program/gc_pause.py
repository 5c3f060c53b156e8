"""Pause Python's cycle collector while many long-lived objects are created.

Otherwise the collector traverses the whole graph repeatedly, and time per node grows with the size of the program.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the cycle collector; also usable as a decorator.

    >>> with pause_gc():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
