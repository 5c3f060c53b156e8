"""Adapter: what tracing changes in the process while it runs, and why it takes turns.

torch.export replaces methods of `nn.Module` and sets flags while it traces, transformers sets the default number format
while it builds a model, and Python's filter of warnings belongs to the process. None of them can be had for one thread,
so one trace of a model or a pattern runs at a time. Dynamo has a lock of its own while it compiles, which a backend is
called with and which export takes where it needs Dynamo: it is this lock too, or two threads could wait for each other.
Everything that Inlay itself needs to change is kept per thread. Tested on torch 2.13.0; a torch without that lock gets
one of ours.
"""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


_FALLBACK_LOCK = threading.RLock()


def _process_lock() -> Any:
    try:
        from torch._dynamo.convert_frame import compile_lock
    except ImportError:
        return _FALLBACK_LOCK
    return compile_lock


class _LogSilence(threading.local):
    """Whether this thread captures a model."""

    active = False


_SILENCE = _LogSilence()


def _is_logged(record: logging.LogRecord) -> bool:
    return not _SILENCE.active or record.levelno >= logging.ERROR


@contextmanager
def tracing_lock() -> Iterator[None]:
    """Within this context no other thread traces, and transformers says nothing below an error to this one.

    It logs and warns about things a user of Inlay can do nothing about.
    """
    with _process_lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for handler in logging.getLogger("transformers").handlers:
            handler.addFilter(_is_logged)  # the same filter is added once
        before, _SILENCE.active = _SILENCE.active, True
        try:
            yield
        finally:
            _SILENCE.active = before
