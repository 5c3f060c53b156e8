"""Random norms and softmaxes for test_row_kernel.py: `TRITON_INTERPRET=1 python row_kernel_settings.py norm 500`.

Each setting is a function with random sizes, dtype, strides, eps, weight and bias. A kernel is generated from it, run
in Triton's interpreter and compared with eager.
"""

from __future__ import annotations

import importlib.util
import mmap
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

from inlay.insight.candidates.region import FusionRegion
from inlay.insight.scaffold.region_source import RegionSource
from inlay.insight.scaffold.row_kernel import RowKernelWriter
from inlay.insight.scaffold.triton_kernel import KernelWriter
from inlay.ops.generated_triton import autotuned, fitting_configs
from inlay.program.graphs import all_nodes
from inlay.testing import program_of
from inlay.testing.triton import check_launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

F = torch.nn.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = (1, 2, 3, 7, 16, 17, 31, 64, 97, 128, 251, 256, 257, 509, 1024, 1031, 4096, 4099, 9001)


def write_module(
    function: Callable[..., Any], args: Sequence[torch.Tensor], axes: Any = None, writer: Any = RowKernelWriter
) -> str:
    """Return the source of the kernel for a function, all of whose calls are the region."""
    program = program_of(function, args, axes)
    nodes = tuple(
        node
        for node in all_nodes(program.graph)
        if node.op == "call_function" and not isinstance(node.meta.get("val"), torch.SymInt)
    )
    region = FusionRegion("norm chain", "region", ("region",), nodes, frozenset())
    source: str = writer(RegionSource(region)).module("region")
    return source


