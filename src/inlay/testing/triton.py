"""Test Triton kernels without a GPU: run them in Triton's interpreter, and compile them to PTX. Nothing is timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import torch

from inlay.testing.value_comparison import TOLERANCE, find_differences, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ARCHITECTURES = (80, 90, 100)
"""Compute capabilities that kernels are compiled for."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""dtype → Triton's type of a pointer."""


def run_interpreted(code: str, module_path: str | Path) -> str:
    """Run Python code with Triton kernels interpreted on CPU tensors; return its standard output.

    The code runs in a new process, because Triton selects the interpreter at import. Modules in the folder of the file
    `module_path` can be imported. A failure raises AssertionError.
    """
    paths = [str(Path(module_path).parent), *filter(None, sys.path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", dedent(code)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def compile_to_ptx(
    capability: int, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> str:
    """Compile a kernel for an NVIDIA GPU of this compute capability (80, 90, 100), without a GPU; return the PTX.

    A cubin is also generated. `signature` contains the type of each argument (`*fp32`, `i32`, `constexpr`), `constants`
    the values of the constexpr arguments, `options` such as `num_warps`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"], "the compiler returned no cubin"
    return str(made.asm["ptx"])


def guard(value: torch.Tensor, fill: float, margin: int = 64) -> tuple[torch.Tensor, Callable[[], bool]]:
    """Copy a tensor with its strides into a buffer that is filled with a number; the function tells if it still is.

    >>> copy, is_intact = guard(torch.zeros(2, 4)[:, :3], fill=7.0)
    >>> before = is_intact()
    >>> copy.as_strided((1,), (1,), copy.storage_offset() + 3).fill_(1.0), before, is_intact()
    (tensor([1.]), True, False)
    """
    own = value[tuple(slice(0, 1 if stride == 0 else None) for stride in value.stride())]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
    buffer, outside = torch.full((extent + 2 * margin,), fill, dtype=value.dtype), torch.ones(extent + 2 * margin)
    outside.as_strided(own.shape, own.stride(), margin).fill_(0)
    copy = buffer.as_strided(own.shape, own.stride(), margin).copy_(own)
    return copy.expand(value.shape), lambda: bool((buffer[outside > 0] == fill).all())


def check_launch(
    launch: Callable[..., Any], reference: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], **options: Any
) -> None:
    """Assert that a kernel computes what the reference computes in the dtype of the inputs, row by row.

    The kernel must write every element of the result and none around it, and read only its inputs, which are copied
    with their strides between NaN.
    """
    expected = reference(*inputs)
    out, is_intact = guard(torch.full(expected.shape, float("nan"), dtype=expected.dtype), fill=-96.0)
    launch(*(guard(each, float("nan"))[0] for each in inputs), out=out, **options)
    assert is_intact(), "the kernel wrote outside of its result"
    found = find_differences("kernel", _rows(expected), _rows(out), {}, TOLERANCE, strides=False)
    assert not found, format_table(found)


def _rows(value: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = value.reshape(-1, value.shape[-1]) if value.dim() > 1 and value.shape[-1] > 1 else value.reshape(1, -1)
    return {f"row {number}": row for number, row in enumerate(rows)}
