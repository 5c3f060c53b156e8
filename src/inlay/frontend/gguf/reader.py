"""GGUF files: a strict reader of the header, and tensors that are dequantized only when they are read.

The `gguf` package reads well-formed files. On a damaged file it can loop for hours or allocate terabytes.
So the header is checked here first: every count and offset against the size of the file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import ModelError
from inlay.program.weights import QuantizedBlocks
from inlay.split_files import split_parts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    import torch

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REMOVED_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
}
_SIZE_KEYS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
)


@dataclass(frozen=True)
class MappedFile:
    """A file that is mapped into memory on first use."""

    path: Path

    @cached_property
    def data(self) -> npt.NDArray[np.uint8]:
        """The whole file; copy-on-write, because torch has no read-only tensors."""
        return np.memmap(self.path, dtype=np.uint8, mode="c")


@dataclass(frozen=True)
class GGUFFile:
    """The checked header of a GGUF model, which is one file or the parts of a split one."""

    path: Path
    """The file with the metadata: the first part of a split model."""
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The architecture that the header states, or an empty string."""
        return str(self.metadata.get("general.architecture", ""))


@dataclass(frozen=True)
class GGUFTensor:
    """A row of a file's tensor table. `stored_bytes` are its bytes as stored, `read` dequantizes them to float32."""

    file: MappedFile
    name: str
    ggml_type: int
    shape: tuple[int, ...]
    """The shape after dequantization in torch's order, rows first."""
    offset: int
    size: int

    @property
    def origin(self) -> str:
        return f"{self.file.path.name}#{self.name} ({self.type_name})"

    @property
    def type_name(self) -> str:
        """The storage format, such as `Q4_1`."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.ggml_type).name)

    def stored_bytes(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, one row of the tensor per row, mapped from the file."""
        rows = prod(self.shape[:-1])
        return self.file.data[self.offset : self.offset + self.size].reshape(rows, -1)

    @property
    def quantized_blocks(self) -> QuantizedBlocks | None:
        """The quantized blocks, or None if the storage format has no blocks."""
        return self.ordered_blocks()

    def ordered_blocks(self, order: npt.NDArray[np.int64] | None = None) -> QuantizedBlocks | None:
        """Return the quantized blocks with their rows in `order`, or None if the storage format has no blocks."""
        import torch
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        def read() -> torch.Tensor:
            return torch.from_numpy(self.stored_bytes() if order is None else self.stored_bytes()[order])

        return (
            QuantizedBlocks(self.type_name, prod(self.shape[:-1]), read)
            if GGML_QUANT_SIZES[GGMLQuantizationType(self.ggml_type)][0] > 1
            else None
        )

    def read(self) -> torch.Tensor:
        import torch
        from gguf import GGMLQuantizationType, dequantize

        values = dequantize(self.stored_bytes(), GGMLQuantizationType(self.ggml_type))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(self.shape)


def check_storage_types(name: str, header: GGUFFile) -> None:
    """Reject storage types that the gguf package defines but cannot dequantize."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    for kind in {GGMLQuantizationType(info.ggml_type) for info in header.tensors.values()}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{name} stores tensors as {kind.name}, which is not supported yet.", "Use a file in another format."
            ) from error


class _Cursor:
    """Sequential reader of the header that rejects reads past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def read_bytes(self, count: int, what: str) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise _damage_error(
                self.path, f"{what} at byte {self.position} extends past the end of the file ({len(self.data)} bytes)"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def read_number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.read_bytes(struct.calcsize(code), what))[0]

    def read_string(self, what: str) -> str:
        raw = self.read_bytes(self.read_number("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damage_error(self.path, f"{what} at byte {self.position} is not UTF-8") from error

    def read_value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.read_string(key)
        if kind != _ARRAY:
            raise _damage_error(self.path, f"{key} has the unknown type {kind}")
        item, count = self.read_number("I", key), self.read_number("Q", key)
        if item in _SCALARS:
            width = struct.calcsize(_SCALARS[item])
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.read_bytes(count * width, key)))
        if count * 8 > len(self.data):
            raise _damage_error(self.path, f"{key} declares {count} items, more than the file can contain")
        return [self.read_value(item, key) for _ in range(count)]


def read_header(path: Path) -> GGUFFile:
    """Read and check a GGUF model, except for the bytes of its tensors. Any part of a split model stands for all."""
    header = _read_file(path)
    if "split.count" in header.metadata and header.metadata["split.count"] != 1:
        header = _join_parts(header)
    _check_sizes(header)
    return header


