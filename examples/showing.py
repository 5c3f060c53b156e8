"""Shared code of the in-place state examples: the backend option, the binding table, and the measurement."""

from __future__ import annotations

import argparse
import mmap
import os
from typing import TYPE_CHECKING, Any

from inlay.lowering.backends import BACKENDS
from inlay.package.memory_profiler import profile_memory
from inlay.program.bindings import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from inlay.lowering.compiled_program import CompiledProgram
    from inlay.package.memory_profiler import MemoryProfile
    from inlay.program.bindings import Binding


PAGE_SIZE = mmap.PAGESIZE
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler logs a message at every measurement


def parse_backend(description: str | None, arguments: list[str] | None) -> str:
    """Return the backend from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="inductor", help="backend of the program")
    return str(parser.parse_args(arguments).backend)


def print_bindings(compiled: CompiledProgram) -> None:
    """Print the binding table without weights: the storage of each output, and why."""
    print(f"{'binding':<14} {'role':<7} {'type':<22} storage")
    for row in compiled.bindings:
        if row.role is not Role.PARAMETER:
            print(f"{row.name:<14} {row.role:<7} {row.type_text:<22} {_alias_text(compiled, row)}".rstrip())
    for state in compiled.states:
        print(f"{state.binding.name} is written by {state.form}")
    for remark in compiled.remarks:
        print(f"{remark.nodes[0]} is not in place: {remark.reason}")


def _alias_text(compiled: CompiledProgram, row: Binding) -> str:
    if row.alias is not None:
        return f"{row.alias.binding} ({row.alias.kind})"
    declared = {
        compiled.bindings.outs[index].name: state for index, state in compiled.in_place_program.declared_outputs.items()
    }
    return f"{declared[row.name]} (also returned)" if row.name in declared else ""


def measure(name: str, call: Callable[[], Any], state: Tensor) -> MemoryProfile:
    """Measure one step: bytes of the state that it writes (in whole pages), and bytes that it copies."""
    moved, size = profile_memory(call, state), state.nbytes
    print(
        f"a step writes {moved.written_bytes:,} of the {size:,} bytes of {name} and copies {moved.copied_bytes(size):,}"
    )
    return moved


def check(claim: str, holds: bool) -> bool:
    """Print whether a claim holds."""
    print(f"{'yes' if holds else 'NO '}  {claim}")
    return holds


def check_in_place(compiled: CompiledProgram) -> bool:
    """Print whether every state is updated in place."""
    states, there = compiled.states, sum(state.is_eligible for state in compiled.states)
    return check(f"{there} of {len(states)} states are updated in place", there == len(states) > 0)
