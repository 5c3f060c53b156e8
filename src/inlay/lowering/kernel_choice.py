"""Choose kernel variants by number of rows, from measurements at build on the shapes of a package.

The choice is stored in the package and shown by `inspect`. The C++ kernel has three variants that multiply by a packed
weight. All read the same bytes. Two of them quantize x to bytes and give bitwise equal results, so the choice between
them may depend on the number of rows. The third converts x to bfloat16. A bucket uses either bytes or bfloat16 for
every number of rows: the result of a row must not depend on the other rows of the batch. Kernels that require another
weight layout are timed too, which shows what a second copy of the weights would gain.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ProgramError
from inlay.lowering.buckets import KernelRow
from inlay.ops import native
from inlay.ops.weight_layout import SUPER_GROUP, Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.program.program import Program

    KernelCall = Callable[[torch.Tensor, torch.Tensor], Any]
    KernelTrial = tuple[KernelCall, torch.Tensor, list[torch.Tensor]]

_LINEAR, _ATTENTION = torch.ops.inlay.packed_linear.default, torch.ops.inlay.cached_attention.default
VARIANTS = {"dot": 1, "tiles8": 2, "tiles16": 3}
"""Bytes row by row, bytes in tiles, bfloat16 in tiles. The numbers are those of the C++ kernel."""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_WORKING_SET = 1 << 25
"""Bytes of weights that are read in turn while timing: more than the per-core caches can hold."""
_TURNS = 3
"""How often each weight is read while timing."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def choose_kernels(
    program: Program, sizes: Mapping[str, tuple[int, int | None]], level: str = "native", *, prefill: bool = False
) -> tuple[Program, tuple[KernelRow, ...]]:
    """Return a piece whose packed linear layers use the fastest variant for these sizes, and the measurements.

    `prefill`: the piece computes prompts only, so attention may process many rows at once. Portable kernels have one
    variant. It is not timed, because the target machine is unknown.
    """
    program = program.copy()
    table = []
    for node in program.graph.nodes:
        if node.target is _ATTENTION and prefill:
            node.kwargs = {**node.kwargs, "tiled": True}
        if node.target is not _LINEAR:
            continue
        x, weight, bias, features, bits, zero = node.args[:6]
        value = x.meta["val"]
        depth = int(value.shape[-1])
        if bits:
            packing = Packing(bits, zero, depth // int(weight.meta["val"].shape[1]))
        else:  # the formats of a mixed weight differ between layers; these are between the smallest and the largest
            packing = Packing(5, 16) if depth % SUPER_GROUP else Packing(5, -1, SUPER_GROUP)
        rows = _rows(value.shape[:-1], {raw: sizes[symbol.name] for raw, symbol in program.symbols.items()})
        has_ways = level == "native" and bits < 32  # float32 has one kernel
        timings, spread = time_kernels(features, depth, packing, value.dtype, rows) if has_ways else ({}, 0.0)
        singly, tiled = thresholds(timings, bits)
        node.args = (x, weight, bias, features, bits, zero, singly, tiled)
        texts = {str(count): each for count, each in timings.items()}
        form = packing.bits, packing.zero_point, packing.group_size
        table.append(KernelRow(weight.name, features, depth, *form, singly, tiled, texts, spread))
    return program, tuple(table)


def _rows(shape: Sequence[Any], sizes: Mapping[str, tuple[int, int | None]]) -> tuple[int, ...]:
    """Return the numbers of rows to time: those that can occur, up to the largest that is timed."""
    low = high = 1
    for size in shape:
        least, most = (int(size),) * 2 if str(size).isdigit() else sizes.get(str(size), (1, None))
        low, high = low * least, high * (_ROWS[-1] if most is None else most)
    return tuple(count for count in _ROWS if low <= count <= high) or (_ROWS[-1],)


MAX_ROWS = 1 << 31
"""Larger than any number of rows."""


def thresholds(timings: Mapping[int, Mapping[str, float]], bits: int = 4) -> tuple[int, int]:
    """Return up to how many rows `dot` is used, and up to how many `tiles8`: the choice that loses least over all rows.

    `tiles16` is used for more rows than both: for none or for all, because bytes and bfloat16 are not mixed. Weights
    of 16 bits do not use `tiles8`: `dot` is used for all rows or for none.

    >>> few = {1: {"dot": 1, "tiles8": 5, "tiles16": 6}, 16: {"dot": 9, "tiles8": 5, "tiles16": 6}}
    >>> thresholds(few) == (8, MAX_ROWS)
    True
    >>> thresholds({32: {"dot": 9, "tiles8": 5, "tiles16": 4}, 128: {"dot": 90, "tiles8": 50, "tiles16": 6}})
    (0, 0)
    """

    def lost(singly: int, tiled: int) -> float:
        ways = {count: "dot" if count <= singly else "tiles8" if count <= tiled else "tiles16" for count in timings}
        return sum(took[ways[count]] / min(took[way] for way in VARIANTS) for count, took in timings.items())

    singles = [MAX_ROWS] if bits == 16 else [0, *sorted(timings)]
    singly, tiled = min([(0, 0), *((each, MAX_ROWS) for each in singles)], key=lambda pair: lost(*pair))
    return _extend_threshold(singly, timings), tiled


def _extend_threshold(count: int, timings: Mapping[int, Any]) -> int:
    """Between two timed numbers of rows, the variant of the lower one applies up to half of the next."""
    later = [each for each in sorted(timings) if each > count]
    return max(count, later[0] // 2) if later and count else count


@lru_cache(maxsize=256)
def time_kernels(
    features: int, depth: int, packing: Packing, dtype: torch.dtype, rows: tuple[int, ...]
) -> tuple[dict[int, dict[str, float]], float]:
    """Return microseconds of each kernel for each number of rows, and the largest ratio of median to minimum."""
    found, spread = {}, 1.0
    for count, took in sample_kernels(features, depth, packing, dtype, rows).items():
        found[count] = {name: round(min(each) * 1e6, 1) for name, each in took.items()}
        spread = max(spread, *(sorted(took[way])[len(took[way]) // 2] / min(took[way]) for way in VARIANTS))
    return found, round(spread, 2)


def sample_kernels(
    features: int, depth: int, packing: Packing, dtype: torch.dtype, rows: Sequence[int]
) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of every timed call, for each number of rows and kernel."""
    shape = packing.shape(features, depth)
    size = shape[0] * shape[1] * shape[2]
    weights = [torch.full(shape, 17, dtype=torch.uint8) for _ in range(max(1, min(_WORKING_SET // size, 64)))]
    other = _aten_int4(features, depth, packing, len(weights)) or _one_dnn(features, depth, packing, len(weights))
    found = {}
    for count in rows:
        x = torch.randn(count, depth).to(dtype)
        calls: dict[str, KernelTrial] = {
            way: (native_kernel(features, depth, packing, way), x, weights) for way in VARIANTS
        }
        if other is not None:
            name, run, theirs = other
            calls[name] = (run, x.bfloat16(), theirs)
        found[count] = _time_interleaved(calls)
    return found


def _time_interleaved(calls: Mapping[str, KernelTrial]) -> dict[str, list[float]]:
    """Return seconds of every call. Kernels alternate, so noise affects all of them; each reads another weight."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(_TURNS * max(len(weights) for _, _, weights in calls.values())):
            for place, (name, (run, x, weights)) in enumerate(calls.items()):
                weight = weights[(turn + place * len(weights) // len(calls)) % len(weights)]
                start = perf_counter()
                run(x, weight)
                took[name].append(perf_counter() - start)
    return took


@cache
def _library() -> Any:
    """The kernels, loaded into this process."""
    torch.cpu._init_amx()
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, native.LIBRARY_NAME)
    native.install(file)
    library: Any = ctypes.CDLL(str(file))
    pointer, number, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.inlay_packed_linear.argtypes = [pointer] * 4 + [short] * 2 + [number] * 4 + [short] * 3
    library.inlay_mixed_linear.argtypes = (
        [pointer] * 2 + [number] + [pointer] * 2 + [short] * 2 + [number] * 3 + [short]
    )
    library.inlay_packed_linear.restype = library.inlay_mixed_linear.restype = short
    return library


def native_kernel(features: int, depth: int, packing: Packing, variant: str) -> KernelCall:
    """Return one variant of the C++ kernel as a function; weights may also be mixed."""
    library = _library()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], features, dtype=x.dtype)
        kind = _TYPES[x.dtype]
        rest = None, y.data_ptr(), kind, kind, x.shape[0], features, depth
        if weight.dim() == 1:
            failed = library.inlay_mixed_linear(
                x.data_ptr(), weight.data_ptr(), weight.numel(), *rest, VARIANTS[variant]
            )
        else:
            form = packing.group_size, packing.bits, packing.zero_point
            failed = library.inlay_packed_linear(x.data_ptr(), weight.data_ptr(), *rest, *form, VARIANTS[variant])
        if failed:
            raise ProgramError(f"The kernel does not support {features} features of {depth} columns in {packing}.")
        return y

    return run


def _aten_int4(
    features: int, depth: int, packing: Packing, count: int
) -> tuple[str, KernelCall, list[torch.Tensor]] | None:
    """ATen's kernel for four bits. It reads as many bytes; their values do not affect the time."""
    if packing.bits != 4 or features % 16:
        return None
    aten: Any = torch.ops.aten
    packed = aten._convert_weight_to_int4pack_for_cpu(torch.ones(features, depth, dtype=torch.int32), 1)
    factors = torch.ones(depth // packing.group_size, features, 2, dtype=torch.bfloat16)
    weights = [packed.clone() for _ in range(count)]
    return (
        "aten int4",
        lambda x, weight: aten._weight_int4pack_mm_for_cpu(x, weight, packing.group_size, factors),
        weights,
    )


def _one_dnn(
    features: int, depth: int, packing: Packing, count: int
) -> tuple[str, KernelCall, list[torch.Tensor]] | None:
    """oneDNN's kernel for bfloat16, as torch calls it."""
    if packing.bits != 16:
        return None
    weights = [torch.ones(features, depth, dtype=torch.bfloat16) for _ in range(count)]
    return "torch bf16", torch.nn.functional.linear, weights
