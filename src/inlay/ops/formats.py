"""What weights are packed from: blocks as GGUF files store them, or plain values that are quantised here.

Each format is a weight map, `pack:Q4_1` or `pack:int4-g64`, so a package says how its weights were made and can be
refitted. Not part of `import inlay.ops`: what runs a package never needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inlay.ops.packing import LANES, Packing
from inlay.program.weights import WEIGHT_MAPS, WeightMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_AT_ONCE = 1 << 20
"""Values that are worked on at a time: what packing needs beside the weight and its packed form."""
_SHRINK = (0.0, -1.0, 0.5, 1.0, 1.5, 2.0)
"""Steps that a group of 16 levels is tried with beyond its 15: values at the ends are worth less than all others."""

_CONVERTED = (
    *("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Stored formats that no kernel reads as they are: their values go to int8."""


@dataclass(frozen=True)
class Error:
    """How far packed values are from the original: root mean square, and the largest relative to the largest value."""

    rms: float
    largest: float

    @classmethod
    def worst(cls, errors: Iterable[Error]) -> Error:
        """The largest of each; not a number if one of them is not.

        >>> Error.worst([Error(0.1, 0.5), Error(float("nan"), 0.2), Error(0.3, 0.1)])
        Error(rms=nan, largest=0.5)
        """
        return cls(*torch.tensor([(each.rms, each.largest) for each in errors], dtype=torch.float64).amax(0).tolist())

    @property
    def text(self) -> str:
        """In per cent.

        >>> Error(0.0712, 0.1).text
        'error 7.12 % (rms), at most 10 % of the largest value'
        """
        return f"error {100 * self.rms:.3g} % (rms), at most {100 * self.largest:.3g} % of the largest value"


