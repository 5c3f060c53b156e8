"""What generated Triton kernels share: launch, configurations of kernels that reduce rows, rounding. Requires triton.

Checked in Triton's interpreter and compiled for sm_80, sm_90 and sm_100. Not run on a GPU, not timed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

LARGEST_BLOCK = 4096
"""Columns that one block holds; a longer row is a loop over blocks."""
CONFIGS = [
    triton.Config({"BLOCK": 1 << bits, "ONE": one}, num_warps=warps, num_stages=stages)
    for bits in range(4, LARGEST_BLOCK.bit_length())
    for warps in (1, 2, 4, 8, 16)
    if warps == 1 or 64 * warps <= 1 << bits <= 2048 * warps
    for one, stages in ((True, 1), (False, 2), (False, 4))
]
"""All configurations. `ONE`: the block holds the row, so that each element is read once."""
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def fitting_configs(columns: int, element_size: int) -> list[triton.Config]:
    """Return configurations for a row length: blocks of the next power of two, or of a quarter of it.

    The first one is a choice without timing: the largest block, with 32 bytes per thread.
    """
    block = min(max(triton.next_power_of_2(columns), 16), LARGEST_BLOCK)

    def cost(config: triton.Config) -> tuple[int, int, int]:
        size = config.kwargs["BLOCK"]
        return -size, abs(config.num_warps * 1024 - size * element_size), config.num_stages

    sizes = {block, block // 4} if block >= 1024 else {block}
    fitting = [each for each in CONFIGS if each.kwargs["BLOCK"] in sizes]
    return sorted((each for each in fitting if each.kwargs["ONE"] == (each.kwargs["BLOCK"] >= columns)), key=cost)


@cache
def autotuned(kernel: Any, do_bench: Any = None) -> Any:
    """Return a kernel that times the fitting configurations once per row length and dtype."""

    def prune(configs: Any, named: Any, **_: Any) -> list[triton.Config]:
        return fitting_configs(named["columns"], named["out_ptr"].element_size())

    return triton.autotune(CONFIGS, ["columns"], {"early_config_prune": prune}, do_bench=do_bench)(kernel)


def find_mismatch(tensors: list[torch.Tensor], shapes: list[tuple[int | str, ...]], dtypes: list[torch.dtype]) -> str:
    """Return why a kernel for these shapes and dtypes does not fit the tensors; a size that is a name may vary."""
    found = {each.dtype for each in tensors}
    sizes: dict[str, int] = {}
    if len(found) > 1 or not found <= set(dtypes):
        return f"the dtypes {found} are not one of {dtypes}"
    for tensor, shape in zip(tensors, shapes, strict=True):
        given = tuple(tensor.shape)
        pairs = zip(shape, given, strict=False)
        wanted = tuple(sizes.setdefault(each, size) if isinstance(each, str) else each for each, size in pairs)
        if len(shape) != len(given) or given != wanted:
            return f"the shape {given} is not {shape}"
    return ""


def launch_rows(kernel: Any, rows: int, columns: int, arguments: tuple[Any, ...], config: triton.Config | None) -> None:
    """Launch one program per row. On a GPU `triton.autotune` selects a configuration, unless one is given.

    Nothing is timed in the interpreter, whose tensors are on the CPU.
    """
    if columns == 0:
        raise ValueError("rows of length 0 have no kernel")
    if config is None and arguments[0].is_cuda:
        autotuned(kernel)[(rows,)](*arguments)
    else:
        config = config or fitting_configs(columns, arguments[0].element_size())[0]
        kernel[(rows,)](*arguments, **config.all_kwargs())


@triton.jit  # type: ignore[untyped-decorator]
def round_to(value, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round float32 to a dtype, to nearest even. Triton's interpreter truncates to bfloat16 instead of rounding."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32)
        return tl.where(value != value, value, near.to(tl.float32, bitcast=True))
    return value.to(dtype).to(tl.float32)


@triton.jit
def tanh(value):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent; near 0 by its series, because the difference of two sigmoids cancels there."""
    square = value * value
    series = value - value * square * (0.33333333 - square * 0.13333333)
    return tl.where(square < 0.01, series, 2.0 * tl.sigmoid(2.0 * value) - 1.0)


@triton.jit
def row_max(lanes):  # type: ignore[no-untyped-def]
    """Return the largest element; NaN if one is NaN."""
    return tl.max(lanes, axis=0) + tl.sum(tl.where(lanes != lanes, lanes, 0.0), axis=0)
