"""The roofline of a package: the time of its linear layers alone, and the time to read their bytes.

No decode step is faster than its linear layers, and those are not faster than memory. The rest of the benchmark uses
only `time_linears` and `time_weight_read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from inlay.lowering import kernel_choice
from inlay.lowering.eager_graph import EagerGraph
from inlay.ops.weight_layout import SUPER_GROUP, Packing, read_mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inlay.lowering.buckets import Bucket, PieceFile
    from inlay.package.loader import LoadedPackage

    Run = Callable[[torch.Tensor], torch.Tensor]

_PLAIN, _PACKED = "aten.linear.default", "inlay.packed_linear.default"
_TRIALS = 3


@dataclass(frozen=True, eq=False)
class LinearCall:
    """One linear call of a package, with its weight."""

    weight: torch.Tensor
    features: int
    depth: int
    bits: int = 0
    """Bits of a packed weight; 0 for a plain matrix."""
    zero: int = 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """Key of the kernel choice: linear layers of the same shape use the same kernel."""
        return self.features, self.depth, self.bits, self.weight.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input; packed weights of up to 16 bits use bfloat16."""
        return self.weight.dtype if not self.bits else torch.float32 if self.bits == 32 else torch.bfloat16


def find_linear_calls(package: LoadedPackage, rows: int) -> list[LinearCall]:
    """Return every linear call of a step with this number of rows, in execution order.

    A compiled piece does not list its calls: each matrix among its weights is assumed to be used once.
    """
    bucket = _bucket(package, rows)
    pieces = {piece.name: piece for piece in bucket.pieces}
    found: list[LinearCall] = []
    for step in bucket.steps:
        weights = [package.weights[name] for name in step.constants]
        piece = pieces[step.piece]
        found += (
            _linears_from_calls(package, piece, weights)
            if piece.file.endswith(".json")
            else _linears_from_weights(piece, weights)
        )
    return found


def _bucket(package: LoadedPackage, rows: int) -> Bucket:
    sizes = {"batch": rows, "length": 1}
    return next((bucket for bucket, _ in package.buckets if bucket.fits(sizes)), package.buckets[-1][0])


def _linears_from_calls(package: LoadedPackage, piece: PieceFile, weights: list[torch.Tensor]) -> Iterator[LinearCall]:
    calls = EagerGraph.read(package.folder / piece.file)
    by_name = dict(zip(calls.ins, weights, strict=False))
    for _, target, args, _ in calls.calls:
        name = str(target)
        if name == _PLAIN and args[1] in by_name:
            yield _plain(by_name[args[1]])
        elif name == _PACKED and args[1] in by_name:
            yield _packed(by_name[args[1]], *args[3:6])


def _linears_from_weights(piece: PieceFile, weights: list[torch.Tensor]) -> Iterator[LinearCall]:
    """Yield the packed linear layers of the manifest; if there are none, every matrix."""
    for row in piece.kernels:
        yield LinearCall(weights[int(row.weight.removeprefix("w"))], row.features, row.depth, row.bits, row.zero)
    for weight in weights if not piece.kernels else ():
        if weight.dim() == 2 and weight.is_floating_point():
            yield _plain(weight)


def _plain(weight: torch.Tensor) -> LinearCall:
    return LinearCall(weight, *weight.shape)


def _packed(weight: torch.Tensor, features: int, bits: int, zero: int) -> LinearCall:
    if not bits:
        (_, packing), *_ = (mixed := read_mixed(weight))[0]
        return LinearCall(weight, features, mixed[1], packing.bits, packing.zero_point)
    groups = (Packing(bits, zero, group) for group in (32, 64, 128, SUPER_GROUP))
    group = next(each.group_size for each in groups if each.group_bytes == weight.shape[2])
    return LinearCall(weight, features, weight.shape[1] * group, bits, zero)


def _own(linear: LinearCall, rows: int, way: str = "dot") -> Run | None:
    if not linear.bits:
        return (lambda x: torch.nn.functional.linear(x, linear.weight)) if way == "dot" else None
    groups = 1 if linear.weight.dim() == 1 else linear.weight.shape[1]  # a mixed weight states its formats
    packing = Packing(linear.bits, linear.zero, linear.depth // groups)
    run = kernel_choice.native_kernel(linear.features, linear.depth, packing, way)
    return lambda x: run(x, linear.weight)


def _prepacked(linear: LinearCall, rows: int) -> Run | None:
    """The oneDNN weight layout, which Inductor uses for constant matrices."""
    if linear.bits or linear.dtype not in (torch.float32, torch.bfloat16):
        return None
    mkldnn: Any = torch.ops.mkldnn
    weight = mkldnn._reorder_linear_weight(linear.weight, rows)
    call: Any = mkldnn._linear_pointwise.default
    return lambda x: call(x, weight, None, "none", [], "")


def _aten_int4(linear: LinearCall, rows: int) -> Run | None:
    """ATen's int4 kernel with groups of 32. It reads as many bytes as the package's kernel; values do not matter."""
    if linear.bits != 4 or linear.features % 16 or linear.depth % 32:
        return None
    numbers = torch.randint(0, 16, (linear.features, linear.depth), dtype=torch.int32)
    aten: Any = torch.ops.aten
    weight = aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    factors = torch.ones(linear.depth // 32, linear.features, 2, dtype=torch.bfloat16)
    return lambda x: aten._weight_int4pack_mm_for_cpu(x, weight, 32, factors)


CANDIDATES: tuple[Callable[[LinearCall, int], Run | None], ...] = (
    *(partial(_own, way=way) for way in kernel_choice.VARIANTS),
    _prepacked,
    _aten_int4,
)
"""Kernels for a linear layer; the fastest is used for each shape and number of rows."""


def time_linears(package: LoadedPackage, rows: int) -> float:
    """Return the seconds of one pass over all linear layers of a step, with the fastest kernel for each shape."""
    with torch.no_grad():
        return _pass(_select_fastest(package, rows))


def time_weight_read(package: LoadedPackage) -> float:
    """Return the seconds to read, with all threads, as many bytes as the linear layers read for one token."""
    buffer = _buffer(package)
    start = perf_counter()
    buffer.sum()
    return perf_counter() - start


def linear_bytes(package: LoadedPackage) -> int:
    """Return the bytes of weights that one token reads."""
    weights = [linear.weight for linear in find_linear_calls(package, 1)]
    return sum(read_mixed(each)[2] if each.dim() == 1 else each.nbytes for each in weights)


@cache
def _buffer(package: LoadedPackage) -> torch.Tensor:
    return torch.ones(max(1, linear_bytes(package) // 4))


@cache
def _select_fastest(package: LoadedPackage, rows: int) -> list[tuple[Run, torch.Tensor]]:
    found = find_linear_calls(package, rows)
    inputs = {each.shape: torch.ones(rows, each.depth, dtype=each.dtype) for each in found}
    best: dict[tuple[Any, ...], dict[int, Run]] = {}
    for shape, x in inputs.items():
        alike = [each for each in found if each.shape == shape]
        took = {}
        for candidate in CANDIDATES:
            runs = [candidate(each, rows) for each in alike]
            calls = [(run, x) for run in runs if run is not None]
            if calls:
                took[min(_pass(calls) for _ in range(_TRIALS))] = calls
        best[shape] = {id(each): run for each, (run, _) in zip(alike, took[min(took)], strict=True)}
    return [(best[each.shape][id(each)], inputs[each.shape]) for each in found]


def _pass(calls: list[tuple[Run, torch.Tensor]]) -> float:
    start = perf_counter()
    for run, x in calls:
        run(x)
    return perf_counter() - start
