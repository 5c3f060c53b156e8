"""The storage of the build cache: a folder of entries, named by key, written atomically and checked when read.

An entry is written to a locked staging folder and renamed into place, so no process reads an incomplete entry. Folders
of processes that died are unlocked; the next writer removes them. Readers of an entry hold a shared lock. Removal
needs an exclusive lock and skips entries that are being read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay import machine
from inlay.errors import PackageError
from inlay.package.files import (
    EXCLUSIVE,
    NON_BLOCKING,
    SHARED,
    is_same_file,
    lock,
    lock_file,
    lock_folder,
    sha256,
    stage_folder,
    sweep,
    sync,
    unlock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

FORMAT = 2
LIMIT = 4 * 10**9
"""Default maximum bytes of all entries together."""
ENTRY, HITS = "entry.json", "hits"
_STAGING, _TRASH, _LOCK = ".writing-", ".gone-", ".lock-"


class DamagedEntryError(PackageError):
    """An entry does not match its checksums."""


@dataclass(frozen=True)
class CacheEntry:
    """The results of one build, and its factors."""

    key: str
    folder: Path
    metadata: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The name of the model of the first build."""
        return str(self.metadata["model"])

    @property
    def factors(self) -> Mapping[str, str]:
        """The factors of the build."""
        found: Mapping[str, str] = self.metadata["factors"]
        return found

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(int(size) for size, _ in self.metadata["files"].values()) + (self.folder / ENTRY).stat().st_size

    @property
    def created_at(self) -> float:
        """Time of the build, in seconds since 1970."""
        return float(self.metadata["created_at"])

    @property
    def build_seconds(self) -> float:
        """Seconds that the build took."""
        return float(self.metadata["seconds"])

    @property
    def last_used(self) -> float:
        """Time of the last use, in seconds since 1970."""
        return (self.folder / HITS).stat().st_mtime

    @property
    def hits(self) -> int:
        """Number of cache hits: one byte of the file for each."""
        return (self.folder / HITS).stat().st_size

    def to_json(self) -> dict[str, Any]:
        """Return the row of `inlay cache ls`."""
        times = {"created_at": self.created_at, "last_used": self.last_used, "build_seconds": self.build_seconds}
        return {"entry": self.key, "model": self.model, "size": self.size, "hits": self.hits, **times}

    def note_hit(self) -> None:
        """Record a cache hit. Appending a byte is safe with concurrent processes."""
        with (self.folder / HITS).open("ab") as out:
            out.write(b".")

    def copy(self, name: str, target: Path) -> None:
        """Copy one file out of the entry. The copy is hashed, so the checked bytes are those that are used."""
        size, wanted = self.metadata["files"][name]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(self.folder / name, target, follow_symlinks=False)
        except OSError as error:
            raise _damage_error(self.key, f"{name} cannot be read") from error
        if target.is_symlink() or target.stat().st_size != size or sha256(target) != wanted:
            raise _damage_error(self.key, f"the hash of {name} does not match")


