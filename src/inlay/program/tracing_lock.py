"""Adapter: the process-wide lock for tracing.

torch.export replaces methods of `nn.Module` and sets flags while it traces. transformers sets the default dtype while
it builds a model. Python's warning filter is process-wide. None of these can be limited to one thread, so only one
trace of a model or pattern runs at a time. Dynamo holds its own lock while it compiles and calls a backend, and export
takes that lock when it uses Dynamo. Inlay uses the same lock, because a second lock could deadlock two threads. State
that Inlay itself changes is per thread. A torch without that lock uses a fallback lock.

Tested on torch 2.13 to 2.15.
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
    """Whether this thread is tracing, and logs of transformers are suppressed."""

    active = False


_SILENCE = _LogSilence()


def _is_logged(record: logging.LogRecord) -> bool:
    return not _SILENCE.active or record.levelno >= logging.ERROR


@contextmanager
def tracing_lock() -> Iterator[None]:
    """Hold the tracing lock, and suppress messages of transformers below errors in this thread.

    A user of Inlay cannot act on those messages.
    """
    with _process_lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for handler in logging.getLogger("transformers").handlers:
            handler.addFilter(_is_logged)  # adding a filter again has no effect
        before, _SILENCE.active = _SILENCE.active, True
        try:
            yield
        finally:
            _SILENCE.active = before
