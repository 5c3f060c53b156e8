"""Measures what the steps of a package read, write and allocate, on empty, half-full and full caches.

State is in protected pages, so every page access is recorded, in any code. A library loaded before libc counts every
block that the process allocates by malloc or mmap. A step may write the rows it adds and read the filled rows. Its
allocations must not depend on how full a cache is. Not measured: memory that is not state and existed before, the
stack, and which code reads a filled row.

`measure_in_subprocess` runs in a separate process, which must be started with the allocation counter.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import PackageError
from inlay.package.memory_profiler import (
    READ,
    WRITTEN,
    allocate_arena,
    check_compiler,
    find_accessed_pages,
    malloc_counter_env,
    record_mallocs,
)
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE
from inlay.program.json_values import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from inlay.lowering.buckets import Bucket
    from inlay.lowering.executable import Executable

_NOISE = 4096
"""Bytes, in blocks of at least a kilobyte, by which equal steps may differ: tables of Python grow too."""
_TILE = 16
"""Rows that attention loads at once. Reads are allowed up to the end of the last tile; unfilled rows are not used."""


@dataclass(frozen=True)
class Pages:
    """Page accesses of a step to one state."""

    reads: int = 0
    writes: int = 0
    stray_reads: int = 0
    """Pages that were read but contain no filled row of a requested sequence."""
    stray_writes: int = 0
    """Pages that were written but contain no new row of a requested sequence."""


@dataclass(frozen=True)
class StepTraffic:
    """One step: its bucket and sizes, page accesses and allocations."""

    bucket: str
    sizes: dict[str, int]
    filled_rows: int | None
    """Filled rows of the first sequence before the step; None for programs without a KV cache."""
    pages: dict[str, Pages]
    allocations: tuple[int, ...] | None
    """Sizes of allocated blocks of at least a kilobyte; None if they could not be counted."""
    result_sizes: tuple[int, ...]
    """Sizes of the results, which are also allocated."""

    @property
    def label(self) -> str:
        """A readable name of the step."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{self.bucket} ({sizes}{'' if self.filled_rows is None else f', {self.filled_rows} rows filled'})"

    @property
    def allocated_bytes(self) -> int:
        """Total bytes of all counted blocks."""
        return sum(self.allocations or ())


@dataclass(frozen=True)
class Traffic:
    """The measurements of a package."""

    max_seq_len: int
    """The most tokens of a sequence; 0 for programs without a KV cache."""
    steps: tuple[StepTraffic, ...] = ()

    @property
    def counts_allocations(self) -> bool:
        """Whether allocations were counted."""
        return all(step.allocations is not None for step in self.steps)

    def problems(self) -> Iterator[str]:
        """Yield all violations: stray page accesses, and allocations that depend on filled rows."""
        alike: dict[tuple[Any, ...], list[StepTraffic]] = {}
        for step in self.steps:
            alike.setdefault((step.bucket, *step.sizes.items()), []).append(step)
            for name, pages in step.pages.items():
                if pages.stray_writes:
                    yield f"{step.label}: {pages.stray_writes} pages of {name} are written but contain no new row"
                if pages.stray_reads:
                    yield f"{step.label}: {pages.stray_reads} pages of {name} are read but contain no filled row"
        for steps in alike.values():
            least = min(steps, key=lambda step: step.allocated_bytes)
            for step in steps:
                yield from _describe_growth(least, step, f"with {least.filled_rows} rows filled")

    def find_growth(self, other: Traffic) -> Iterator[str]:
        """Yield allocations that are larger in a package of the same model with longer caches."""
        longer = {(step.bucket, *step.sizes.items(), _fill_level(step, other)): step for step in other.steps}
        for step in self.steps:
            beside = longer.get((step.bucket, *step.sizes.items(), _fill_level(step, self)))
            if beside is None:
                yield f"{step.label}: the --longer package has no such step"
            else:
                yield from _describe_growth(
                    step, beside, f"with caches of {self.max_seq_len} instead of {other.max_seq_len} rows"
                )


def _fill_level(step: StepTraffic, traffic: Traffic) -> str:
    """Return whether caches were empty, half full or full."""
    if not step.filled_rows:
        return "empty"
    return "full" if step.filled_rows + step.sizes["length"] == traffic.max_seq_len else "half"


def _describe_growth(before: StepTraffic, after: StepTraffic, than: str) -> Iterator[str]:
    """Yield a text if one step allocates more memory than another."""
    growth = after.allocated_bytes - before.allocated_bytes
    if before.allocations is None or after.allocations is None or growth <= _NOISE:
        return
    new = (Counter(after.allocations) - Counter(before.allocations)).elements()
    grown = f"{growth:,} more bytes are allocated than {than}"
    yield f"{after.label}: {grown}; the largest new block has {max(new, default=0):,} bytes"


