"""The layout of packed weights, which every variant of the linear kernels reads, for any number of rows.

A weight `[features, depth]` is split into blocks of 16 features. A block contains its groups of `group_size` columns in
order. A group contains its integers, then one scale per feature, then one minimum per feature if minima are stored.
Within 32 columns, 64 bytes hold 4 columns of each feature: an operand of a byte dot product, and a row of an AMX tile.
With 4 bits, a byte holds column k in its low half and column k + 16 in its high half. With 5 and 6 bits, the same 256
bytes hold the low four bits, and 64 or 128 bytes after them the others: 8 or 4 times 4 columns in each byte's bits.

A group of 256 columns has integer factors of its scale and minimum, one byte for each feature and 32 columns (with 6
bits 16 columns). They precede the scales: first those of the scale, then those of the minimum.

A *mixed* weight consists of weights of several formats, one after the other by features, in one tensor of bytes. It
starts with rows of four int32 numbers: the number of parts, columns, bytes in use and 0; then features, bits, zero
point and group size of each part. Parts start at multiples of 64 bytes. Zeros may follow the bytes in use, so that
weights of several layers have the same size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LANES = 16
"""Features that are adjacent in memory."""
STEP = 32
"""Columns that are packed together."""
SUPER_GROUP = 256
"""The size of groups whose scales have integer factors."""


@dataclass(frozen=True)
class Packing:
    """A number format: `(q - zero) * scale`, or `q * scale + minimum` when minima are stored (`zero_point` is -1).

    In groups of 256, scale and minimum are each a float16 number times an integer of a part of the group.
    16 bits are bfloat16 values without scales, with two columns of each feature adjacent. 32 bits are float32 values,
    column by column.
    """

    bits: int
    zero_point: int
    group_size: int = 32

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of a block."""
        scales = 0 if self.bits >= 16 else 2 if self.zero_point < 0 else 1
        return self.group_size * LANES * self.bits // 8 + (2 + self.factors) * LANES * scales

    @property
    def factors(self) -> int:
        """Integer factors of each scale and minimum of a group, per feature."""
        return 0 if self.group_size != SUPER_GROUP else SUPER_GROUP // (16 if self.bits == 6 else 32)

    def shape(self, out_features: int, in_features: int) -> tuple[int, int, int]:
        """Return the shape of the packed weight.

        >>> Packing(4, -1).shape(960, 576)
        (60, 18, 320)
        """
        return -(-out_features // LANES), in_features // self.group_size, self.group_bytes

    def pack(
        self,
        q: Tensor,
        scale: Tensor | None = None,
        minimum: Tensor | None = None,
        scale_factors: Tensor | None = None,
        minimum_factors: Tensor | None = None,
    ) -> Tensor:
        """Pack integers `[features, depth]` with scales and minima `[features, depth / group]` into a tensor of bytes.

        Factors are bytes `[features, depth / group * factors]`. With 16 and 32 bits, `q` holds the values themselves.
        """
        features, depth = q.shape
        blocks, groups, _ = self.shape(features, depth)
        if self.bits == 32:
            columns = _pad_rows(q.to(torch.float32), blocks).view(blocks, LANES, groups, self.group_size)
            return columns.permute(0, 2, 3, 1).reshape(blocks, groups, -1).view(torch.uint8)
        if scale is None:
            pairs = _pad_rows(q.to(torch.bfloat16), blocks).view(blocks, LANES, groups, self.group_size // 2, 2)
            return pairs.permute(0, 2, 3, 1, 4).reshape(blocks, groups, -1).view(torch.uint8)
        q = _pad_rows(q.to(torch.uint8), blocks)
        lanes = q.view(blocks, LANES, groups, self.group_size // STEP, STEP // 4, 4).permute(0, 2, 3, 4, 1, 5)
        if self.bits < 8:
            low, high = (lanes & 15).chunk(2, dim=3)
            lines = [low | high << 4]
            if more := self.bits - 4:
                rest = (lanes >> 4).reshape(*lanes.shape[:3], more, 8 // more, LANES, 4)
                shifts = torch.arange(0, 8, more, dtype=torch.uint8).view(-1, 1, 1)
                lines.append((rest << shifts).sum(4, dtype=torch.uint8))
            lanes = torch.cat(lines, dim=3)
        parts = [lanes.reshape(blocks, groups, -1)]
        scale, minimum = scale.to(torch.float16), minimum if minimum is None else minimum.to(torch.float16)
        stored = (scale_factors, minimum_factors, scale, minimum)
        parts += [_pack_scales(_pad_rows(each, blocks), blocks, groups) for each in stored if each is not None]
        return torch.cat(parts, dim=2)

    def unpack(self, packed: Tensor, out_features: int) -> Tensor:
        """Return the weight as float32, `[features, depth]`; exact.

        >>> format = Packing(8, 128)
        >>> q = torch.randint(0, 256, (20, 64))
        >>> value = format.unpack(format.pack(q, torch.full((20, 2), 0.5)), 20)
        >>> bool((value == (q - 128) * 0.5).all())
        True
        """
        blocks, groups, _ = packed.shape
        if self.bits == 32:
            columns = packed.view(torch.float32).view(blocks, groups, self.group_size, LANES).permute(0, 3, 1, 2)
            return columns.reshape(blocks * LANES, -1)[:out_features]
        if self.bits == 16:
            pairs = packed.view(torch.bfloat16).view(blocks, groups, STEP // 2, LANES, 2).permute(0, 3, 1, 2, 4)
            return pairs.reshape(blocks * LANES, -1)[:out_features].float()
        size = self.group_size * LANES * self.bits // 8
        lanes = packed[:, :, :size].reshape(blocks, groups, self.group_size // STEP, -1, LANES, 4)
        if self.bits < 8:
            low, rest = lanes[:, :, :, :4], lanes[:, :, :, 4:]
            lanes = torch.cat([low & 15, low >> 4], dim=3)
            if more := self.bits - 4:
                shifts = torch.arange(0, 8, more, dtype=torch.uint8).view(-1, 1, 1)
                lanes |= (rest.unsqueeze(4) >> shifts & (1 << more) - 1).flatten(3, 4) << 4
        q = lanes.permute(0, 4, 1, 2, 3, 5).reshape(blocks * LANES, groups * max(self.factors, 1), -1).float()
        count = 2 if self.zero_point < 0 else 1
        stored = packed[:, :, size + count * self.factors * LANES :].contiguous().view(torch.float16).float()
        scales = stored.view(blocks, groups, count, 1, LANES)
        if self.factors:
            factors = packed[:, :, size : size + count * self.factors * LANES].contiguous().view(torch.int8)
            scales = scales * factors.view(blocks, groups, count, self.factors, LANES)
        scales = scales.permute(2, 0, 4, 1, 3).reshape(count, blocks * LANES, -1, 1)
        value = q * scales[0] + scales[1] if self.zero_point < 0 else (q - self.zero_point) * scales[0]
        return value.reshape(blocks * LANES, -1)[:out_features]


MIXED = Packing(0, 0)
"""The packing that operators state for a mixed weight."""
_MIXED_ALIGNMENT = 64


def mixed_size(parts: Sequence[tuple[int, Packing]], depth: int) -> int:
    """Return the bytes of a mixed weight of parts with these features.

    >>> mixed_size([(32, Packing(8, 128)), (16, Packing(5, 16))], 64)
    2944
    """
    return [start + size for _, _, start, size in _mixed_parts(parts, depth)][-1]


def pack_mixed(parts: Sequence[tuple[int, Packing]], depth: int, packed: Iterator[Tensor], size: int) -> Tensor:
    """Join packed weights, which are taken one at a time, in a mixed weight of `size` bytes."""
    made = torch.zeros(size, dtype=torch.uint8)
    rows = [(len(parts), depth, mixed_size(parts, depth), 0)]
    rows += [(features, packing.bits, packing.zero_point, packing.group_size) for features, packing in parts]
    made[: 16 * len(rows)] = torch.tensor(rows, dtype=torch.int32).view(-1).view(torch.uint8)
    for (_, _, start, count), part in zip(_mixed_parts(parts, depth), packed, strict=True):
        made[start : start + count] = part.view(-1)
    return made


def unpack_mixed(weight: Tensor) -> Tensor:
    """Return a mixed weight as float32, `[features, depth]`; exact."""
    parts, depth, _ = read_mixed(weight)
    return torch.cat(
        [
            packing.unpack(weight[start : start + count].view(packing.shape(features, depth)), features)
            for features, packing, start, count in _mixed_parts(parts, depth)
        ]
    )


def read_mixed(weight: Tensor) -> tuple[list[tuple[int, Packing]], int, int]:
    """Return the parts of a mixed weight with their features, the columns, and the bytes in use."""
    count, depth, used = weight[:16].clone().view(torch.int32).tolist()[:3]
    rows = weight[16 : 16 * (count + 1)].clone().view(torch.int32).view(-1, 4).tolist()
    return [(features, Packing(*packing)) for features, *packing in rows], depth, used


def _mixed_parts(parts: Sequence[tuple[int, Packing]], depth: int) -> Iterator[tuple[int, Packing, int, int]]:
    """Yield features, packing, first byte and number of bytes of each part."""
    start = 16 * (len(parts) + 1)
    for features, packing in parts:
        start = -(-start // _MIXED_ALIGNMENT) * _MIXED_ALIGNMENT
        size = math.prod(packing.shape(features, depth))
        yield features, packing, start, size
        start += size


def _pad_rows(rows: Tensor, blocks: int) -> Tensor:
    """Pad rows with zeros to whole blocks."""
    return torch.nn.functional.pad(rows, (0, 0, 0, blocks * LANES - rows.shape[0]))


def _pack_scales(rows: Tensor, blocks: int, groups: int) -> Tensor:
    scales = rows.view(blocks, LANES, groups, -1).permute(0, 2, 3, 1).contiguous()
    return scales.view(torch.uint8).view(blocks, groups, -1)
