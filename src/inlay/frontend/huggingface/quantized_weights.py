"""Quantized safetensors checkpoints: GPTQ, AWQ, compressed-tensors, fp8 and MXFP4.

Tensors that store one weight together become one reference. It returns the values or, if a block format of GGUF holds
them, the stored integers. They are found by name, so modules that a checkpoint leaves in float need no list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ModelError
from inlay.program.weights import WIDE_BLOCKS, QuantizedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from inlay.frontend.safetensors_files import SafetensorsTensor

_BLOCK = 32
"""Columns of a GGUF block, and bits of a word that integers are packed into."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of eight consecutive columns."""
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense", None)
"""Formats of compressed-tensors that are read; a mixed one states the format of each group of layers."""
_FLOATS = ("F16", "BF16", "F32")
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")
"""Ends of the names of scales for quantized activations, which the values of weights do not depend on."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Integers with a scale and a zero for each group of columns in a row: `(q - zero) * scale`."""

    bits: int
    integers: Callable[[], Tensor]
    """Returns `[rows, columns]` in uint8."""
    scale: Tensor
    zero: Tensor
    """Scales and zeros, `[rows, groups]`."""
    group: Tensor
    """The group of each column."""

    def values(self) -> Tensor:
        return self._steps(self.integers().float()) * self.scale.float()[:, self.group]

    def blocks(self) -> QuantizedBlocks | None:
        """Return the integers as Q4_0, Q4_1 or Q8_0 blocks, or None. 4-bit blocks are as wide as the groups allow."""
        low, high, top = int(self.zero.min()), int(self.zero.max()), (1 << self.bits) - 1
        factors, widths = [self.scale.float()], (*reversed(WIDE_BLOCKS), _BLOCK)
        if high <= 8 and top - low <= 7:
            name, offset = "Q4_0", 8
        elif self.bits <= 4:
            name, offset = "Q4_1", -1
            factors.append(-self.scale.float() * self.zero.float())
        elif high <= 128 and top - low <= 127:
            name, offset, widths = "Q8_0", 0, (_BLOCK,)
        else:
            return None
        width = next((each for each in widths if self._has_blocks(each)), None)
        stored = [each.half() for each in factors]
        pairs = list(zip(stored, factors, strict=True))
        if width is None or not all(torch.allclose(half.float(), each, rtol=2**-10, atol=0.0) for half, each in pairs):
            return None
        is_exact = all(torch.equal(half.float(), each) for half, each in pairs)
        name += "" if width == _BLOCK else f"-g{width}"
        return QuantizedBlocks(name, len(self.scale), partial(self._write_blocks, stored, offset, width), is_exact)

    def _has_blocks(self, width: int) -> bool:
        """Whether each run of this many columns is part of one group."""
        return not len(self.group) % width and bool((self.group.view(-1, width) == self.group[::width, None]).all())

    def _write_blocks(self, factors: list[Tensor], offset: int, width: int) -> Tensor:
        """Return rows of blocks. The format has this zero point, or stores minima if it is -1, or signed bytes if 0."""
        q = self.integers()
        if offset >= 0:
            q = (self._steps(q.short()) + offset).to(torch.uint8)
        q = q.view(len(q), -1, width)
        if offset:
            low, high = q.chunk(2, dim=2)
            q = low | high << 4
        heads = [each[:, self.group[::width]].unsqueeze(2).contiguous().view(torch.uint8) for each in factors]
        return torch.cat([*heads, q], dim=2).reshape(len(q), -1)

    def _steps(self, q: Tensor) -> Tensor:
        return q - self.zero.to(q.dtype)[:, self.group]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight that several tensors of a checkpoint store together."""

    key: str
    shape: tuple[int, ...]
    config: Path
    """The file that states how to decode the parts."""
    parts: tuple[SafetensorsTensor, ...]
    decode: Callable[..., Tensor | Groups]
    """Takes the parts."""
    dtype_name: str = "F32"
    """The dtype of the decoded values, as safetensors names it."""

    @property
    def origin(self) -> str:
        return f"{self.parts[0].origin} and {len(self.parts) - 1} more"

    @property
    def quantized_blocks(self) -> QuantizedBlocks | None:
        """The stored integers in a block format of GGUF, or None if there is none for them."""
        found = self.decode(*self.parts)
        return found.blocks() if isinstance(found, Groups) else None

    def read(self) -> Tensor:
        found = self.decode(*self.parts)
        return found.values() if isinstance(found, Groups) else found


@dataclass(frozen=True)
class Quantization:
    """A quantization that a file of a checkpoint states."""

    stated: Mapping[str, Any]
    config: Path

    @property
    def bits(self) -> Any:
        """The bits of a weight, for the kinds that state them so."""
        return self.stated.get("bits", self.stated.get("w_bit"))

    def unsupported(self) -> str | None:
        """Return what of a quantization is not read: a setting, an empty string for all of it, None for nothing."""
        stated, method = self.stated, self.stated["quant_method"]
        bits = self.bits
        if method == "gptq":
            layout = "marlin" if stated.get("is_marlin_format") else stated.get("checkpoint_format", "gptq")
            rules = stated.get("dynamic") or {}
            varied = not isinstance(rules, dict) or any(not str(pattern).startswith("-") for pattern in rules)
            found = [
                *([] if _is_positive(bits) and bits in (2, 4, 8) else [f"{bits} bits"]),
                *([] if layout in ("gptq", "gptq_v2") else [f"the layout {layout}"]),
                *(["different settings for some layers"] if varied else []),
                *self._unsupported_group(),
            ]
        elif method == "awq":
            layout = str(stated.get("version", "gemm")).lower()
            found = [
                *([] if bits == 4 else [f"{bits} bits"]),
                *([] if layout == "gemm" else [f"the layout {layout}"]),
                *(["no zero points"] if stated.get("zero_point") is False else []),
                *self._unsupported_group(),
            ]
        elif method == "compressed-tensors":
            formats = [stated.get("format"), *(group.get("format") for group in self._groups())]
            found = [key for key in ("sparsity_config", "transform_config") if _is_stated(stated.get(key))]
            found += sorted({f"the format {each}" for each in formats if each not in _FORMATS})
            found += self._unsupported_block()
        else:
            return None if method == "mxfp4" or (method == "fp8" and not self._unsupported_block()) else ""
        return ", ".join(found) or None

    def _unsupported_group(self) -> list[str]:
        size = self.group_size
        return [] if size == -1 or _is_positive(size) else [f"groups of {size}"]

    def _unsupported_block(self) -> list[str]:
        size = self.block_size
        fits = size is None or (isinstance(size, list) and len(size) == 2 and all(_is_positive(each) for each in size))
        return [] if fits else [f"blocks of {size}"]

    @property
    def group_size(self) -> Any:
        """Columns of a group; -1 if a row is one group."""
        return self.stated.get("group_size", self.stated.get("q_group_size", 128))

    @property
    def block_size(self) -> Any:
        """Rows and columns of a block of values with one scale, or None."""
        structures = [each.get("block_structure") for each in self._weights()]
        return self.stated.get("weight_block_size") or next(filter(None, structures), None)

    @property
    def is_asymmetric(self) -> bool:
        """Whether all weights have zero points."""
        found = [each.get("symmetric") for each in self._weights()]
        return bool(found) and all(each is False for each in found)

    def _weights(self) -> list[Mapping[str, Any]]:
        return [each for group in self._groups() if isinstance(each := group.get("weights"), dict)]

    def _groups(self) -> list[Mapping[str, Any]]:
        groups = self.stated.get("config_groups")
        return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []

    def decode(self, stored: Mapping[str, SafetensorsTensor]) -> dict[str, SafetensorsTensor | QuantizedTensor]:
        """Replace the tensors of quantized weights by references to the weights; other tensors stay."""
        found: dict[str, SafetensorsTensor | QuantizedTensor] = dict(stored)
        for layout in _LAYOUTS[self.stated["quant_method"]]:
            for made in [made for key in stored if (made := layout(self, _Parts(stored, key)))]:
                for part in made.parts:
                    found.pop(part.key, None)
                found[made.key] = made
        if any(isinstance(ref, QuantizedTensor) for ref in found.values()):
            found = {key: ref for key, ref in found.items() if not key.endswith(_ACTIVATION_SCALES)}
        return found


def _is_stated(value: Any) -> bool:
    """Whether a part of a configuration states anything but dense weights."""
    return bool(value) and not (isinstance(value, dict) and value.get("format") == "dense")


def _is_positive(size: Any) -> bool:
    return isinstance(size, int) and size > 0


@dataclass(frozen=True)
class _Parts:
    """The tensors of one weight by the ends of their names, checked when they are taken."""

    stored: Mapping[str, SafetensorsTensor]
    key: str

    def stem(self, end: str) -> str | None:
        return self.key.removesuffix(end) if self.key.endswith(end) else None

    def take(self, name: str, shape: tuple[int, ...], *dtypes: str) -> SafetensorsTensor:
        """Return a tensor of one of these dtypes; -1 stands for any size."""
        part = self.stored.get(name)
        if part is None:
            raise ModelError(f"{self.key} is quantized, but {name} is missing.", "Check that the download is complete.")
        fits = len(shape) == len(part.shape) and all(a in (-1, b) for a, b in zip(shape, part.shape, strict=True))
        if part.dtype_name not in dtypes or not fits or 0 in part.shape:
            sizes = ", ".join("any" if size < 0 else str(size) for size in shape)
            wanted = f"{' or '.join(dtypes)} [{sizes}]"
            raise ModelError(
                f"{name} is stored as {part.dtype_name} {list(part.shape)} instead of {wanted}.",
                "Check that the configuration belongs to this checkpoint, or download it again.",
            )
        return part

    def take_optional(
        self, name: str, shape: tuple[int, ...], *dtypes: str, required: bool = False
    ) -> tuple[SafetensorsTensor, ...]:
        """Return a tensor if there is one. `required` says that the configuration states one."""
        return (self.take(name, shape, *dtypes),) if required or name in self.stored else ()


def _gptq(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Columns packed into words along the input; v1 stores zeros minus 1."""
    stem = parts.stem(".qweight")
    if stem is None:
        return None
    bits = kind.bits
    words = parts.take(parts.key, (-1, -1), "I32")
    columns, rows = words.shape[0] * _BLOCK // bits, words.shape[1]
    size = columns if kind.group_size < 0 else kind.group_size
    groups = -(-columns // size)
    scales = parts.take(f"{stem}.scales", (groups, rows), *_FLOATS)
    zeros = parts.take(f"{stem}.qzeros", (groups, -(-rows * bits // _BLOCK)), "I32")
    is_ordered = bool(kind.stated.get("desc_act")) and groups > 1
    order = parts.take_optional(f"{stem}.g_idx", (columns,), "I32", "I64", required=is_ordered)
    is_shifted = kind.stated.get("checkpoint_format", "gptq") == "gptq"

    def decode(
        words: SafetensorsTensor, scales: SafetensorsTensor, zeros: SafetensorsTensor, *order: SafetensorsTensor
    ) -> Groups:
        zero = _unpack(zeros.read(), bits)[:, :rows].t().short()
        if is_shifted and bool((zero == (1 << bits) - 1).any()):
            raise ModelError(
                f"{zeros.origin} stores the zero point {(1 << bits) - 1}, which libraries read as 0 or as {1 << bits}.",
                "Use a checkpoint in the format gptq_v2, or with symmetric integers.",
            )
        group = _read_order(order, groups) if order else torch.arange(columns) // size
        integers = lambda: _unpack(words.read().t(), bits)  # noqa: E731
        return Groups(bits, integers, scales.read().t(), zero + is_shifted, group)

    return QuantizedTensor(f"{stem}.weight", (rows, columns), kind.config, (words, scales, zeros, *order), decode)


def _awq(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Rows packed into words in the order of AWQ."""
    stem = parts.stem(".qweight")
    if stem is None:
        return None
    words = parts.take(parts.key, (-1, -1), "I32")
    columns, rows = words.shape[0], words.shape[1] * 8
    size = columns if kind.group_size < 0 else kind.group_size
    scales = parts.take(f"{stem}.scales", (-(-columns // size), rows), *_FLOATS)
    zeros = parts.take(f"{stem}.qzeros", (-(-columns // size), words.shape[1]), "I32")

    def unpack(words: SafetensorsTensor) -> Tensor:
        places = _unpack(words.read(), 4).view(words.shape[0], -1, 8)[:, :, _AWQ_ORDER]
        return places.flatten(1).t().contiguous()

    def decode(words: SafetensorsTensor, scales: SafetensorsTensor, zeros: SafetensorsTensor) -> Groups:
        group = torch.arange(columns) // size
        return Groups(4, partial(unpack, words), scales.read().t(), unpack(zeros).short(), group)

    return QuantizedTensor(f"{stem}.weight", (rows, columns), kind.config, (words, scales, zeros), decode)


def _packed(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Signed integers plus half of their range, packed into words along the input."""
    name = parts.stem("_packed")
    if name is None:
        return None
    words = parts.take(parts.key, (-1, -1), "I32")
    shape = parts.take(f"{name}_shape", (2,), "I64", "I32")
    rows, columns = shape.read().tolist()
    sizes = [bits for bits in (2, 4, 8) if words.shape == (rows, -(-columns * bits // _BLOCK))]
    if len(sizes) != 1:
        raise ModelError(
            f"{parts.key} has shape {list(words.shape)}, which does not hold {rows} rows of {columns} columns of 2, 4"
            " or 8 bits.",
            "Use the checkpoint that it was quantized from.",
        )
    (bits,) = sizes
    scale, size = _group_scale(parts, f"{name}_scale", rows, columns)
    groups = scale.shape[1]
    zero_name = f"{name}_zero_point"
    is_word = zero_name in parts.stored and parts.stored[zero_name].dtype_name == "I32"
    zero_shape = (-(-rows * bits // _BLOCK), groups) if is_word else (rows, groups)
    zeros = parts.take_optional(zero_name, zero_shape, "I32", "I8", required=kind.is_asymmetric)
    order = parts.take_optional(f"{name}_g_idx", (columns,), "I32", "I64")
    half = 1 << (bits - 1)

    def decode(words: SafetensorsTensor, scale: SafetensorsTensor, *more: SafetensorsTensor) -> Groups:
        zero = torch.full((rows, groups), half, dtype=torch.int16)
        if zeros:
            read = zeros[0].read()
            zero = _unpack(read.t(), bits).t()[:rows].short() if is_word else read.short() + half
        group = _read_order(order, groups) if order else torch.arange(columns) // size
        integers = lambda: _unpack(words.read(), bits)[:, :columns].contiguous()  # noqa: E731
        return Groups(bits, integers, scale.read(), zero, group)

    return QuantizedTensor(name, (rows, columns), kind.config, (words, scale, shape, *zeros, *order), decode)


def _int8(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Signed bytes, one for each value."""
    if parts.stem(".weight") is None or parts.stored[parts.key].dtype_name != "I8":
        return None
    weight = parts.take(parts.key, (-1, -1), "I8")
    rows, columns = weight.shape
    scale, size = _group_scale(parts, f"{parts.key}_scale", rows, columns)
    zeros = parts.take_optional(f"{parts.key}_zero_point", scale.shape, "I8", required=kind.is_asymmetric)

    def decode(weight: SafetensorsTensor, scale: SafetensorsTensor, *zeros: SafetensorsTensor) -> Groups:
        zero = zeros[0].read().short() + 128 if zeros else torch.full(scale.shape, 128, dtype=torch.int16)
        integers = lambda: weight.read().view(torch.uint8) ^ 128  # noqa: E731
        return Groups(8, integers, scale.read(), zero, torch.arange(columns) // size)

    return QuantizedTensor(parts.key, (rows, columns), kind.config, (weight, scale, *zeros), decode)


def _fp8(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Values in E4M3 with one scale, or one for each row or block of the last two axes."""
    if parts.stored[parts.key].dtype_name != "F8_E4M3":
        return None
    weight = parts.stored[parts.key]
    name = next((f"{parts.key}{end}" for end in ("_scale_inv", "_scale") if f"{parts.key}{end}" in parts.stored), None)
    if name is None or len(weight.shape) < 2:
        return None  # refused by its dtype
    *lead, rows, columns = weight.shape
    high, wide = kind.block_size or (rows, columns)
    blocks = (*lead, -(-rows // high), -(-columns // wide))
    held = parts.stored[name].shape
    scale = parts.take(name, held, *_FLOATS, "F8_E8M0")
    if held not in ((), (1,), (*lead, rows), (*lead, rows, 1), (*lead, 1, 1), blocks):
        parts.take(name, blocks, *_FLOATS)

    def decode(weight: SafetensorsTensor, scale: SafetensorsTensor) -> Tensor:
        factor = scale.read().float()
        if factor.dim() == len(weight.shape) - 1 and factor.shape == weight.shape[:-1]:
            factor = factor.unsqueeze(-1)
        elif factor.shape == blocks:
            factor = factor.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :columns]
        return weight.read().float() * factor

    return QuantizedTensor(parts.key, weight.shape, kind.config, (weight, scale), decode)


def _mxfp4(kind: Quantization, parts: _Parts) -> QuantizedTensor | None:
    """Experts, transposed: blocks of 32 values in E2M1, two in a byte, with a power of two for each block."""
    name = parts.stem("_blocks")
    if name is None:
        return None
    blocks = parts.take(parts.key, (-1, -1, -1, _BLOCK // 2), "U8")
    experts, rows, groups, _ = blocks.shape
    scales = parts.take(f"{name}_scales", (experts, rows, groups), "U8")

    def decode(blocks: SafetensorsTensor, scales: SafetensorsTensor) -> Tensor:
        table = torch.tensor([*_MXFP4_VALUES, *(-each for each in _MXFP4_VALUES)])
        found = torch.empty(experts, groups * _BLOCK, rows)
        for expert, (codes, powers) in enumerate(zip(blocks.read(), scales.read(), strict=True)):
            values = table[torch.stack([codes & 15, codes >> 4], dim=3).flatten(2).int()]
            scaled = torch.ldexp(values, powers.int().unsqueeze(2) - 127)
            found[expert] = scaled.flatten(1).t()
        return found

    return QuantizedTensor(name, (experts, groups * _BLOCK, rows), kind.config, (blocks, scales), decode)


_LAYOUTS: dict[str, tuple[Callable[[Quantization, _Parts], QuantizedTensor | None], ...]] = {
    "gptq": (_gptq,),
    "awq": (_awq,),
    "compressed-tensors": (_packed, _int8, _fp8),
    "fp8": (_fp8,),
    "mxfp4": (_mxfp4,),
}
"""Layouts by the method that a configuration states."""


def _group_scale(parts: _Parts, name: str, rows: int, columns: int) -> tuple[SafetensorsTensor, int]:
    """Return the scales and the number of columns of a group, which all groups of a row have."""
    scale = parts.take(name, (rows, -1), *_FLOATS)
    if columns % scale.shape[1]:
        raise ModelError(
            f"{name} has {scale.shape[1]} groups for {columns} columns.",
            "Check that the configuration belongs to this checkpoint, or download it again.",
        )
    return scale, columns // scale.shape[1]


def _read_order(order: tuple[SafetensorsTensor, ...], groups: int) -> Tensor:
    """Return the group of each column as stored."""
    group = order[0].read().long()
    if int(group.min()) < 0 or int(group.max()) >= groups:
        raise ModelError(f"{order[0].origin} names a group beyond the {groups} stored ones.", "Download it again.")
    return group


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the integers of words along the last axis, lowest bits first.

    >>> _unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.uint8)
    """
    stored = words.contiguous().view(torch.uint8)
    fields = [stored >> at & (1 << bits) - 1 for at in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)
