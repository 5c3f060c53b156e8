"""The safetensors file with all weights: written tensor by tensor, mapped into memory, never in memory twice."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import PackageError
from inlay.package.manifest import CHUNK, WeightsFile
from inlay.program.bindings import SHORT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inlay.package.manifest import WeightRow

NAME = "weights.safetensors"
_NAMES = {dtype: name.upper() for dtype, name in SHORT_DTYPES.items() if not dtype.startswith("complex")}
"""dtype → its name in safetensors files."""
_ALIGNMENT = 64
_BLOCK = 1 << 20


def write(file: Path, rows: Mapping[str, WeightRow], read: Callable[[str], torch.Tensor]) -> WeightsFile:
    """Write the tensors that `read` returns, one by one; at most one is in memory at a time."""
    order = sorted(rows, key=lambda name: (-_dtype(rows[name]).itemsize, name))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        end = at + _size(rows[name])
        header[name] = {"dtype": _NAMES[rows[name].dtype], "shape": list(rows[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with _HashingWriter(file) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            value = read(name)
            row = rows[name]
            if tuple(value.shape) != tuple(row.shape) or value.dtype != _dtype(row):
                raise PackageError(
                    f"{name} has another shape or dtype than the program was compiled for.", "Build a new package."
                )
            out.write(raw_bytes(value))
            del value
    return WeightsFile(out.size, tuple(out.chunks))


def check(file: Path, expected: WeightsFile) -> None:
    """Compare the hash of each chunk of the file, in small blocks; the first mismatch is an error."""
    buffer = memoryview(bytearray(_BLOCK))
    if len(expected.chunks) != -(-expected.size // CHUNK):
        raise PackageError(
            f"The manifest does not have the hashes of all chunks of {file.name}.", "Build the package again."
        )
    with file.open("rb", buffering=0) as opened:
        for number, wanted in enumerate(expected.chunks):
            found = hashlib.sha256()
            for _ in range(CHUNK // _BLOCK):
                found.update(buffer[: opened.readinto(buffer)])
            if found.hexdigest() != wanted:
                raise PackageError(
                    f"{file.name} is damaged between bytes {number * CHUNK:,} and {(number + 1) * CHUNK:,}.",
                    "Copy or build the package again.",
                )


def map_tensors(file: Path, rows: Mapping[str, WeightRow]) -> dict[str, torch.Tensor]:
    """Return all tensors as views of the mapped file. Data is read on first use."""
    size = file.stat().st_size
    header, start = _header(file, size)
    storage: Any = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
    found = {}
    for name, row in rows.items():
        low = _offset(header.get(name), row, size - start)
        if low is None or (start + low) % _dtype(row).itemsize:
            raise PackageError(f"{name} in {file.name} does not match the manifest.", "Build the package again.")
        dtype = _dtype(row)
        strides = [math.prod(row.shape[axis + 1 :]) for axis in range(len(row.shape))]
        offset = (start + low) // dtype.itemsize
        found[name] = torch.empty(0, dtype=dtype).set_(storage, offset, tuple(row.shape), strides)
    return found


def _header(file: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of the file and the offset of its data."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= size - 8 else None
    except (ValueError, struct.error, RecursionError) as error:
        raise _format_error(file) from error
    if not isinstance(header, dict):
        raise _format_error(file)
    return header, 8 + length


def _format_error(file: Path) -> PackageError:
    return PackageError(f"{file.name} is not a safetensors file.", "Copy or build the package again.")


def _offset(entry: Any, row: WeightRow, room: int) -> int | None:
    """Return the offset of a tensor, if it matches the manifest and is inside the file."""
    if not isinstance(entry, dict) or row.dtype not in _NAMES:
        return None
    if (entry.get("dtype"), entry.get("shape")) != (_NAMES[row.dtype], list(row.shape)):
        return None
    match entry.get("data_offsets"):
        case [int(low), int(high)] if 0 <= low <= high <= room and high - low == _size(row):
            return low
    return None


def _dtype(row: WeightRow) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, row.dtype)
    return dtype


def _size(row: WeightRow) -> int:
    return math.prod(row.shape) * _dtype(row).itemsize


def raw_bytes(value: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in contiguous order."""
    flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class _HashingWriter:
    """A file writer that hashes chunks while writing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.size = 0
        self.chunks: list[str] = []
        self._hash = hashlib.sha256()

    def __enter__(self) -> _HashingWriter:
        self._out = self.file.open("wb")
        return self

    def __exit__(self, *raised: object) -> None:
        if self.size % CHUNK:
            self.chunks.append(self._hash.hexdigest())
        self._out.close()

    def write(self, data: bytes | memoryview) -> None:
        """Write and hash."""
        view = memoryview(data)
        while len(view):
            part = view[: CHUNK - self.size % CHUNK]
            self._out.write(part)
            self._hash.update(part)
            self.size += len(part)
            if self.size % CHUNK == 0:
                self.chunks.append(self._hash.hexdigest())
                self._hash = hashlib.sha256()
            view = view[len(part) :]
