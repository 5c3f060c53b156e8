"""The layout of packed weights, which every variant of the linear kernels reads, for any number of rows.

A weight `[features, depth]` is split into blocks of 16 features. A block contains its groups of `group_size` columns in
order. A group contains its integers, then one scale per feature, then one minimum per feature if minima are stored.
Within 32 columns, 64 bytes hold 4 columns of each feature: an operand of a byte dot product, and a row of an AMX tile.
With 4 bits, a byte holds column k in its low half and column k + 16 in its high half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
"""Features that are adjacent in memory."""
STEP = 32
"""Columns that are packed together."""


@dataclass(frozen=True)
class Packing:
    """A number format: `(q - zero) * scale`, or `q * scale + minimum` when minima are stored (`zero_point` is -1).

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
        return self.group_size * LANES * self.bits // 8 + 2 * LANES * scales

    def shape(self, out_features: int, in_features: int) -> tuple[int, int, int]:
        """Return the shape of the packed weight.

        >>> Packing(4, -1).shape(960, 576)
        (60, 18, 320)
        """
        return -(-out_features // LANES), in_features // self.group_size, self.group_bytes

    def pack(self, q: Tensor, scale: Tensor | None = None, minimum: Tensor | None = None) -> Tensor:
        """Pack integers `[features, depth]` with scales and minima `[features, depth / group]` into a tensor of bytes.

        With 16 and 32 bits, `q` holds the values themselves.
        """
        features, depth = q.shape
        blocks, groups, _ = self.shape(features, depth)
        if self.bits == 32:
            columns = _pad_rows(q.to(torch.float32), blocks).view(blocks, LANES, groups, self.group_size)
            return columns.permute(0, 2, 3, 1).reshape(blocks, groups, -1).view(torch.uint8)
        if scale is None:
            pairs = _pad_rows(q.to(torch.bfloat16), blocks).view(blocks, LANES, groups, self.group_size // 2, 2)
            return pairs.permute(0, 2, 3, 1, 4).reshape(blocks, groups, -1).view(torch.uint8)
        q, scale = _pad_rows(q.to(torch.uint8), blocks), _pad_rows(scale.to(torch.float16), blocks)
        lanes = q.view(blocks, LANES, groups, self.group_size // STEP, STEP // 4, 4).permute(0, 2, 3, 4, 1, 5)
        if self.bits == 4:
            low, high = lanes.chunk(2, dim=3)
            lanes = low | high << 4
        parts = [lanes.reshape(blocks, groups, -1), _pack_factors(scale, blocks, groups)]
        if minimum is not None:
            parts.append(_pack_factors(_pad_rows(minimum.to(torch.float16), blocks), blocks, groups))
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
        if self.bits == 4:
            lanes = torch.cat([lanes & 15, lanes >> 4], dim=3)
        q = lanes.permute(0, 4, 1, 2, 3, 5).reshape(blocks * LANES, groups, self.group_size).float()
        factors = packed[:, :, size:].contiguous().view(torch.float16).float()
        factors = factors.view(blocks, groups, -1, LANES).permute(2, 0, 3, 1).reshape(-1, blocks * LANES, groups, 1)
        value = q * factors[0] + factors[1] if self.zero_point < 0 else (q - self.zero_point) * factors[0]
        return value.reshape(blocks * LANES, -1)[:out_features]


def _pad_rows(rows: Tensor, blocks: int) -> Tensor:
    """Pad rows with zeros to whole blocks."""
    return torch.nn.functional.pad(rows, (0, 0, 0, blocks * LANES - rows.shape[0]))


def _pack_factors(rows: Tensor, blocks: int, groups: int) -> Tensor:
    return rows.view(blocks, LANES, groups).transpose(1, 2).contiguous().view(torch.uint8)