@dataclass(frozen=True)
class Format:
    """A format: how it is packed, and how its rows become integers, scales and minima."""

    name: str
    packing: Packing
    integers: Callable[[Tensor], tuple[Tensor, ...]]
    values: Callable[[Tensor], Tensor]
    """The values that rows stand for."""
    blocks: bool = False
    """Whether rows are stored blocks, not values."""
    exact: bool = False
    """Whether the packed weight has the integers and groups that were stored."""

    @property
    def map(self) -> str:
        """The name of the weight map."""
        return f"pack:{self.name}"

    def pack(self, rows: Tensor) -> Tensor:
        """All rows as one packed weight; little more than both is held."""
        packed = torch.empty(0, dtype=torch.uint8)
        at = 0
        for part in _parts(rows):
            made = self.packing.pack(*self.integers(part))
            if not at:
                packed = torch.empty(-(-len(rows) // LANES), *made.shape[1:], dtype=torch.uint8)
            packed[at : at + len(made)] = made
            at += len(made)
        return packed

    def error(self, rows: Tensor) -> Error:
        """How far the packed values are from the original ones; not a number where a value is not finite."""
        sums, most = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for part in _parts(rows):
            wanted = self.values(part).double()
            gap = self.packing.unpack(self.packing.pack(*self.integers(part)), len(part)).double() - wanted
            sums += torch.stack([gap.square().sum(), wanted.square().sum()])
            most = torch.maximum(most, torch.stack([gap.abs().max(), wanted.abs().max()]))  # Python's max hides NaN
        (square, whole), (worst, largest) = sums.tolist(), most.tolist()
        return Error((square / whole) ** 0.5 if whole else 0.0, worst / largest if largest else 0.0)


def _parts(rows: Tensor) -> Iterator[Tensor]:
    size = max(_AT_ONCE // rows.shape[1] // LANES, 1) * LANES
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _q4_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 18)
    return _nibbles(blocks[:, :, 2:]), _halves(blocks[:, :, :2])[0]


def _q4_1(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 20)
    return _nibbles(blocks[:, :, 4:]), *_halves(blocks[:, :, :4])


def _q8_0(rows: Tensor) -> tuple[Tensor, ...]:
    blocks = rows.view(len(rows), -1, 34)
    return (blocks[:, :, 2:] ^ 128).reshape(len(rows), -1), _halves(blocks[:, :, :2])[0]


def _nibbles(stored: Tensor) -> Tensor:
    return torch.cat([stored & 15, stored >> 4], dim=2).reshape(len(stored), -1)


def _halves(stored: Tensor) -> tuple[Tensor, ...]:
    return stored.contiguous().view(torch.float16).unbind(2)


def to_int8(values: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """Integers around 128 and a scale a group.

    >>> q, scale = to_int8(torch.arange(-127.0, 127, 2).reshape(1, 127)[:, :32])
    >>> q[0, :3].tolist(), scale.tolist()
    ([1, 3, 5], [[1.0]])
    """
    groups = values.float().view(len(values), -1, group)
    scale = (groups.abs().amax(2) / 127).to(torch.float16)
    steps = groups / scale.float().unsqueeze(2).clamp(min=1e-9)
    return (steps.round().clamp(-128, 127) + 128).to(torch.uint8).view(values.shape), scale


def to_int4(values: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """16 levels a group, `q * scale + minimum`: of a few ranges the one with the least square error.

    For each range, scale and minimum are what fits its integers best, as float16, and the integers are taken anew.
    """
    x = values.float().view(-1, group)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    chosen = [torch.zeros_like(x), torch.zeros_like(low), torch.zeros_like(low)]
    for more in _SHRINK:
        plain = (high - low) / 15
        fits = [(plain, low), _fitted(x, _levels(x, (high - low) / (15 + more), low))]
        for scale, minimum in fits if not more else fits[1:]:
            scale, minimum = scale.half().float(), minimum.half().float()
            q = _levels(x, scale, minimum)
            error = (q * scale + minimum - x).square().sum(1, keepdim=True)
            better = error < best
            best = torch.where(better, error, best)
            chosen = [torch.where(better, new, old) for new, old in zip((q, scale, minimum), chosen, strict=True)]
    q, scale, minimum = chosen
    shape = len(values), -1
    return q.to(torch.uint8).view(values.shape), scale.half().view(shape), minimum.half().view(shape)


def _levels(x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    return ((x - minimum) / scale.clamp(min=1e-9)).round().clamp(0, 15)


def _fitted(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The line through integers and values, by least squares."""
    mean_q, mean_x = q.mean(1, keepdim=True), x.mean(1, keepdim=True)
    spread = (q - mean_q).square().sum(1, keepdim=True)
    scale = ((q - mean_q) * (x - mean_x)).sum(1, keepdim=True) / spread.clamp(min=1e-9)
    return scale, mean_x - scale * mean_q


def _dequantised(name: str, rows: Tensor) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[name]))


def _formats() -> Iterator[Format]:
    kept = {"Q4_0": (Packing(4, 8), _q4_0), "Q4_1": (Packing(4, -1), _q4_1), "Q8_0": (Packing(8, 128), _q8_0)}
    for name, (packing, integers) in kept.items():
        yield Format(name, packing, integers, partial(_dequantised, name), blocks=True, exact=True)
    for name in _CONVERTED:
        values = partial(_dequantised, name)
        yield Format(name, Packing(8, 128), partial(_through, values), values, blocks=True)
    yield Format("bfloat16", Packing(16, 0), lambda values: (values,), Tensor.float)
    yield Format("float32", Packing(32, 0), lambda values: (values,), Tensor.float, exact=True)
    yield Format("int8", Packing(8, 128), to_int8, Tensor.float)
    for group in (32, 64, 128):
        yield Format(f"int4-g{group}", Packing(4, -1, group), partial(to_int4, group=group), Tensor.float)


def _through(values: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    return to_int8(values(rows))


FORMATS = {each.name: each for each in _formats()}
"""Every format by name: those of stored blocks, and those that plain values are quantised to."""
WEIGHT_MAPS.update({each.map: WeightMap(each.pack, each.name if each.blocks else "") for each in FORMATS.values()})
