"""Formats that weights are packed from: blocks stored in GGUF files, or plain values that are quantized here.

Each format is a weight map, such as `pack:Q4_1` or `pack:int4-g64`. A package records it, so it can be refitted.
`import inlay.ops` does not import this module, because running a package does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inlay.errors import ModelError, ProgramError
from inlay.ops.weight_layout import LANES, SUPER_GROUP, Packing, mixed_size, pack_mixed
from inlay.program.weights import WEIGHT_MAP_KINDS, WEIGHT_MAPS, WIDE_BLOCKS, WeightMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CHUNK_VALUES = 1 << 20
"""Values that are packed at a time. This bounds the memory beyond the weight and its packed form."""
_EXTRA_STEPS = (0.0, -1.0, 0.5, 1.0, 1.5, 2.0)
"""Added to the 15 steps of a group when scales are tried. Clipping values at the ends may reduce the total error."""

_REQUANTIZED_FORMATS = (
    *("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Stored formats that no kernel reads; their values are requantized to int8."""


@dataclass(frozen=True)
class ErrorStats:
    """The error of packed values: root mean square, and the largest error relative to the largest value."""

    rms: float
    max_relative: float

    @classmethod
    def worst(cls, errors: Iterable[ErrorStats]) -> ErrorStats:
        """Return the largest of each, or NaN if one of them is NaN.

        >>> ErrorStats.worst([ErrorStats(0.1, 0.5), ErrorStats(float("nan"), 0.2), ErrorStats(0.3, 0.1)])
        ErrorStats(rms=nan, max_relative=0.5)
        """
        return cls(
            *torch.tensor([(each.rms, each.max_relative) for each in errors], dtype=torch.float64).amax(0).tolist()
        )

    @property
    def text(self) -> str:
        """The error in percent.

        >>> ErrorStats(0.0712, 0.1).text
        'error 7.12 % (rms), at most 10 % of the largest value'
        """
        return f"error {100 * self.rms:.3g} % (rms), at most {100 * self.max_relative:.3g} % of the largest value"


