"""One safetensors file for all weights: written tensor by tensor, mapped into memory, never held twice."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import torch

from inlay.compile.manifest import CHUNK, WeightsFile
from inlay.errors import PackageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inlay.compile.manifest import WeightRow

NAME = "weights.safetensors"
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 64


def write(
    file: Path,
    rows: Mapping[str, WeightRow],
    read: Callable[[str], torch.Tensor],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> WeightsFile:
    """Write the tensors that `read` gives, one after the other; at most one is held at a time."""
    order = sorted(rows, key=lambda name: (-_dtype(rows[name]).itemsize, name))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        end = at + _size(rows[name])
        header[name] = {"dtype": _NAMES[rows[name].dtype], "shape": list(rows[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with _Hashed(file) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            value = read(name)
            row = rows[name]
            if tuple(value.shape) != tuple(row.shape) or value.dtype != _dtype(row):
                raise PackageError(f"{name} has another type than the program was compiled for.")
            out.write(_bytes(value))
            on_bytes(_size(row))
            del value
    return WeightsFile(out.size, tuple(out.chunks))


def check(file: Path, expected: WeightsFile) -> None:
    """Hash the file chunk by chunk; the first that differs is an error."""
    with file.open("rb") as opened:
        for number, wanted in enumerate(expected.chunks):
            if hashlib.sha256(opened.read(CHUNK)).hexdigest() != wanted:
                raise PackageError(
                    f"{file.name} is damaged between bytes {number * CHUNK:,} and {(number + 1) * CHUNK:,}.",
                    "Copy or build the package again.",
                )


def mapped(file: Path, rows: Mapping[str, WeightRow]) -> dict[str, torch.Tensor]:
    """All tensors, each a view of the file in memory. Nothing is read until it is used."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: dict[str, Any] = json.loads(opened.read(length)) if length < size else {}
    storage: Any = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=size)
    found = {}
    for name, row in rows.items():
        entry = header.get(name)
        if entry is None or entry["dtype"] != _NAMES[row.dtype] or tuple(entry["shape"]) != tuple(row.shape):
            raise PackageError(f"{file.name} does not hold {name} as the manifest says.", "Build the package again.")
        dtype = _dtype(row)
        offset = (8 + length + entry["data_offsets"][0]) // dtype.itemsize
        strides = [math.prod(row.shape[axis + 1 :]) for axis in range(len(row.shape))]
        found[name] = torch.empty(0, dtype=dtype).set_(storage, offset, tuple(row.shape), strides)
    return found


def _dtype(row: WeightRow) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, row.dtype)
    return dtype


def _size(row: WeightRow) -> int:
    return math.prod(row.shape) * _dtype(row).itemsize


def _bytes(value: torch.Tensor) -> memoryview:
    flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class _Hashed:
    """A file that is hashed in chunks as it is written."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.size = 0
        self.chunks: list[str] = []
        self._hash = hashlib.sha256()

    def __enter__(self) -> _Hashed:
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
