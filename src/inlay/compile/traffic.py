"""What the steps of a package read, write and allocate, measured on caches that are empty, half full and full.

State lies in protected pages, so that every page that is read or written is known, whatever code did it; every block of
memory that anybody asks malloc or mmap for is counted by a library that is loaded before libc. A step may write the
rows it adds and read the rows that are filled, and what it allocates must not depend on how full a cache is. Not
measured: memory that is no state and was there before, the stack, who reads a filled row.

`measured` does it in a process of its own, which must be started with the counter of allocations.
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
from inlay.program.bindings import Role
from inlay.program.from_json import value_of
from inlay.state.watch import READ, WRITTEN, arena, blocks, counting_environment, pages_touched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from inlay.compile.execute import Executable
    from inlay.compile.manifest import Bucket

_NOISE = 4096
"""Bytes in blocks of a kilobyte and more that may differ between two equal steps: Python's own tables grow too."""
_TILE = 16
"""Rows that attention loads at once: up to so many it may read, and does not use, beyond those that are filled."""


@dataclass(frozen=True)
class Pages:
    """What a step did to the pages of one state."""

    read: int = 0
    written: int = 0
    read_beyond: int = 0
    """Pages that were read and hold no filled row of a sequence that was asked for."""
    written_beyond: int = 0
    """Pages that were written to and hold no new row of one."""