def measure_in_subprocess(folder: Path) -> Traffic:
    """Measure a package in a separate process, with allocations counted if possible."""
    check_compiler()
    run = subprocess.run(
        [sys.executable, "-m", "inlay.package.memory_traffic", str(folder)],
        env=malloc_counter_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise PackageError(f"A step of the package cannot be measured: {last}.")
    traffic: Traffic = from_json(Traffic, json.loads(run.stdout))
    return traffic


def measure(package: Executable) -> Traffic:
    """Measure a package in this process."""
    rows = {row.name: row for row in package.bindings.state}
    shapes = {name: (tuple(int(size) for size in row.shape), getattr(torch, row.dtype)) for name, row in rows.items()}
    torch.ones(1 << 20).sum()  # starts the threads and allocates their memory
    whole, state = allocate_arena(shapes)
    for name, value in package.initial.items():
        state[name].copy_(value)
    steps = tuple(_steps(package, whole, state)) if state else ()
    return Traffic(package.cache.max_seq_len if package.cache else 0, steps)


def _steps(package: Executable, whole: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Iterator[StepTraffic]:
    for bucket, execution in package.buckets:
        for sizes in _sizes(bucket, package):
            for filled in _fills(package, sizes):
                given = {**state, **_inputs(package, sizes, filled or 0)}
                call = partial(execution, given)
                if not filled:  # one-time work happens before the measurement
                    call()
                    call()
                marks, allocated, results = _run(call, whole)
                pages = dict(_pages(marks, package, state, given))
                yield StepTraffic(bucket.name, sizes, filled, pages, allocated, results)


def _run(
    step: Callable[[], Sequence[Any]], whole: torch.Tensor
) -> tuple[bytes, tuple[int, ...] | None, tuple[int, ...]]:
    """Run one step; return the marks of its pages, its allocations and the sizes of its results."""
    results: Sequence[Any] = ()
    counted: list[int] | None = None

    def call() -> None:
        nonlocal results
        results = step()

    def counting() -> None:
        nonlocal counted
        counted = record_mallocs(call)
        if counted is None:
            call()

    marks = find_accessed_pages(counting, whole)
    given_back = tuple(value.nbytes for value in results if isinstance(value, torch.Tensor))
    return marks, None if counted is None else tuple(counted), given_back


def _pages(
    marks: bytes, package: Executable, state: Mapping[str, torch.Tensor], given: Mapping[str, Any]
) -> Iterator[tuple[str, Pages]]:
    """Yield the page accesses of each state, with those that are not allowed."""
    at = 0
    for name, value in state.items():
        count = -(-max(value.nbytes, 1) // mmap.PAGESIZE)
        mine = torch.frombuffer(bytearray(marks[at : at + count]), dtype=torch.uint8)
        at += count
        read, written = (mine & READ) != 0, (mine & WRITTEN) != 0
        known = new = torch.ones_like(read)
        if package.cache is not None and package.cache.is_cache(value.shape):
            rows = list(zip(given[SIGNATURE.slots].tolist(), given[SIGNATURE.lengths].tolist(), strict=True))
            added, room = given[SIGNATURE.tokens].shape[1], value.shape[2]
            new = _pages_of(value, [(slot, filled, filled + added) for slot, filled in rows])
            ends = [(slot, min(room, -(-(filled + added) // _TILE) * _TILE)) for slot, filled in rows]
            known = _pages_of(value, [(slot, 0, end) for slot, end in ends])
        counts = (read, written, read & ~known, written & ~new)
        yield name, Pages(*(int(each.sum()) for each in counts))


def _pages_of(cache: torch.Tensor, rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """Return the pages of a cache `[slot, head, row, …]` that contain parts of these positions (slot, first, end)."""
    pages = torch.zeros(-(-cache.nbytes // mmap.PAGESIZE), dtype=torch.bool)
    heads, room = cache.shape[1], cache.shape[2]
    row = cache.nbytes // (cache.shape[0] * heads * room)
    pieces = [
        (slot, max(first, lap) % room, (min(end, lap + room) - 1) % room + 1)
        for slot, first, end in rows
        for lap in range(first // room * room, end, room)
    ]
    for place, first, end in ((slot * heads + head, *ends) for slot, *ends in pieces for head in range(heads)):
        begin, stop = (place * room + first) * row, (place * room + end) * row
        pages[begin // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)] = True
    return pages


def _sizes(bucket: Bucket, package: Executable) -> Iterator[dict[str, int]]:
    """Yield the smallest sizes of a bucket, and larger ones: up to three sequences with up to 40 rows each."""
    small = {name: low for name, (low, _) in bucket.sizes.items()}
    if package.cache is None:
        yield small
        return
    wanted = {"batch": min(3, package.cache.slots), "length": min(40, package.cache.max_seq_len - 1)}
    large = {
        name: max(low, min(wanted.get(name, low), low + 1000 if high is None else high))
        for name, (low, high) in bucket.sizes.items()
    }
    yield small
    if large != small:
        yield large


def _fills(package: Executable, sizes: Mapping[str, int]) -> list[int | None]:
    if package.cache is None:
        return [None]
    full = package.cache.max_seq_len - sizes.get("length", 1)
    return [0, min(full, full // 2 | 1), full]


def _inputs(package: Executable, sizes: Mapping[str, int], filled: int) -> dict[str, torch.Tensor]:
    """Return zeros for all inputs. Sequences use the last slots; the first has `filled` rows, others a quarter."""
    states = {row.name for row in package.bindings.state}
    made = {
        row.name: torch.zeros(
            [size if isinstance(size, int) else sizes.get(size, 1) for size in row.shape],
            dtype=getattr(torch, row.dtype),
        )
        for row in package.bindings.with_role(Role.INPUT)
        if row.name not in states
    }
    if package.cache is not None:
        made[SIGNATURE.slots] = package.cache.slots - 1 - torch.arange(made[SIGNATURE.slots].shape[0])
        made[SIGNATURE.lengths].fill_(filled // 4)
        made[SIGNATURE.lengths][0] = filled
    return made


if __name__ == "__main__":
    from pathlib import Path

    from inlay.package.integrity import read_version
    from inlay.package.loader import LoadedPackage

    version = Path(sys.argv[1])
    print(json.dumps(asdict(measure(LoadedPackage(read_version(version), version)))))
