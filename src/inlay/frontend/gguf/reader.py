"""GGUF files: a strict reader of the header, and tensors that are dequantized only when they are read.

The `gguf` package reads well-formed files. On a damaged file it can loop for hours or allocate terabytes.
So the header is checked here first: every count and offset against the size of the file.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.errors import ModelError
from inlay.program.weights import QuantizedBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    import torch

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
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
class TensorInfo:
    """One row of the file's tensor table. `shape` is in torch's order, rows first."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """The checked header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def data(self) -> npt.NDArray[np.uint8]:
        """The whole file, memory-mapped; copy-on-write, because torch has no read-only tensors."""
        return np.memmap(self.path, dtype=np.uint8, mode="c")

    @property
    def architecture(self) -> str:
        """The architecture that the header states, or an empty string."""
        return str(self.metadata.get("general.architecture", ""))


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file; `stored_bytes` are its bytes as stored, `read` dequantizes them to float32."""

    file: GGUFFile
    info: TensorInfo

    @property
    def origin(self) -> str:
        return f"{self.file.path.name}#{self.info.name} ({self.type_name})"

    @property
    def type_name(self) -> str:
        """The storage format, such as `Q4_1`."""
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(self.info.ggml_type).name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after dequantization."""
        return self.info.shape

    def stored_bytes(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, one row of the tensor per row, mapped from the file."""
        rows = prod(self.info.shape[:-1])
        return self.file.data[self.info.offset : self.info.offset + self.info.size].reshape(rows, -1)

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
            QuantizedBlocks(self.type_name, prod(self.info.shape[:-1]), read)
            if GGML_QUANT_SIZES[GGMLQuantizationType(self.info.ggml_type)][0] > 1
            else None
        )

    def read(self) -> torch.Tensor:
        import torch
        from gguf import GGMLQuantizationType, dequantize

        values = dequantize(self.stored_bytes(), GGMLQuantizationType(self.info.ggml_type))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(self.info.shape)


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

    def make_error(self, what: str) -> ModelError:
        return ModelError(f"{self.path.name} is damaged: {what}.", "Download it again.")

    def read_bytes(self, count: int, what: str) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise self.make_error(
                f"{what} at byte {self.position} extends past the end of the file ({len(self.data)} bytes)"
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
            raise self.make_error(f"{what} at byte {self.position} is not UTF-8") from error

    def read_value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.read_string(key)
        if kind != _ARRAY:
            raise self.make_error(f"{key} has the unknown type {kind}")
        item, count = self.read_number("I", key), self.read_number("Q", key)
        if item in _SCALARS:
            width = struct.calcsize(_SCALARS[item])
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.read_bytes(count * width, key)))
        if count * 8 > len(self.data):
            raise self.make_error(f"{key} declares {count} items, more than the file can contain")
        return [self.read_value(item, key) for _ in range(count)]


def read_header(path: Path) -> GGUFFile:
    """Read and check a GGUF file, except for the bytes of its tensors."""
    if path.stat().st_size < 24:
        raise ModelError(f"{path.name} is too short to be a GGUF file.", "Download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if cursor.read_bytes(4, "the magic") != MAGIC:
            raise ModelError(f"{path.name} is not a GGUF file: it does not start with GGUF.", "Check the file name.")
        version = cursor.read_number("I", "the version")
        if version not in (2, 3):
            raise cursor.make_error(f"its version is {version}, but little-endian files have version 2 or 3")
        tensor_count, kv_count = cursor.read_number("Q", "the tensor count"), cursor.read_number("Q", "the key count")
        metadata: dict[str, Any] = {}
        for _ in range(kv_count):
            key = cursor.read_string("a key")
            if key in metadata:
                raise cursor.make_error(f"the key {key} appears twice")
            metadata[key] = cursor.read_value(cursor.read_number("I", key), key)
        count = metadata.get("split.count")
        if isinstance(count, int) and count > 1:
            raise split_error(path, count)
        tensors = _read_tensor_table(cursor, tensor_count, metadata)
    header = GGUFFile(path, metadata, tensors)
    _check_sizes(cursor, header)
    return header


_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
# The file names that llama-gguf-split gives to parts.


def is_split_file(path: Path) -> bool:
    """Whether a file name is that of a part of a split model.

    >>> from pathlib import Path
    >>> is_split_file(Path("m-00001-of-00003.gguf")), is_split_file(Path("m.gguf"))
    (True, False)
    """
    part = _SPLIT_NAME.match(path.name)
    return part is not None and int(part["count"]) > 1


def split_error(path: Path, count: int | None = None) -> ModelError:
    """Return the error for a part of a split model."""
    part = _SPLIT_NAME.match(path.name)
    stem, count = part["stem"] if part else path.stem, count or int(part["count"] if part else 0)
    first, last = (f"{stem}-{number:05}-of-{count:05}.gguf" for number in (1, count))
    return ModelError(
        f"{path.name} is one of the {count} parts of a split GGUF model, {first} to {last}. Split models are not"
        " supported yet.",
        f"Merge the parts: llama-gguf-split --merge {first} {stem}.gguf",
    )


def _read_tensor_table(cursor: _Cursor, count: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    rows: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.read_string("a tensor name")
        rank = cursor.read_number("I", name)
        if not 1 <= rank <= 4:
            raise cursor.make_error(f"{name} has {rank} dimensions")
        shape = tuple(reversed([cursor.read_number("Q", name) for _ in range(rank)]))
        rows.append((name, shape, cursor.read_number("I", name), cursor.read_number("Q", name)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment > 1 << 20:
        raise cursor.make_error(f"the alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in rows:
        if kind not in {int(each) for each in GGMLQuantizationType}:
            raise cursor.make_error(f"{name} has the unknown storage type {kind}")
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not all(shape) or shape[-1] % block:
            raise cursor.make_error(f"{name} has shape {list(shape)}, which is invalid for its storage type")
        size = prod(shape) // block * width
        if offset % alignment or start + offset + size > len(cursor.data):
            raise cursor.make_error(f"{name} ({size} bytes at {start + offset}) does not fit into the file")
        if name in tensors:
            raise cursor.make_error(f"the tensor {name} appears twice")
        tensors[name] = TensorInfo(name, kind, shape, start + offset, size)
    return tensors


def _check_sizes(cursor: _Cursor, header: GGUFFile) -> None:
    """Reject sizes that contradict the tensors; else a model of absurd size would be built before anything fails."""
    if not header.architecture:
        raise cursor.make_error("its metadata has no general.architecture")
    largest = max((max(info.shape) for info in header.tensors.values()), default=0)
    for key in _SIZE_KEYS:
        name = f"{header.architecture}.{key}"
        value = header.metadata.get(name, 1)
        limit = len(header.tensors) if key == "block_count" else largest
        values = value if isinstance(value, list) else [value]
        for each in values:
            if not isinstance(each, int) or not 0 <= each <= limit:
                raise cursor.make_error(f"{name} is {each!r}, which contradicts its {len(header.tensors)} tensors")
