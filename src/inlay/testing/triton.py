"""Test Triton kernels without a GPU: run them in Triton's interpreter, and compile them to PTX. Nothing is timed."""

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


def compile_to_ptx(capability: int, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any]) -> str:
    """Compile a kernel for an NVIDIA GPU of this compute capability (80, 90), without a GPU; return the PTX.

    A cubin is also generated. `signature` contains the type of each argument (`*fp32`, `i32`, `constexpr`), `constants`
    the values of the constexpr arguments.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"], "the compiler returned no cubin"
    return str(made.asm["ptx"])