@dataclass(frozen=True)
class Step:
    """One step: which code, on what, and what it did."""

    bucket: str
    sizes: dict[str, int]
    filled: int | None
    """How many rows each sequence held before; None for programs without a cache of rows."""
    pages: dict[str, Pages]
    blocks: tuple[int, ...] | None
    """Sizes of what was allocated, from a kilobyte on; None where that could not be counted."""
    results: tuple[int, ...]
    """Sizes of what it gives, which it allocates too."""

    @property
    def where(self) -> str:
        """The step for people."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{self.bucket} ({sizes}{'' if self.filled is None else f', {self.filled} rows filled'})"

    @property
    def allocated(self) -> int:
        """All bytes that were counted."""
        return sum(self.blocks or ())


@dataclass(frozen=True)
class Traffic:
    """What was measured of a package."""

    room: int
    """Rows of a slot, 0 for programs without a cache of rows."""
    steps: tuple[Step, ...] = ()

    @property
    def counts_allocations(self) -> bool:
        """Whether blocks of memory were counted."""
        return all(step.blocks is not None for step in self.steps)

    def problems(self) -> Iterator[str]:
        """What is not as it must be."""
        alike: dict[tuple[Any, ...], list[Step]] = {}
        for step in self.steps:
            alike.setdefault((step.bucket, *step.sizes.items()), []).append(step)
            for name, pages in step.pages.items():
                if pages.written_beyond:
                    yield f"{step.where}: {pages.written_beyond} pages of {name} are written that hold no new row"
                if pages.read_beyond:
                    yield f"{step.where}: {pages.read_beyond} pages of {name} are read that hold no filled row"
        for steps in alike.values():
            least = min(steps, key=lambda step: step.allocated)
            for step in steps:
                yield from _grown(least, step, f"with {least.filled} rows filled")

    def problems_beside(self, other: Traffic) -> Iterator[str]:
        """What grows from this package to one of the same model with longer caches."""
        longer = {(step.bucket, *step.sizes.items(), _place(step, other)): step for step in other.steps}
        for step in self.steps:
            beside = longer.get((step.bucket, *step.sizes.items(), _place(step, self)))
            if beside is None:
                yield f"{step.where}: the other package has no such step"
            else:
                yield from _grown(step, beside, f"with caches of {self.room} rows instead of {other.room}")


def _place(step: Step, traffic: Traffic) -> str:
    """Whether caches were empty, half full or full."""
    return "empty" if not step.filled else "full" if step.filled + step.sizes["length"] == traffic.room else "half"


def _grown(before: Step, after: Step, than: str) -> Iterator[str]:
    """Memory that one step allocates and another does not."""
    if before.blocks is None or after.blocks is None or after.allocated - before.allocated <= _NOISE:
        return
    new = (Counter(after.blocks) - Counter(before.blocks)).elements()
    grown = f"{after.allocated - before.allocated:,} bytes more are allocated than {than}"
    yield f"{after.where}: {grown}; the largest new block has {max(new, default=0):,}"


def measured(folder: Path) -> Traffic:
    """Measure a package in a process of its own, with allocations counted where that is possible."""
    run = subprocess.run(
        [sys.executable, "-m", "inlay.compile.traffic", str(folder)],
        env=counting_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"])[-1]
        raise PackageError(f"A step of the package cannot be measured: {last}.")
    traffic: Traffic = value_of(Traffic, json.loads(run.stdout))
    return traffic


def measure(package: Executable) -> Traffic:
    """Measure a package in this process."""
    rows = {row.name: row for row in package.bindings.state}
    shapes = {name: (tuple(int(size) for size in row.shape), getattr(torch, row.dtype)) for name, row in rows.items()}
    torch.ones(1 << 20).sum()  # threads are started, and their memory is taken
    whole, state = arena(shapes)
    for name, value in package.initial.items():
        state[name].copy_(value)
    steps = tuple(_steps(package, whole, state)) if state else ()
    return Traffic(package.cache.room if package.cache else 0, steps)


def _steps(package: Executable, whole: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Iterator[Step]:
    for bucket, execution in package.buckets:
        for sizes in _sizes(bucket, package):
            for filled in _fills(package, sizes):
                given = {**state, **_inputs(package, sizes, filled or 0)}
                call = partial(execution, given)
                if not filled:  # what is done once is done now
                    call()
                    call()
                marks, allocated, results = _run(call, whole)
                pages = dict(_pages(marks, package, state, given))
                yield Step(bucket.name, sizes, filled, pages, allocated, results)


def _run(
    step: Callable[[], Sequence[Any]], whole: torch.Tensor
) -> tuple[bytes, tuple[int, ...] | None, tuple[int, ...]]:
    """One step, watched: the marks of its pages, what it allocated, what it gave."""
    results: Sequence[Any] = ()
    counted: list[int] | None = None

    def call() -> None:
        nonlocal results
        results = step()

    def counting() -> None:
        nonlocal counted
        counted = blocks(call)
        if counted is None:
            call()

    marks = pages_touched(counting, whole)
    given_back = tuple(value.nbytes for value in results if isinstance(value, torch.Tensor))
    return marks, None if counted is None else tuple(counted), given_back


def _pages(
    marks: bytes, package: Executable, state: Mapping[str, torch.Tensor], given: Mapping[str, Any]
) -> Iterator[tuple[str, Pages]]:
    """Which pages of each state were touched, and which of them should not have been."""
    at = 0
    for name, value in state.items():
        count = -(-max(value.nbytes, 1) // mmap.PAGESIZE)
        mine = torch.frombuffer(bytearray(marks[at : at + count]), dtype=torch.uint8)
        at += count
        read, written = (mine & READ) != 0, (mine & WRITTEN) != 0
        known = new = torch.ones_like(read)
        if package.cache is not None and package.cache.is_cache(value.shape):
            rows = list(zip(given["slots"].tolist(), given["lengths"].tolist(), strict=True))
            added, room = given["input_ids"].shape[1], package.cache.room
            new = _pages_of(value, [(slot, filled, filled + added) for slot, filled in rows])
            ends = [(slot, min(room, -(-(filled + added) // _TILE) * _TILE)) for slot, filled in rows]
            known = _pages_of(value, [(slot, 0, end) for slot, end in ends])
        counts = (read, written, read & ~known, written & ~new)
        yield name, Pages(*(int(each.sum()) for each in counts))


def _pages_of(cache: torch.Tensor, rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """The pages of a cache, `[slot, head, row, …]`, that hold something of these rows: slot, first, end."""
    pages = torch.zeros(-(-cache.nbytes // mmap.PAGESIZE), dtype=torch.bool)
    heads, room = cache.shape[1], cache.shape[2]
    row = cache.nbytes // (cache.shape[0] * heads * room)
    for place, first, end in ((slot * heads + head, *ends) for slot, *ends in rows for head in range(heads)):
        begin, stop = (place * room + first) * row, (place * room + end) * row
        pages[begin // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)] = True
    return pages


def _sizes(bucket: Bucket, package: Executable) -> Iterator[dict[str, int]]:
    """The smallest sizes that a bucket takes, and larger ones: three sequences, some rows each."""
    small = {name: low for name, (low, _) in bucket.sizes.items()}
    if package.cache is None:
        yield small
        return
    wanted = {"batch": min(3, package.cache.slots), "length": min(40, package.cache.room - 1)}
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
    full = package.cache.room - sizes.get("length", 1)
    return [0, min(full, full // 2 | 1), full]


def _inputs(package: Executable, sizes: Mapping[str, int], filled: int) -> dict[str, torch.Tensor]:
    """Zeros for all inputs; sequences in the last slots, the first with so many rows, others with a quarter of them."""
    states = {row.name for row in package.bindings.state}
    made = {
        row.name: torch.zeros(
            [size if isinstance(size, int) else sizes.get(size, 1) for size in row.shape],
            dtype=getattr(torch, row.dtype),
        )
        for row in package.bindings.of(Role.INPUT)
        if row.name not in states
    }
    if package.cache is not None:
        made["slots"] = package.cache.slots - 1 - torch.arange(made["slots"].shape[0])
        made["lengths"].fill_(filled // 4)
        made["lengths"][0] = filled
    return made


if __name__ == "__main__":
    from pathlib import Path

    from inlay.compile.load import LoadedPackage
    from inlay.compile.verify import read

    version = Path(sys.argv[1])
    print(json.dumps(asdict(measure(LoadedPackage(read(version), version)))))
