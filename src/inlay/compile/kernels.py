"""Which kernel for which number of rows: measured at build on the shapes of a package, kept in it, shown by `inspect`.

The C++ kernel has three ways to multiply by a packed weight, and all read the same bytes, so a package may take another
one for every number of rows. Kernels that want a layout of their own are timed beside them: what a second copy of the
weights would buy.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from inlay.compile.manifest import KernelRow
from inlay.errors import ProgramError
from inlay.ops import native
from inlay.ops.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.program.program import Program

    Run = Callable[[torch.Tensor, torch.Tensor], Any]

_LINEAR = torch.ops.inlay.packed_linear.default
WAYS = {"dot": 1, "tiles8": 2, "tiles16": 3}
"""Bytes row by row, bytes in tiles, bfloat16 in tiles."""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOGETHER = 1 << 25
"""Bytes of weights that are read in turn while timing: more than the caches next to a core hold."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def choose(
    program: Program, sizes: Mapping[str, tuple[int, int | None]], level: str = "native"
) -> tuple[Program, tuple[KernelRow, ...]]:
    """A piece whose packed linear layers take the fastest way for each number of rows, and what was measured.

    Portable kernels have one way, which is timed nowhere: who knows where it will run.
    """
    program = program.copy()
    rows = _rows(sizes)
    table = []
    for node in program.graph.nodes:
        if node.target is not _LINEAR:
            continue
        x, weight, bias, features, bits, zero = node.args[:6]
        value = x.meta["val"]
        depth = int(value.shape[-1])
        group = depth // int(weight.meta["val"].shape[1])
        timings = timed(features, depth, Packing(bits, zero, group), value.dtype, rows) if level == "native" else {}
        singly, tiled = thresholds(timings)
        node.args = (x, weight, bias, features, bits, zero, singly, tiled)
        texts = {str(count): each for count, each in timings.items()}
        table.append(KernelRow(weight.name, features, depth, bits, zero, group, singly, tiled, texts))
    return program, tuple(table)


def _rows(sizes: Mapping[str, tuple[int, int | None]]) -> tuple[int, ...]:
    """Numbers of rows that may come, up to the largest that is timed."""
    low = high = 1
    for least, most in sizes.values():
        low, high = low * least, high * (_ROWS[-1] if most is None else most)
    return tuple(count for count in _ROWS if low <= count <= high) or (_ROWS[-1],)


def thresholds(timings: Mapping[int, Mapping[str, float]]) -> tuple[int, int]:
    """Up to how many rows `dot` is taken, and up to how many `tiles8` from there on: what loses least over all rows.

    >>> thresholds({1: {"dot": 1, "tiles8": 5, "tiles16": 6}, 16: {"dot": 9, "tiles8": 5, "tiles16": 6}})
    (8, 16)
    >>> thresholds({1: {"dot": 1, "tiles8": 5, "tiles16": 6}, 128: {"dot": 90, "tiles8": 50, "tiles16": 6}})
    (64, 64)
    """

    def lost(singly: int, tiled: int) -> float:
        ways = {count: "dot" if count <= singly else "tiles8" if count <= tiled else "tiles16" for count in timings}
        return sum(took[ways[count]] / min(took[way] for way in WAYS) for count, took in timings.items())

    counts = [0, *sorted(timings)]
    pairs = [(singly, tiled) for singly in counts for tiled in counts if tiled >= singly]
    singly, tiled = min(pairs, key=lambda pair: lost(*pair), default=(0, 0))
    return _before_next(singly, timings), _before_next(tiled, timings)


def _before_next(count: int, timings: Mapping[int, Any]) -> int:
    """Between two numbers that were timed, the way of the lower one goes on up to half the next."""
    later = [each for each in sorted(timings) if each > count]
    return max(count, later[0] // 2) if later and count else count


@lru_cache(maxsize=256)
def timed(
    features: int, depth: int, packing: Packing, dtype: torch.dtype, rows: tuple[int, ...]
) -> dict[int, dict[str, float]]:
    """Microseconds of each kernel for each number of rows."""
    shape = packing.shape(features, depth)
    size = shape[0] * shape[1] * shape[2]
    weights = [torch.full(shape, 17, dtype=torch.uint8) for _ in range(max(1, min(_TOGETHER // size, 64)))]
    found: dict[int, dict[str, float]] = {}
    for count in rows:
        x = torch.randn(count, depth).to(dtype)
        runs: dict[str, Run] = {way: own(features, depth, packing, way) for way in WAYS}
        took = {way: _microseconds(run, x, weights) for way, run in runs.items()}
        other = _aten_int4(features, depth, packing, len(weights)) or _one_dnn(features, depth, packing, len(weights))
        if other is not None:
            name, run, theirs = other
            took[name] = _microseconds(run, x.bfloat16(), theirs)
        found[count] = {name: round(each, 1) for name, each in took.items()}
    return found


def _microseconds(run: Run, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """What a call takes that nothing disturbs: the lower quarter of all calls, weights in turn."""
    took = []
    with torch.no_grad():
        for weight in (*weights, *weights, *weights):
            start = perf_counter()
            run(x, weight)
            took.append(perf_counter() - start)
    return sorted(took)[len(took) // 4] * 1e6


@cache
def _library() -> Any:
    """The kernels, loaded into this process."""
    torch.cpu._init_amx()
    folder = tempfile.TemporaryDirectory()
    file = Path(folder.name, native.NAME)
    native.copy(file)
    library: Any = ctypes.CDLL(str(file))
    function = library.inlay_packed_linear
    pointer, number, short = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function.argtypes = [pointer] * 4 + [short] * 2 + [number] * 4 + [short] * 3
    function.restype = short
    return function


def own(features: int, depth: int, packing: Packing, way: str) -> Run:
    """The C++ kernel, one of its ways."""
    function = _library()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], features, dtype=x.dtype)
        kind = _TYPES[x.dtype]
        failed = function(
            *(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), kind, kind, x.shape[0], features, depth),
            *(packing.group, packing.bits, packing.zero, WAYS[way]),
        )
        if failed:
            raise ProgramError(f"The kernel refuses {features} features of {depth} columns in {packing}.")
        return y

    return run


def _aten_int4(features: int, depth: int, packing: Packing, count: int) -> tuple[str, Run, list[torch.Tensor]] | None:
    """ATen's kernel for four bits. It reads as many bytes; which, does not matter here."""
    if packing.bits != 4 or features % 16:
        return None
    aten: Any = torch.ops.aten
    packed = aten._convert_weight_to_int4pack_for_cpu(torch.ones(features, depth, dtype=torch.int32), 1)
    factors = torch.ones(depth // packing.group, features, 2, dtype=torch.bfloat16)
    weights = [packed.clone() for _ in range(count)]
    return "aten int4", lambda x, weight: aten._weight_int4pack_mm_for_cpu(x, weight, packing.group, factors), weights


def _one_dnn(features: int, depth: int, packing: Packing, count: int) -> tuple[str, Run, list[torch.Tensor]] | None:
    """oneDNN's kernel for bfloat16, as torch calls it."""
    if packing.bits != 16:
        return None
    weights = [torch.ones(features, depth, dtype=torch.bfloat16) for _ in range(count)]
    return "torch bf16", torch.nn.functional.linear, weights
