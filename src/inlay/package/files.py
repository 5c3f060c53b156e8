"""Files shared between processes: locks that the system releases when their owner dies, fsync, hashes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXCLUSIVE, SHARED, NON_BLOCKING = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB
"""Modes of a lock: one owner, several readers, and fail instead of waiting."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def lock(handle: int, mode: int = EXCLUSIVE) -> bool:
    """Acquire a lock; return whether it succeeded. Disks that cannot lock folders, such as NFS, are never swept."""
    try:
        fcntl.flock(handle, mode)
    except OSError:
        return False
    return True


def unlock(handle: int) -> None:
    """Release a lock and close its file. Closing alone would leave the lock with a forked process."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle)
        yield
    finally:
        unlock(handle)


@contextmanager
def stage_folder(home: Path, prefix: str, *swept: str) -> Iterator[Path]:
    """Yield a new, locked folder in `home`. It is removed afterwards unless it was renamed.

    First, what processes that died left with this prefix, or with one of `swept`, is removed.
    """
    with lock_folder(home):
        sweep(home, (prefix, *swept))
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=home))
        handle = os.open(folder, os.O_RDONLY)
        lock(handle)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unlock(handle)


def sweep(home: Path, prefixes: tuple[str, ...]) -> None:
    """Remove folders and locks of processes that died: no process holds their lock."""
    for path in home.iterdir():
        if not path.name.startswith(prefixes):
            continue
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            if lock(handle, EXCLUSIVE | NON_BLOCKING) and is_same_file(handle, path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            unlock(handle)


@contextmanager
def lock_file(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock on a file that is removed afterwards; `on_wait` is called if another process holds the lock."""
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
        unlock(handle)  # the previous owner removed the file, so this lock is on a deleted file


def is_same_file(handle: int, path: Path) -> bool:
    """Whether an open file is still the file at this path."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    opened = os.fstat(handle)
    return (opened.st_dev, opened.st_ino) == (found.st_dev, found.st_ino)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stamp(file: Path) -> str:
    """Return a text that changes when a file is written or replaced: size, time and a hash of samples of its content.

    A file of up to 1 MB is hashed as a whole. Weights are not: they may be hundreds of gigabytes.
    """
    found, digest = file.stat(), hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        for index in range(_SAMPLES):
            opened.seek(index * max(found.st_size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))
    return f"{found.st_size} bytes, written at {found.st_mtime_ns}, {digest.hexdigest()[:12]}"


def sha256(file: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with file.open("rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
