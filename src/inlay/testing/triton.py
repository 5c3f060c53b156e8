"""Triton kernels without a GPU: their numbers in Triton's interpreter, and whether they compile. No timing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def run_interpreted(code: str, module_path: str | Path) -> str:
    """Run Python with every Triton kernel in it interpreted on CPU tensors; what it printed.

    It is a process of its own, because Triton decides when it is imported. Modules beside the file `module_path` can be
    imported. A failure in it is an AssertionError here.
    """
    paths = [str(Path(module_path).parent), *filter(None, sys.path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", dedent(code)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def compile_to_ptx(capability: int, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """The PTX of a kernel for an NVIDIA GPU of this compute capability (80, 90), without one; machine code is made too.

    `signature` says what each argument is (`*fp32`, `i32`, `constexpr`), `constants` the values of the last.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"], "there is no machine code"
    return str(made.asm["ptx"])
