"""What the steps of a package read, write and allocate, measured on caches that are empty, half full and full.

State lies in protected pages, so that every page that is read or written is known, whatever code did it; every block of
memory that anybody asks for is counted by a library that is loaded before libc. A step may write the rows it adds and
read the rows that are filled, and what it allocates must not depend on how full a cache is.

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

from inlay.compile.manifest import decoding
from inlay.errors import PackageError
from inlay.program.bindings import Role
from inlay.program.from_json import value_of
from inlay.state.watch import READ, WRITTEN, arena, blocks, counting_environment, pages_touched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from inlay.compile.execute import Executable
    from inlay.compile.manifest import Bucket

_NOISE = 4096
"""Bytes in blocks of a kilobyte and more that may differ between two equal steps: Python's own tables grow too."""


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
    moved: tuple[str, ...] = ()
    """States that were somewhere else after a step."""

    @property
    def counts_allocations(self) -> bool:
        """Whether blocks of memory were counted."""
        return all(step.blocks is not None for step in self.steps)

    def problems(self) -> Iterator[str]:
        """What is not as it must be."""
        for name in self.moved:
            yield f"{name} does not stay where it is"
        empty: dict[tuple[Any, ...], Step] = {}
        for step in self.steps:
            for name, pages in step.pages.items():
                if pages.written_beyond:
                    yield f"{step.where}: {pages.written_beyond} pages of {name} are written that hold no new row"
                if pages.read_beyond:
                    yield f"{step.where}: {pages.read_beyond} pages of {name} are read that hold no filled row"
            first = empty.setdefault((step.bucket, *step.sizes.items()), step)
            yield from _grown(first, step, "on empty caches")

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
    return "empty" if not step.filled else "half" if step.filled <= traffic.room // 2 else "full"


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
    whole, state = arena(shapes)
    for name, value in package.initial.items():
        state[name].copy_(value)
    places = {name: value.data_ptr() for name, value in state.items()}
    steps = tuple(_steps(package, whole, state)) if state else ()
    moved = tuple(name for name, value in state.items() if value.data_ptr() != places[name])
    return Traffic(package.cache.room if package.cache else 0, steps, moved)


def _steps(package: Executable, whole: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Iterator[Step]:
    answers = decoding([bucket.sizes for bucket, _ in package.buckets])
    for (bucket, _), answering in zip(package.buckets, answers, strict=True):
        for sizes in _sizes(bucket, package):
            for filled in _fills(package, sizes):
                given = {**state, **_inputs(package, sizes, filled or 0)}
                call = partial(package, given, prompt=not answering)
                if not filled:  # what is done once is done now
                    call()
                    call()
                marks, allocated, results = _run(call, whole)
                pages = dict(_pages(marks, package, state, given, filled or 0))
                yield Step(bucket.name, sizes, filled, pages, allocated, results)


def _run(
    step: Callable[[], dict[str, Any]], whole: torch.Tensor
) -> tuple[bytes, tuple[int, ...] | None, tuple[int, ...]]:
    """One step, watched: the marks of its pages, what it allocated, what it gave."""
    marks, results = b"", {}

    def call() -> None:
        nonlocal results
        results = step()

    def watched() -> None:
        nonlocal marks
        marks = pages_touched(call, whole)

    counted = blocks(watched)
    if counted is None:
        watched()
    given_back = tuple(value.nbytes for value in results.values() if isinstance(value, torch.Tensor))
    return marks, None if counted is None else tuple(counted), given_back


def _pages(
    marks: bytes, package: Executable, state: Mapping[str, torch.Tensor], given: Mapping[str, Any], filled: int
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
            slots, end = given["slots"].tolist(), filled + given["input_ids"].shape[1]
            known, new = _pages_of(value, slots, 0, end), _pages_of(value, slots, filled, end)
        counts = (read, written, read & ~known, written & ~new)
        yield name, Pages(*(int(each.sum()) for each in counts))


def _pages_of(cache: torch.Tensor, slots: list[int], first: int, end: int) -> torch.Tensor:
    """The pages of a cache, `[slot, head, row, …]`, that hold something of these rows."""
    pages = torch.zeros(-(-cache.nbytes // mmap.PAGESIZE), dtype=torch.bool)
    heads, room = cache.shape[1], cache.shape[2]
    row = cache.nbytes // (cache.shape[0] * heads * room)
    for place in (slot * heads + head for slot in slots for head in range(heads)):
        begin, stop = (place * room + first) * row, (place * room + end) * row
        pages[begin // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)] = True
    return pages


def _sizes(bucket: Bucket, package: Executable) -> Iterator[dict[str, int]]:
    """The smallest sizes that a bucket takes, and larger ones: two sequences, a few rows each."""
    small = {name: low for name, (low, _) in bucket.sizes.items()}
    if package.cache is None:
        yield small
        return
    wanted = {"batch": min(2, package.cache.slots), "length": min(24, package.cache.room // 4)}
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
    return [0, full // 2, full]


def _inputs(package: Executable, sizes: Mapping[str, int], filled: int) -> dict[str, torch.Tensor]:
    """Zeros for all inputs; sequences in the last slots, each with so many rows."""
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
        made["lengths"].fill_(filled)
    return made


if __name__ == "__main__":
    from pathlib import Path

    from inlay.compile.load import LoadedPackage
    from inlay.compile.verify import read

    version = Path(sys.argv[1])
    print(json.dumps(asdict(measure(LoadedPackage(read(version), version)))))