class BuildCache:
    """A folder of entries, shared by all processes of a user."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or machine.cache_folder() / "builds"

    @contextmanager
    def open_entry(self, key: str) -> Iterator[CacheEntry | None]:
        """Yield the entry of a key, or None; it is not removed while open. Raise an error if it is damaged."""
        folder = self.folder / key
        try:
            if self.folder.is_dir():
                machine.make_private_folder(self.folder)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            yield None
            return
        try:
            lock(handle, SHARED)
            yield _read(folder) if is_same_file(handle, folder) else None
        finally:
            unlock(handle)

    @contextmanager
    def lock_key(self, key: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of a key, so that one process builds it and the others find the entry."""
        machine.make_private_folder(self.folder)
        with lock_file(self.folder / f"{_LOCK}{key}", on_wait):
            yield

    def store(self, key: str, metadata: Mapping[str, Any], write: Callable[[Path], None]) -> bool:
        """Store the files that `write` puts into a folder as an entry; return whether it fits into the cache."""
        machine.make_private_folder(self.folder)
        with stage_folder(self.folder, _STAGING, _TRASH, _LOCK) as folder:
            write(folder)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            rows = {file.relative_to(folder).as_posix(): (file.stat().st_size, sha256(file)) for file in files}
            text = _text({**metadata, "format": FORMAT, "key": key, "created_at": time.time(), "files": rows})
            (folder / ENTRY).write_text(text)
            (folder / HITS).touch()
            if sum(size for size, _ in rows.values()) + len(text) > self.limit:
                return False
            for path in (*sorted(folder.rglob("*")), folder):
                sync(path)
            with lock_folder(self.folder):
                self._remove(self.folder / key)
                with suppress(OSError):  # an equivalent entry is being read and stays
                    folder.rename(self.folder / key)
                sync(self.folder)
                self._evict(but=key)
        return True

    def entries(self) -> list[CacheEntry]:
        """Return all readable entries, most recently used first."""
        found = []
        for folder in self._folders():
            with suppress(DamagedEntryError):
                found.append(_read(folder))
        return sorted(found, key=lambda entry: _last_used(entry.folder), reverse=True)

    def listing(self) -> list[dict[str, Any]]:
        """Return the rows of all entries, without those that are being removed."""
        found = []
        for entry in self.entries():
            with suppress(OSError):
                found.append(entry.to_json())
        return found

    def drop(self, key: str) -> bool:
        """Remove an entry, unless it is being read."""
        with lock_folder(self.folder):
            return self._remove(self.folder / key)

    def clear(self, older_than: float = 0.0) -> tuple[int, int]:
        """Remove entries unused for `older_than` seconds; return the number of entries and bytes."""
        if not self.folder.is_dir():
            return 0, 0
        count = freed = 0
        with lock_folder(self.folder):
            sweep(self.folder, (_STAGING, _TRASH, _LOCK))
            for folder in self._folders():
                size, used = _size(folder), _last_used(folder)
                if used <= time.time() - older_than and self._remove(folder):
                    count, freed = count + 1, freed + size
        return count, freed

    @property
    def limit(self) -> int:
        """Maximum bytes of all entries together."""
        try:
            return int((self.folder / ".limit").read_text())
        except (OSError, ValueError):
            return LIMIT

    @limit.setter
    def limit(self, size: int) -> None:
        machine.make_private_folder(self.folder)
        with lock_folder(self.folder):
            new = self.folder / ".limit.new"
            new.write_text(str(size))
            new.rename(self.folder / ".limit")
            self._evict()

    def _folders(self) -> list[Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return [folder for folder in found if not folder.name.startswith(".")]

    def _evict(self, but: str = "") -> None:
        """Remove the least recently used entries until the rest fits."""
        sizes = {folder: _size(folder) for folder in sorted(self._folders(), key=_last_used)}
        left, limit = sum(sizes.values()), self.limit
        for folder, size in sizes.items():
            if left > limit and folder.name != but and self._remove(folder):
                left -= size

    def _remove(self, folder: Path) -> bool:
        """Remove an entry: rename it, then delete its files. Return False if it is being read."""
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if not lock(handle, EXCLUSIVE | NON_BLOCKING) or not is_same_file(handle, folder):
                return False
            gone = folder.with_name(f"{_TRASH}{os.getpid()}-{time.time_ns()}")
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            return True
        finally:
            unlock(handle)


def _read(folder: Path) -> CacheEntry:
    """Read an entry from its file, which contains its own hash."""
    try:
        found = json.loads((folder / ENTRY).read_bytes())
        about = found["entry"]
        if found["sha256"] != _hash(about) or about["key"] != folder.name or about["format"] != FORMAT:
            raise _damage_error(folder.name, f"the hash, key or format of {ENTRY} does not match")
        (folder / HITS).stat()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damage_error(folder.name, f"{ENTRY} cannot be read") from error
    return CacheEntry(folder.name, folder, about)


def _text(about: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(about))
    return json.dumps({"sha256": _hash(plain), "entry": plain}, indent=1)


def _hash(about: Any) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _size(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return 0


def _last_used(folder: Path) -> float:
    with suppress(OSError):
        return (folder / HITS).stat().st_mtime
    return 0.0


def _damage_error(key: str, what: str) -> DamagedEntryError:
    return DamagedEntryError(f"The entry {key[:12]} of the build cache is damaged: {what}.", "The entry was removed.")
