"""What a capture changes in the process while it runs, and why captures take turns.

torch.export replaces methods of `nn.Module` while it traces, transformers sets the default number format while it
builds a model, and Python's filter of warnings belongs to the process. None of them can be had for one thread, so one
capture runs at a time. Everything that Inlay itself needs to change is kept per thread.
"""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_TURN = threading.RLock()


class _Quiet(threading.local):
    """Whether this thread captures a model."""

    active = False


_QUIET = _Quiet()


def _passes(record: logging.LogRecord) -> bool:
    return not _QUIET.active or record.levelno >= logging.ERROR


@contextmanager
def exclusive() -> Iterator[None]:
    """Within this context no other thread captures, and transformers says nothing below an error to this one.

    It logs and warns about things a user of Inlay can do nothing about.
    """
    with _TURN, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for handler in logging.getLogger("transformers").handlers:
            handler.addFilter(_passes)  # the same filter is added once
        before, _QUIET.active = _QUIET.active, True
        try:
            yield
        finally:
            _QUIET.active = before
