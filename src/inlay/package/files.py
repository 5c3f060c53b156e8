"""Files that others use too: locks that the system drops when their holder dies, what is on the disk, hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EXCLUSIVE, SHARED, NON_BLOCKING = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB
"""Nobody else, others who read, and not waiting for it."""


def lock(handle: int, mode: int = EXCLUSIVE) -> bool:
    """Whether the lock is ours. A disk that cannot lock folders, such as NFS, has no locks and is never swept."""
    try:
        fcntl.flock(handle, mode)
    except OSError:
        return False
    return True


def unlock(handle: int) -> None:
    """Give a lock back and close its file. A process that was forked meanwhile would go on holding it."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A folder for oneself, for a moment."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle)
        yield
    finally:
        unlock(handle)


@contextmanager
def lock_file(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """A lock with a file of its own, which is gone afterwards; `on_wait` is called when somebody else has it."""
    handle = _acquire(file, on_wait)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        unlock(handle)


def _acquire(file: Path, on_wait: Callable[[], None]) -> int:
    while True:
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        if not lock(handle, EXCLUSIVE | NON_BLOCKING):
            on_wait()
            lock(handle)
        if is_same_file(handle, file):
            return handle
        unlock(handle)  # whoever held it has removed the file: the lock is on another one now


def is_same_file(handle: int, path: Path) -> bool:
    """Whether what was opened is what lies there now."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    opened = os.fstat(handle)
    return (opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino)


def sync(path: Path) -> None:
    """A file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(file: Path) -> str:
    """The hash of a file."""
    with file.open("rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
