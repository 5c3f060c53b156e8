"""Blocks of the prefix cache in files, which outlive the process.

A file has one block. Its name is a hash over all that its keys and values depend on: the identity of what computed
them, the salt, and all tokens up to the end of the block. It contains its name and a checksum. So a file that was
damaged, renamed, or written by another package or for another tenant is never used.

One thread writes, each file under a temporary name first. Files are not flushed to the disk: they survive the process,
and what a power failure leaves of them fails the checksum. Several processes may share a folder.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from inlay import machine
from inlay._version import __version__
from inlay.errors import UsageError, one_line
from inlay.package.files import lock, sweep
from inlay.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FORMAT = 1
"""Part of the identity: other formats have other names."""
COUNTERS = ("disk_writes", *(f"fallback.disk_{kind}" for kind in ("block_damaged", "queue_full", "write_failed")))
_MAGIC = b"inlay kv"
_HEADER_BYTES = len(_MAGIC) + 32 + 4
_NAME, _STAGING = re.compile(r"[0-9a-f]{64}\.kv"), ".inlay-kv-"
_QUEUE_BYTES = 1 << 26
"""Blocks that wait to be written. More are dropped, and offered again when they are used again."""
_TOUCH_SECONDS = 60.0
"""A use is noted at most this often."""
_CLOSE_SECONDS = 5.0


def identity(version: str, block_size: int, device: str, owner: str) -> bytes:
    """Return a hash of what keys and values depend on, besides tokens and salt.

    `version` is the hash of the package: its code, weights and states. Kernels of torch may round differently on
    another CPU or with other threads.
    """
    parts = [FORMAT, version, owner, block_size, device, __version__, torch.__version__, platform.machine()]
    parts += [machine.cpu_name(), machine.cpu_features(), torch.backends.cpu.get_cpu_capability()]
    return blake2b(repr([*parts, torch.get_num_threads()]).encode(), digest_size=32).digest()


class BlockFiles:
    """The files of blocks in a folder: at most `limit` bytes, of which the least recently used are removed."""

    def __init__(self, folder: Path, limit: int, identity: bytes, block_bytes: int) -> None:
        self._folder, self._limit, self._identity = folder.absolute(), limit, identity
        self.block_bytes = block_bytes
        self._file_bytes = _HEADER_BYTES + block_bytes
        if limit < self._file_bytes:
            problem = f"A block on disk has {format_bytes(self._file_bytes)}, but the limit is {format_bytes(limit)}."
            raise UsageError(problem, "Allow room for some thousand tokens.")
        try:
            machine.make_private_folder(folder)
            tempfile.TemporaryFile(dir=folder).close()
            sweep(folder, (_STAGING,))
            self.counts = Counter(dict.fromkeys(COUNTERS, 0))
            self._known: dict[str, float] = {}
            """Files that were seen or will be written, and the time of their last noted use."""
            self.bytes = self._unscanned = 0
            """The size of all files, and how much of it was written after the last look at the folder."""
            self._scan(0)
        except OSError as error:
            problem = f"Blocks cannot be kept in {folder}: {one_line(error)}."
            raise UsageError(problem, "Name a folder that this user can create, or owns and can write to.") from error
        self._buffer = bytearray(self._file_bytes)
        self._payload = torch.frombuffer(self._buffer, dtype=torch.uint8, offset=_HEADER_BYTES)
        self._tasks: deque[Callable[[], None]] = deque()
        self._queued_bytes, self._closing = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="inlay-block-files", daemon=True)
        self._thread.start()

    def name(self, digest: bytes) -> str:
        """Return the name of the file of a block."""
        return f"{blake2b(digest, key=self._identity, digest_size=32).hexdigest()}.kv"

    def read(self, digest: bytes) -> torch.Tensor | None:
        """Return the bytes of a block, valid until the next call; None if there is no file, or one that is damaged."""
        name = self.name(digest)
        try:
            if self._fill(self._folder / name) and _header(name, self._payload) == self._buffer[:_HEADER_BYTES]:
                self._known.setdefault(name, 0.0)
                return self._payload
            self.counts["fallback.disk_block_damaged"] += 1
        except FileNotFoundError:
            pass
        except OSError:
            self.counts["fallback.disk_block_damaged"] += 1
        self._known.pop(name, None)  # so it is written again
        return None

    def wants(self, digest: bytes) -> bool:
        """Whether a block has no file, and may be written. If too many blocks wait, it is dropped."""
        if self.name(digest) in self._known:
            return False
        is_full = self._queued_bytes > max(0, _QUEUE_BYTES - self.block_bytes)
        self.counts["fallback.disk_queue_full"] += is_full
        return not is_full

    def write(self, digest: bytes, data: torch.Tensor) -> None:
        """Write a block in the background."""
        name = self.name(digest)
        self._known[name] = 0.0
        self._add(lambda: self._write(name, data), self.block_bytes)

    def is_due(self, digest: bytes) -> bool:
        """Whether a block has no file, or its last noted use is a while ago."""
        return time.time() - self._known.get(self.name(digest), 0.0) > _TOUCH_SECONDS

    def touch(self, digests: Sequence[bytes]) -> None:
        """Note the use of blocks, each of which follows the one before. The last is removed first."""
        names = [self.name(digest) for digest in digests]
        self._known.update(dict.fromkeys((name for name in names if name in self._known), time.time()))

        def touch() -> None:
            now = time.time_ns()
            for place, name in enumerate(reversed(names)):
                with suppress(OSError):
                    os.utime(self._folder / name, ns=(now + place, now + place), follow_symlinks=False)

        self._add(touch)

    def close(self) -> None:
        """Write what waits, for some seconds at most, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _add(self, task: Callable[[], None], size: int = 0) -> None:
        with self._changed:
            self._tasks.append(task)
            self._queued_bytes += size
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()

    def _write(self, name: str, data: torch.Tensor) -> None:
        made = ""
        try:
            self._make_room()
            handle, made = tempfile.mkstemp(prefix=_STAGING, dir=self._folder)
            with open(handle, "wb") as file:
                lock(handle)  # so that another process does not remove it as a leftover
                file.write(_header(name, data))
                file.write(data.numpy().data)
                file.flush()
                os.replace(made, self._folder / name)
        except OSError:
            self._known.pop(name, None)
            self.counts["fallback.disk_write_failed"] += 1
            with suppress(OSError):
                os.unlink(made)
        else:
            self.bytes += self._file_bytes
            self._unscanned += self._file_bytes
            self.counts["disk_writes"] += 1
        finally:
            with self._changed:
                self._queued_bytes -= self.block_bytes

    def _fill(self, path: Path) -> bool:
        """Read a file; return whether it is a regular file of the right size."""
        # a pipe must not block, and a link could lead anywhere
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(handle)
            rest = memoryview(self._buffer)
            if not stat.S_ISREG(found.st_mode) or found.st_size != len(rest):
                return False
            while rest and (count := os.readv(handle, [rest])):
                rest = rest[count:]
            return not rest
        finally:
            os.close(handle)

    def _make_room(self) -> None:
        """Remove files if there is no room for another one.

        Other processes write to the folder too, so it is looked at whenever a part of the limit was written.
        """
        is_full = self.bytes + self._file_bytes > self._limit
        if is_full or self._unscanned + self._file_bytes > self._limit // 16:
            self._scan(self._file_bytes)

    def _scan(self, room: int) -> None:
        """Look at all files, and remove the least recently used if there is no room for so many bytes."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):  # another process removed it
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        row = entry.stat(follow_symlinks=False)
                        found.append((row.st_mtime_ns, row.st_size, entry.name))
        found.sort(reverse=True)
        total = sum(size for _, size, _ in found)
        if total + room > self._limit:  # remove more, so that the next look is a while ahead
            goal = max(self._limit - self._limit // 16, room)
            while found and total + room > goal:
                _, size, name = found.pop()
                (self._folder / name).unlink(missing_ok=True)
                total -= size
        self._known = {name: used / 1e9 for used, _, name in found}
        self.bytes, self._unscanned = total, 0


def _header(name: str, payload: torch.Tensor) -> bytes:
    """Return the start of a file: whose it is, and the checksum of all. A CRC-32 costs a fifth of a hash."""
    start = _MAGIC + bytes.fromhex(name[:64])
    return start + crc32(payload.numpy().data, crc32(start)).to_bytes(4, "big")
