"""Measures which memory pages a call reads and writes, and which blocks it allocates, in any code."""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import mmap
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from inlay.errors import MachineError, UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_PAGE = mmap.PAGESIZE
READ, WRITTEN = 1, 2


@dataclass(frozen=True)
class MemoryProfile:
    """Memory writes and allocations of one call."""

    written_bytes: int
    """Total size of the written pages of the watched tensor."""
    allocation_sizes: tuple[int, ...]
    """Sizes of all blocks that torch allocated, in bytes."""

    def copied_bytes(self, size: int) -> int:
        """Return the bytes allocated in blocks at least as large as a state of `size` bytes."""
        return sum(each for each in self.allocation_sizes if each >= size)


def allocate_paged(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros in separate pages, which `profile_memory` can watch.

    >>> allocate_paged([2, 3]).shape
    torch.Size([2, 3])
    """
    count = math.prod(shape)
    size = max(count * dtype.itemsize, 1)
    held = mmap.mmap(-1, -(-size // _PAGE) * _PAGE)
    return torch.frombuffer(held, dtype=dtype, count=count).view(*shape)


def profile_memory(call: Callable[[], Any], state: torch.Tensor) -> MemoryProfile:
    """Run `call` twice: record the pages of `state` (made by `allocate_paged`) it writes, then its allocations."""
    written = sum(find_written_pages(call, state)) * _PAGE
    return MemoryProfile(written, tuple(record_torch_allocations(call)))


def find_written_pages(call: Callable[[], Any], state: torch.Tensor) -> list[int]:
    """Run `call`; return 1 for every page of `state` (made by `allocate_paged`) that it wrote, 0 for others."""
    return [int(mark & WRITTEN != 0) for mark in find_accessed_pages(call, state)]


def find_accessed_pages(call: Callable[[], Any], state: torch.Tensor) -> bytes:
    """Run `call`; return `READ`, `WRITTEN`, both or 0 for every page of `state` (made by `allocate_paged`)."""
    if state.data_ptr() % _PAGE:
        raise UsageError(
            "The state is not page-aligned.", "Create it with inlay.package.memory_profiler.allocate_paged."
        )
    library = _library()
    size = -(-state.numel() * state.element_size() // _PAGE) * _PAGE
    marks = (ctypes.c_ubyte * (size // _PAGE))()
    if library.watch_start(ctypes.c_void_p(state.data_ptr()), ctypes.c_long(size), ctypes.c_long(_PAGE), marks):
        raise UsageError("The memory pages of the state cannot be protected.")
    try:
        call()
    finally:
        library.watch_stop()
    return bytes(marks)


def allocate_arena(
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return tensors of these types, each in separate pages of one tensor that `find_written_pages` can watch."""
    sizes = {
        name: -(-max(math.prod(shape) * dtype.itemsize, 1) // _PAGE) * _PAGE for name, (shape, dtype) in shapes.items()
    }
    whole = allocate_paged([sum(sizes.values())], torch.uint8)
    made, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        made[name] = whole[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
        at += sizes[name]
    return whole, made


def malloc_counter_env() -> dict[str, str] | None:
    """Return the environment in which a new process can use `record_mallocs`; None if counting is not possible."""
    try:
        file = _compile("malloc.c")
    except MachineError:
        return None
    before = os.environ.get("LD_PRELOAD")
    # Python would otherwise allocate objects in arenas, which are created at any time.
    return {**os.environ, "LD_PRELOAD": f"{file}:{before}" if before else str(file), "PYTHONMALLOC": "malloc"}


def record_mallocs(call: Callable[[], Any], smallest: int = 1024) -> list[int] | None:
    """Run `call`; return the sizes of all blocks of at least `smallest` bytes that the process allocated.

    Without `malloc_counter_env` in its environment, return None and do not run `call`.
    """
    counter = ctypes.CDLL(None)
    if not hasattr(counter, "inlay_malloc_start"):
        return None
    found = ctypes.POINTER(ctypes.c_size_t)()
    counter.inlay_malloc_stop.restype = ctypes.c_long
    counter.inlay_malloc_start(ctypes.c_size_t(smallest))
    try:
        call()
    finally:
        count = counter.inlay_malloc_stop(ctypes.byref(found))
    if count < 0:
        raise UsageError("The call allocated more memory blocks than can be counted.")
    return sorted(found[:count])


def record_torch_allocations(call: Callable[[], Any]) -> list[int]:
    """Run `call`; return the sizes of all blocks that torch allocated, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        measured.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [
        event["args"]["Bytes"] for event in events if event.get("name") == "[memory]" and event["args"]["Bytes"] > 0
    ]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_compile("memory_profiler.c")))


@cache
def _compile(name: str) -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, made = folder / name, folder / f"{name}.so"
    source.write_text(resources.files("inlay.package").joinpath(name).read_text())
    check_compiler()
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MachineError(f"The C compiler `cc` failed: {one_line(error)}.") from error
    return made


def check_compiler() -> None:
    """Raise an error if there is no C compiler, which memory profiling needs."""
    if shutil.which("cc") is None:
        raise MachineError("Memory profiling needs a C compiler.", "Install gcc or clang as `cc`.")


__all__ = ["MemoryProfile", "allocate_paged", "profile_memory"]