def load_module(source: str, folder: Path, number: int = 0) -> Any:
    """Import the source of a kernel."""
    path = folder / f"kernel_{number}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _norm(seed: random.Random) -> Callable[..., torch.Tensor]:
    """Return a norm; arguments are x, and optionally weight and bias."""
    eps = seed.choice((1e-12, 1e-6, 1e-5, 1e-3, 0.1))
    kind = seed.randrange(6)

    def rms_in_float32(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return _affine(normed, rest)

    def rms_in_place_dtype(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return _affine(x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps), rest)

    def layer(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        weight, bias = (*rest, None, None)[:2]
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def layer_by_hand(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        centered = wide - wide.mean(-1, keepdim=True)
        variance = wide.var(-1, unbiased=False, keepdim=True)
        return _affine((centered * torch.rsqrt(variance + eps)).to(x.dtype), rest)

    def canonical(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if not rest:
            return rms_in_float32(x)
        normed: torch.Tensor = torch.ops.inlay.rms_norm(x, rest[0], eps, seed_offset, cast_first)
        return normed + rest[1] if len(rest) > 1 else normed

    def largest(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        spread = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        return _affine(x / (spread.to(torch.float32) + 1 + eps).to(x.dtype), rest)

    seed_offset, cast_first = seed.choice((0.0, 1.0)), seed.random() < 0.5
    return (rms_in_float32, rms_in_place_dtype, layer, layer_by_hand, canonical, largest)[kind]


def _affine(value: torch.Tensor, rest: Sequence[torch.Tensor]) -> torch.Tensor:
    value = value * rest[0] if rest else value
    return value + rest[1] if len(rest) > 1 else value


def _softmax(seed: random.Random) -> Callable[..., torch.Tensor]:
    """Return a softmax with what may stand around it; arguments are x, and optionally two vectors."""
    scale, kind = seed.choice((0.125, 1.0, 7.0)), seed.randrange(4)

    def plain(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return _affine(torch.softmax(x * scale, -1), rest)

    def in_float32(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return _affine(torch.softmax(x / scale, -1, dtype=torch.float32).to(x.dtype), rest)

    def by_hand(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32) * scale
        powers = torch.exp(wide - wide.amax(-1, keepdim=True))
        return _affine((powers / powers.sum(-1, keepdim=True)).to(x.dtype), rest)

    def expected_value(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x * scale, -1) * _affine(x, rest)).sum(-1)

    return (plain, in_float32, by_hand, expected_value)[kind]


def _tensor(shape: Sequence[int], dtype: torch.dtype, seed: random.Random, is_x: bool) -> torch.Tensor:
    """Return random numbers with random strides: contiguous, with gaps, transposed, or broadcast."""
    layout = seed.choice(("plain", "gaps", "steps", "transposed", "broadcast"))
    generator = torch.Generator().manual_seed(seed.randrange(1 << 30))
    scale = seed.choice((0.01, 1.0, 30.0)) if is_x else 1.0
    wide = [size * 2 + 1 if layout in ("gaps", "steps") else size for size in shape]
    made = (torch.randn(wide, generator=generator) * scale + seed.choice((0.0, 1.0)) * scale).to(dtype)
    if layout == "gaps":
        return made[tuple(slice(1, size + 1) for size in shape)]
    if layout == "steps":
        return made[tuple(slice(1, 2 * size + 1, 2) for size in shape)]
    if layout == "transposed" and len(shape) > 1:
        return made.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "broadcast" and len(shape) > 1:
        return made[:1].expand(list(shape))
    return made


def check_setting(kind: str, number: int, folder: Path) -> str:
    """Generate, run and compare one setting; return its description."""
    seed = random.Random(f"{kind} {number}")
    body = (_norm if kind == "norm" else _softmax)(seed)
    vectors = seed.randrange(3)
    function = (lambda x: body(x), lambda x, w: body(x, w), lambda x, w, b: body(x, w, b))[vectors]
    dtype, columns = seed.choice(DTYPES), seed.choice(COLUMNS)
    if body.__name__ == "layer" and columns == 1:
        columns = 2  # of one column eager's layer_norm gives noise, the kernel 0: check_special_values
    rows = [seed.randint(1, 4) for _ in range(seed.choice((0, 1, 1, 2)))]

    def make(shape: Sequence[int]) -> list[torch.Tensor]:
        x = _tensor(shape, dtype, seed, is_x=True)
        return [x, *(_tensor(shape[-1:], dtype, seed, is_x=False) for _ in range(vectors))]

    is_dynamic = seed.random() < 0.5
    axes = {name: {0: "columns"} for name in ("w", "b")[:vectors]} | {"x": {len(rows): "columns"}}
    axes["x"] |= {axis: f"rows{axis}" for axis in range(len(rows))}
    traced = make([5 + axis for axis in range(len(rows))] + [11] if is_dynamic else [*rows, columns])
    module = load_module(write_module(function, traced, axes if is_dynamic else None), folder, number)
    check_launch(module.launch, function, make([*rows, columns]))
    sizes = "dynamic" if is_dynamic else "static"
    return f"{number} {body.__name__} {dtype} {rows} × {columns} {vectors} vectors, {sizes}"


def layer(x: torch.Tensor) -> torch.Tensor:
    """Return a norm that subtracts."""
    return F.layer_norm(x, (x.shape[-1],))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return a softmax."""
    return torch.softmax(x, -1)


def sums(x: torch.Tensor) -> torch.Tensor:
    """Return sums of rounded numbers, in float32."""
    return (x / 3).sum(-1, keepdim=True, dtype=torch.float32) + x


FAULTS: dict[str, tuple[Callable[..., torch.Tensor], str, str]] = {
    "mask": (softmax, "inside = column < 50", "inside = column < 50 + 15"),
    "mask of a sum": (softmax, r"tl\.where\(inside, (tl\.exp\(.*?\)), 0\.0\)", r"\1"),
    "mask of the store": (layer, r", mask=inside\)", ")"),
    "sums in the low dtype": (sums, r"(total\d+) = (total\d+ \+ .*)", r"\1 = round_to(\2, dtype)"),
    "stride of the input": (sums, r"\* x_s0", "* (x_s0 + 1)"),
    "stride of the result": (sums, r"row \* 50", "row * 49"),
    "last column": (layer, "column < 50", "column < 49"),
    "rounding between calls": (sums, r"round_to\((c\d+ / 3), dtype\)", r"\1"),
}
"""Fault → the function, and what is replaced in its kernel."""


def check_fault(fault: str, folder: Path) -> None:
    """Assert that a kernel is right, and that the comparison finds a fault in it."""
    function, pattern, replacement = FAULTS[fault]
    x = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16() + 1
    small = triton.Config({"BLOCK": 16, "ONE": False})
    source = write_module(function, [x])
    planted = re.sub(pattern, replacement, source)
    assert planted != source, f"{fault}: nothing was replaced"
    check_launch(load_module(source, folder).launch, function, [x], config=small)
    try:
        check_launch(load_module(planted, folder, 1).launch, function, [x], config=small)
    except AssertionError as error:
        print("found:", fault, "|", str(error).splitlines()[-1])
    else:
        raise AssertionError(f"{fault}: not found")


def check_special_values(folder: Path) -> None:
    """Assert that NaN and infinities propagate as in eager, and that a norm of one column is 0."""
    one = torch.rand(4, 1)
    assert torch.equal(load_module(write_module(layer, [one]), folder).launch(one), torch.zeros(4, 1))
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 3], [-inf, -inf, -inf], [inf, 1, 2], [-inf, 0, 1], [nan, nan, nan]])
    for function in (softmax, lambda x: x.amax(-1), lambda x: x - x.amin(-1, keepdim=True)):
        launch = load_module(write_module(function, [x]), folder).launch
        torch.testing.assert_close(launch(x), function(x), equal_nan=True)


def check_elementwise(folder: Path) -> None:
    """Assert that kernels without reductions round as eager, know small numbers, and reach distant elements."""
    x = torch.randn(3, 1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded = load_module(write_module(lambda x: x.squeeze(1) / 3 * 3 - 1, [x], writer=KernelWriter), folder)
    assert torch.equal(rounded.launch(x), (x / 3 * 3 - 1).squeeze(1))
    tiny = torch.logspace(-8, 2, 300) * torch.tensor([[1.0], [-1.0]])
    tanh = load_module(write_module(torch.tanh, [tiny], writer=KernelWriter), folder, 1)
    torch.testing.assert_close(tanh.launch(tiny), torch.tanh(tiny), rtol=3e-6, atol=0)
    step = 1 << 30
    memory = mmap.mmap(-1, 4 * step + mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    far = torch.frombuffer(memory, dtype=torch.float16).as_strided((3, 4), (step, 1))
    far.copy_(torch.arange(12).view(3, 4))
    double = load_module(write_module(lambda x: x * 2, [torch.ones(3, 4).half()], writer=KernelWriter), folder, 2)
    assert torch.equal(double.launch(far), far * 2)


def check_configurations(folder: Path, columns: int) -> None:
    """Assert that each configuration gives the same, and that autotuning runs those that fit and takes the best."""
    x = torch.rand(2, columns).bfloat16() + 1
    module = load_module(write_module(layer, [x]), folder)
    fitting = fitting_configs(columns, x.element_size())
    for config in (None, *fitting):
        check_launch(module.launch, layer, [x], config=config)
    timed: list[float] = []

    def bench(call: Callable[[], None], quantiles: Any) -> list[float]:
        call()
        timed.append(-len(timed))
        return timed[-1:] * 3

    out = torch.empty_like(x)
    tuned = autotuned(module.kernel, bench)
    tuned[(2,)](x, out, columns, *x.stride())
    torch.testing.assert_close(out, layer(x))
    assert len(timed) == len(fitting) > 1
    assert tuned.best_config == fitting[-1]


def main() -> None:
    """Check the settings FIRST (0) to FIRST + COUNT - 1 of a kind."""
    kind, total, first = sys.argv[1], int(sys.argv[2]), int("".join(sys.argv[3:]) or 0)
    began, passed = time.time(), 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + total):
            try:
                text = check_setting(kind, number, Path(folder))
                passed += 1
            except Exception as error:
                text = f"FAILED {number}: {type(error).__name__}: {error}"
            print(text, flush=True)
    print(f"{kind}: {passed} of {total} passed in {time.time() - began:.0f} s")
    sys.exit(passed < total)


if __name__ == "__main__":
    main()