def _read_file(path: Path) -> GGUFFile:
    if path.stat().st_size < 24:
        raise ModelError(f"{path.name} is too short to be a GGUF file.", "Download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if cursor.read_bytes(4, "the magic") != MAGIC:
            raise ModelError(f"{path.name} is not a GGUF file: it does not start with GGUF.", "Check the file name.")
        version = cursor.read_number("I", "the version")
        if version not in (2, 3):
            raise _damage_error(path, f"its version is {version}, but little-endian files have version 2 or 3")
        tensor_count, kv_count = cursor.read_number("Q", "the tensor count"), cursor.read_number("Q", "the key count")
        metadata: dict[str, Any] = {}
        for _ in range(kv_count):
            key = cursor.read_string("a key")
            if key in metadata:
                raise _damage_error(path, f"the key {key} appears twice")
            metadata[key] = cursor.read_value(cursor.read_number("I", key), key)
        return GGUFFile(path, metadata, _read_tensor_table(cursor, tensor_count, metadata))


def _join_parts(given: GGUFFile) -> GGUFFile:
    """Return the whole of a split model; only the first part has the metadata of the model."""
    number, count = (given.metadata.get(key) for key in ("split.no", "split.count"))
    paths = split_parts(given.path)
    if not isinstance(number, int) or len(paths) != count or paths[number % len(paths)] != given.path:
        raise ModelError(
            f"{given.path.name} states that it is part {number} (from 0) of {count} of a split GGUF model, which its"
            " name contradicts.",
            "Give the parts the names that llama-gguf-split gives: NAME-00001-of-00003.gguf and so on.",
        )
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ModelError(
            f"{given.path.name} is one of the {count} parts of a split GGUF model, of which {missing[0]}{more}"
            " missing.",
            "Put all parts into one folder.",
        )
    parts = [given if path == given.path else _read_file(path) for path in paths]
    tensors: dict[str, GGUFTensor] = {}
    total = parts[0].metadata.get("split.tensors.count")
    for place, part in enumerate(parts):
        stated = tuple(part.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count"))
        if stated != (place, count, total) or part.tensors.keys() & tensors.keys():
            raise _foreign_error(part.path, paths[0])
        tensors |= part.tensors
    if len(tensors) != total:
        raise ModelError(
            f"The {count} parts of {paths[0].name} have {len(tensors)} tensors, but {total} are stated.",
            "Download all parts again, from the same place.",
        )
    return GGUFFile(paths[0], parts[0].metadata, tensors)


def _foreign_error(path: Path, first: Path) -> ModelError:
    return ModelError(
        f"{path.name} is not a part of the same model as {first.name}: its number, the number of parts or tensors, or"
        " the name of a tensor contradicts the parts before it.",
        "Download all parts again, from the same place.",
    )


def _damage_error(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} is damaged: {what}.", "Download it again.")


def _read_tensor_table(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, GGUFTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    rows: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.read_string("a tensor name")
        rank = cursor.read_number("I", name)
        if not 1 <= rank <= 4:
            raise _damage_error(cursor.path, f"{name} has {rank} dimensions")
        shape = tuple(reversed([cursor.read_number("Q", name) for _ in range(rank)]))
        rows.append((name, shape, cursor.read_number("I", name), cursor.read_number("Q", name)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > 1 << 20:
        raise _damage_error(cursor.path, f"the alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    file = MappedFile(cursor.path)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in rows:
        if kind not in {int(each) for each in GGMLQuantizationType}:
            raise _type_error(cursor.path, name, kind)
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not all(shape) or shape[-1] % block:
            raise _damage_error(cursor.path, f"{name} has shape {list(shape)}, which is invalid for its storage type")
        size = prod(shape) // block * width
        if offset % alignment or start + offset + size > len(cursor.data):
            raise _damage_error(cursor.path, f"{name} ({size} bytes at {start + offset}) does not fit into the file")
        if name in tensors:
            raise _damage_error(cursor.path, f"the tensor {name} appears twice")
        tensors[name] = GGUFTensor(file, name, kind, shape, start + offset, size)
    return tensors


def _type_error(path: Path, name: str, kind: int) -> ModelError:
    if kind in _REMOVED_TYPES:
        problem = f"{path.name} stores {name} as {_REMOVED_TYPES[kind]}, a format that GGUF no longer has."
        return ModelError(problem, "Use a file in another format, such as Q4_0.")
    if kind > 255:
        return _damage_error(path, f"{name} has the unknown storage type {kind}")
    problem = f"{path.name} stores {name} in a format with the number {kind}, which the gguf package does not know."
    return ModelError(problem, "Upgrade the gguf package.")


def _check_sizes(header: GGUFFile) -> None:
    """Reject sizes that contradict the tensors; else a model of absurd size would be built before anything fails."""
    if not header.architecture:
        raise _damage_error(header.path, "its metadata has no general.architecture")
    largest = max((max(info.shape) for info in header.tensors.values()), default=0)
    for key in _SIZE_KEYS:
        name = f"{header.architecture}.{key}"
        value = header.metadata.get(name, 1)
        limit = len(header.tensors) if key == "block_count" else largest
        values = value if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, int) or not 0 <= each <= limit:
                raise _damage_error(
                    header.path, f"{name} is {each!r}, which contradicts its {len(header.tensors)} tensors"
                )
