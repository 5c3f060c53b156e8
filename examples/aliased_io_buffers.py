"""State in buffers of the module: a cache and the number of filled rows, which every step writes.

    python examples/aliased_io_buffers.py
    python examples/aliased_io_buffers.py --backend aot

The compiled program owns the buffers and writes them in place. With `lift_mutable_buffers=True` they become arguments:
read the binding table, allocate tensors of those types, and pass them by name. Then the program's own state is saved in
mid-stream, loaded by a second program, and reset. The last part converts the arguments back to buffers and saves the
module with `torch.export`.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from showing import PAGE_SIZE, check, check_in_place, measure, parse_backend, print_bindings
from torch import Tensor, nn

import inlay
from inlay import Example
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.state.buffers import inline_lifted_buffers, lift_mutated_buffers
from inlay.package.memory_profiler import allocate_paged
from inlay.program.bindings import Role

if TYPE_CHECKING:
    from inlay import Program

SHAPE = (1, 4, 1024, 64)
"""[batch, kv_heads, max_len, head_dim]"""
STEPS = 8


class RowCache(nn.Module):
    """Stores every row in a cache and returns the mean."""

    cache: Tensor
    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SHAPE))
        self.register_buffer("filled", torch.zeros(1, dtype=torch.int64))

    def forward(self, row: Tensor) -> Tensor:
        self.cache.index_copy_(2, self.filled, row)
        self.filled.add_(1)
        return self.cache.sum(2) / self.filled


def run_owned_state(program: Program, name: str, rows: list[Tensor], wanted: list[Tensor]) -> bool:
    print("# The program owns the buffers\n")
    step = compile_program(program, name)
    print_bindings(step)

    (cache,) = (state.binding.name for state in step.states if state.binding.target == "cache")
    step.owned_tensors[cache] = allocate_paged(SHAPE)  # page-aligned, so that writes can be tracked
    same = all(torch.allclose(step(row), each, atol=1e-6) for row, each in zip(rows, wanted, strict=True))
    moved = measure("cache", lambda: step(rows[0]), step.owned_tensors[cache])
    return all(
        [
            check_in_place(step),
            check("only the pages of the new row are written", 0 < moved.written_bytes <= 2 * 4 * PAGE_SIZE),
            check("nothing as large as the cache is copied", moved.copied_bytes(step.owned_tensors[cache].nbytes) == 0),
            check(f"{STEPS} steps equal eager PyTorch", same),
        ]
    )


def run_lifted_state(program: Program, name: str, rows: list[Tensor], wanted: list[Tensor]) -> bool:
    print("\n# lift_mutable_buffers=True: introspect, construct, run\n")
    step = compile_program(program, name, lift_mutable_buffers=True)
    print_bindings(step)

    def construct() -> dict[str, Tensor]:
        return {row.target: allocate_paged(row.shape, getattr(torch, row.dtype)) for row in step.bindings.state}  # type: ignore[arg-type]

    one, two = construct(), construct()
    same = all(torch.allclose(step(row, **one), each, atol=1e-6) for row, each in zip(rows, wanted, strict=True))
    step(rows[0], **two)
    apart = (int(one["filled"]), int(two["filled"])) == (STEPS, 1)
    moved = measure("cache", lambda: step(rows[0], **two), two["cache"])
    return all(
        [
            check_in_place(step),
            check("nothing as large as the cache is copied", moved.copied_bytes(two["cache"].nbytes) == 0),
            check("one program serves two independent states", apart),
            check(f"{STEPS} steps equal eager PyTorch", same),
        ]
    )


def run_saved_state(program: Program, name: str, rows: list[Tensor]) -> bool:
    print("\n# Saved in mid-stream, loaded, reset\n")
    step = compile_program(program, name)
    for row in rows[: STEPS // 2]:
        step(row)
    with tempfile.TemporaryDirectory() as folder:
        inlay.save_state(step, Path(folder, "state.safetensors"))
        second = compile_program(program, name)
        inlay.load_state(second, Path(folder, "state.safetensors"))
    same = all(torch.equal(step(row), second(row)) for row in rows[STEPS // 2 :])
    inlay.reset_state(step)
    return all(
        [
            check("a second program continues, equal to the bit", same),
            check("a reset restores the values of the module", not any(value.any() for value in step.state.values())),
        ]
    )


def run_inlined_state(program: Program, rows: list[Tensor], wanted: list[Tensor]) -> bool:
    print("\n# Converted back to buffers, saved and loaded by torch.export\n")
    back = inline_lifted_buffers(lift_mutated_buffers(program))
    print("buffers:", ", ".join(f"{row.target} {row.type_text}" for row in back.bindings.with_role(Role.BUFFER)))
    file = io.BytesIO()
    torch.export.save(back.to_exported(), file)
    file.seek(0)
    module = torch.export.load(file).module()
    same = all(torch.allclose(module(row), each, atol=1e-6) for row, each in zip(rows, wanted, strict=True))
    return check(f"{STEPS} steps of the loaded module equal eager PyTorch", same)


def main(arguments: list[str] | None = None) -> int:
    name = parse_backend(__doc__, arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [torch.randn(1, 4, 1, 64) for _ in range(STEPS)]
        program, model = capture(Example(RowCache(), (rows[0],))), RowCache()
        wanted = [model(row) for row in rows]
        fine = [
            run_owned_state(program, name, rows, wanted),
            run_lifted_state(program, name, rows, wanted),
            run_saved_state(program, name, rows),
            run_inlined_state(program, rows, wanted),
        ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