@dataclass(frozen=True)
class PackedFormat:
    """A format: its packing, and the conversion of its rows to integers, scales and minima."""

    name: str
    packing: Packing
    to_integers: Callable[[Tensor], tuple[Any, ...]]
    """Returns the operands of `Packing.pack`."""
    to_values: Callable[[Tensor], Tensor]
    """Returns the values of rows."""
    is_block_format: bool = False
    """Whether rows are stored blocks, not values."""
    is_exact: bool = False
    """Whether the packed weight keeps the stored integers and groups."""

    @property
    def map_name(self) -> str:
        """The name of the weight map."""
        return f"pack:{self.name}"

    def pack(self, rows: Tensor) -> Tensor:
        """Pack all rows into one weight. Peak memory is little more than both."""
        packed = torch.empty(0, dtype=torch.uint8)
        at = 0
        for part in _chunks(rows):
            made = self.packing.pack(*self.to_integers(part))
            if not at:
                packed = torch.empty(-(-len(rows) // LANES), *made.shape[1:], dtype=torch.uint8)
            packed[at : at + len(made)] = made
            at += len(made)
        return packed

    def measure_error(self, rows: Tensor) -> ErrorStats:
        """Return the error of the packed values, which is NaN if a value is not finite."""
        sums, most = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for part in _chunks(rows):
            wanted = self.to_values(part).double()
            gap = self.packing.unpack(self.packing.pack(*self.to_integers(part)), len(part)).double() - wanted
            sums += torch.stack([gap.square().sum(), wanted.square().sum()])
            most = torch.maximum(most, torch.stack([gap.abs().max(), wanted.abs().max()]))  # Python's max hides NaN
        (square, whole), (worst, largest) = sums.tolist(), most.tolist()
        return ErrorStats((square / whole) ** 0.5 if whole else 0.0, worst / largest if largest else 0.0)


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    size = max(_CHUNK_VALUES // rows.shape[1] // LANES, 1) * LANES
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _unpack_q4_0(rows: Tensor, group_size: int = 32) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 2 + group_size // 2)
    return _unpack_nibbles(blocks[:, :, 2:]), _unpack_halves(blocks[:, :, :2])[0]


def _unpack_q4_1(rows: Tensor, group_size: int = 32) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 4 + group_size // 2)
    return _unpack_nibbles(blocks[:, :, 4:]), *_unpack_halves(blocks[:, :, :4])


def _unpack_q8_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 34)
    return (blocks[:, :, 2:] ^ 128).reshape(len(rows), -1), _unpack_halves(blocks[:, :, :2])[0]


def _unpack_q5_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 22)
    return _unpack_five_bits(blocks[:, :, 2:]), _unpack_halves(blocks[:, :, :2])[0]


def _unpack_q5_1(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 24)
    return _unpack_five_bits(blocks[:, :, 4:]), *_unpack_halves(blocks[:, :, :4])


def _unpack_q4_k(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 144)
    return _unpack_nibbles(blocks[:, :, 16:].reshape(len(rows), -1, 4, 32)), *_unpack_k_scales(blocks)


def _unpack_q5_k(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 176)
    low = _unpack_nibbles(blocks[:, :, 48:].reshape(len(rows), -1, 4, 32))
    high = blocks[:, :, 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(-1, 1) & 1
    return low | high.reshape(low.shape) << 4, *_unpack_k_scales(blocks)


def _unpack_q6_k(rows: Tensor) -> tuple[Tensor | None, ...]:
    blocks = rows.view(len(rows), -1, 210)
    low = _unpack_nibbles(blocks[:, :, :128].reshape(len(rows), -1, 2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(-1, 1)
    high = blocks[:, :, 128:192].reshape(len(rows), -1, 2, 1, 32) >> shifts & 3
    factors = blocks[:, :, 192:208].reshape(len(rows), -1)
    return low | high.reshape(low.shape) << 4, _unpack_halves(blocks[:, :, 208:])[0], None, factors


def _unpack_k_scales(blocks: Tensor) -> tuple[Tensor, ...]:
    """Return the scale and minimum of each block, and their eight factors of six bits, as in `q * scale + minimum`."""
    scale, minimum = _unpack_halves(blocks[:, :, :4])
    first, second, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    factors = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=2)
    minimum_factors = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=2)
    return scale, -minimum, factors.reshape(len(blocks), -1), minimum_factors.reshape(len(blocks), -1)


def _unpack_five_bits(stored: Tensor) -> Tensor:
    high = stored[:, :, :4].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1
    return _unpack_nibbles(stored[:, :, 4:]) | high.reshape(len(stored), -1) << 4


def _unpack_nibbles(stored: Tensor) -> Tensor:
    return torch.cat([stored & 15, stored >> 4], dim=-1).reshape(len(stored), -1)


def _unpack_halves(stored: Tensor) -> tuple[Tensor, ...]:
    return stored.contiguous().view(torch.float16).unbind(2)


def quantize_int8(values: Tensor, group_size: int = 32) -> tuple[Tensor, Tensor]:
    """Quantize to integers with zero point 128 and one scale per group.

    >>> q, scale = quantize_int8(torch.arange(-127.0, 127, 2).reshape(1, 127)[:, :32])
    >>> q[0, :3].tolist(), scale.tolist()
    ([1, 3, 5], [[1.0]])
    """
    groups = values.float().view(len(values), -1, group_size)
    scale = (groups.abs().amax(2) / 127).to(torch.float16)
    steps = groups / scale.float().unsqueeze(2).clamp(min=1e-9)
    return (steps.round().clamp(-128, 127) + 128).to(torch.uint8).view(values.shape), scale


def quantize_int4(values: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to 16 levels per group, `q * scale + minimum`, with the least squared error of several ranges.

    For each range, scale and minimum are fitted to its integers and rounded to float16. Then integers are recomputed.
    """
    x = values.float().view(-1, group_size)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    chosen = [torch.zeros_like(x), torch.zeros_like(low), torch.zeros_like(low)]
    for more in _EXTRA_STEPS:
        plain = (high - low) / 15
        fits = [(plain, low), _fit_affine(x, _quantize_levels(x, (high - low) / (15 + more), low))]
        for scale, minimum in fits if not more else fits[1:]:
            scale, minimum = scale.half().float(), minimum.half().float()
            q = _quantize_levels(x, scale, minimum)
            error = (q * scale + minimum - x).square().sum(1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            chosen = [torch.where(better, new, old) for new, old in zip((q, scale, minimum), chosen, strict=True)]
    q, scale, minimum = chosen
    shape = len(values), -1
    return q.to(torch.uint8).view(values.shape), scale.half().view(shape), minimum.half().view(shape)


def _quantize_levels(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((x - minimum) / scale.clamp(min=1e-9)).round().clamp(0, 15)


def _fit_affine(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a line through integers and values by least squares."""
    mean_q, mean_x = q.mean(1, keepdim=True), x.mean(1, keepdim=True)
    spread = (q - mean_q).square().sum(1, keepdim=True)
    scale = ((q - mean_q) * (x - mean_x)).sum(1, keepdim=True) / spread.clamp(min=1e-9)
    return scale, mean_x - scale * mean_q


def _dequantize(name: str, rows: Tensor) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[name]))


def _build_formats() -> Iterator[PackedFormat]:
    kept: dict[str, tuple[Packing, Callable[[Tensor], tuple[Any, ...]]]] = {
        "Q4_0": (Packing(4, 8), _unpack_q4_0),
        "Q4_1": (Packing(4, -1), _unpack_q4_1),
        "Q5_0": (Packing(5, 16), _unpack_q5_0),
        "Q5_1": (Packing(5, -1), _unpack_q5_1),
        "Q8_0": (Packing(8, 128), _unpack_q8_0),
        "Q4_K": (Packing(4, -1, SUPER_GROUP), _unpack_q4_k),
        "Q5_K": (Packing(5, -1, SUPER_GROUP), _unpack_q5_k),
        "Q6_K": (Packing(6, 32, SUPER_GROUP), _unpack_q6_k),
    }
    for name, (packing, integers) in kept.items():
        yield PackedFormat(name, packing, integers, partial(_dequantize, name), is_block_format=True, is_exact=True)
    for group in WIDE_BLOCKS:  # of quantized safetensors checkpoints
        for name, unpack in (("Q4_0", _unpack_q4_0), ("Q4_1", _unpack_q4_1)):
            packing, integers = replace(kept[name][0], group_size=group), partial(unpack, group_size=group)
            values = partial(_unpack_values, packing, integers)
            yield PackedFormat(f"{name}-g{group}", packing, integers, values, is_block_format=True, is_exact=True)
    for name in _REQUANTIZED_FORMATS:
        values = partial(_dequantize, name)
        yield PackedFormat(name, Packing(8, 128), partial(_requantize_int8, values), values, is_block_format=True)
    yield PackedFormat("bfloat16", Packing(16, 0), lambda values: (values,), Tensor.float)
    yield PackedFormat("float32", Packing(32, 0), lambda values: (values,), Tensor.float, is_exact=True)
    yield PackedFormat("int8", Packing(8, 128), quantize_int8, Tensor.float)
    for group in (32, 64, 128):
        yield PackedFormat(
            f"int4-g{group}", Packing(4, -1, group), partial(quantize_int4, group_size=group), Tensor.float
        )


def _unpack_values(packing: Packing, integers: Callable[[Tensor], tuple[Any, ...]], rows: Tensor) -> Tensor:
    return packing.unpack(packing.pack(*integers(rows)), len(rows))


def _requantize_int8(values: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    return quantize_int8(values(rows))


FORMATS = {each.name: each for each in _build_formats()}
"""Every format by name: those of stored blocks, and those that plain values are quantized to."""
WEIGHT_MAPS.update(
    {each.map_name: WeightMap(each.pack, (each.name,) if each.is_block_format else ()) for each in FORMATS.values()}
)


@dataclass(frozen=True)
class MixedFormat:
    """Stored blocks of several formats, joined by rows in a mixed weight of `size` bytes."""

    parts: tuple[PackedFormat, ...]
    size: int

    @property
    def map_name(self) -> str:
        """The name of the weight map, such as `mixed:4096:Q4_K,Q6_K`."""
        return f"mixed:{self.size}:{','.join(each.name for each in self.parts)}"

    @classmethod
    def parse(cls, text: str) -> MixedFormat:
        """Return the format of a weight map from its name without `mixed:`.

        >>> MixedFormat.parse("4096:Q4_K,Q6_K").map_name
        'mixed:4096:Q4_K,Q6_K'
        """
        size, _, names = text.partition(":")
        parts = tuple(FORMATS.get(name) for name in names.split(","))
        if not size.isdecimal() or not all(each is not None and each.is_block_format for each in parts):
            raise ProgramError(f"There is no weight map mixed:{text}.", "It is mixed:SIZE:FORMAT,…")
        return cls(tuple(each for each in parts if each is not None), int(size))

    def pack(self, *blocks: Tensor) -> Tensor:
        """Pack the rows of each part."""
        depth = self.parts[0].to_values(blocks[0][:1]).shape[1]
        parts = [(len(rows), each.packing) for rows, each in zip(blocks, self.parts, strict=True)]
        if mixed_size(parts, depth) > self.size:
            raise ModelError(
                f"Weights of {sum(map(len, blocks))} × {depth} do not fit into {self.size:,} bytes.",
                "Use a checkpoint of the same model, or build a new package.",
            )
        packed = (each.pack(rows) for rows, each in zip(blocks, self.parts, strict=True))
        return pack_mixed(parts, depth, packed, self.size)


def _mixed_map(text: str) -> WeightMap:
    mixed = MixedFormat.parse(text)
    return WeightMap(mixed.pack, tuple(each.name for each in mixed.parts))


WEIGHT_MAP_KINDS["mixed"] = _mixed_map
