"""Step durations of a replica, from a recording of a real engine (`record.py`), and the limits of that engine."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_T = TypeVar("_T")
MOST_WRONG = 0.1
"""Relative error of the sum of all predicted steps above which a recording is not used without a warning."""


@dataclass(frozen=True)
class EngineShape:
    """The limits of an engine and its package that decide its steps."""

    slots: int = 8
    max_seq_len: int = 2048
    max_waiting: int = 64
    max_prefill_tokens: int = 64
    max_prefill_only_tokens: int = 512
    block_size: int = 32
    cache_blocks: int = 512
    """Blocks on the first level of the prefix cache; 0: no prefix cache."""
    host_blocks: int = 0
    """Blocks on the second level."""
    batches: tuple[int, ...] = ()
    """Decode batch sizes that have a bucket."""
    can_store_generated: bool = False
    """Whether blocks of generated tokens are stored in the prefix cache."""


@dataclass(frozen=True)
class StepTimes:
    """Durations in seconds of the parts of a step.

    A decode of B sequences with N cached tokens in total takes `decode_base[B] + decode_row[B] * N`. A prefill chunk is
    interpolated linearly in both directions between recorded chunk sizes and start positions.

    >>> times = StepTimes((0.0, 0.01, 0.015), (0.0, 1e-6, 2e-6), (1, 101), (0, 1000), ((0.1, 0.2), (0.3, 0.4)))
    >>> round(times.decode(2, 1000), 6), round(times.prefill(51, 500, 0), 6)
    (0.017, 0.25)
    """

    decode_base: tuple[float, ...]
    """Indexed by batch size; the first entry is not used."""
    decode_row: tuple[float, ...]
    chunks: tuple[int, ...]
    starts: tuple[int, ...]
    chunk_seconds: tuple[tuple[float, ...], ...]
    """A row for each chunk size, a column for each start."""
    load_block: float = 0.0
    """Seconds to copy one cached block into a slot."""
    empty_step: float = 5e-5
    """Seconds of a step that only admits requests."""
    request_seconds: float = 0.0
    """Seconds between the client's request and its arrival in the queue of the engine: HTTP, JSON, validation."""

    def decode(self, batch: int, rows: int) -> float:
        """Return the seconds of a decode of `batch` sequences with `rows` cached tokens in total."""
        return self.decode_base[batch] + self.decode_row[batch] * rows

    def prefill(self, count: int, start: int, blocks: int) -> float:
        """Return the seconds of a chunk of `count` tokens at a position, after copying `blocks` cached blocks."""
        row, along = _place(self.chunks, count)
        column, across = _place(self.starts, start)
        upper, lower = self.chunk_seconds[row], self.chunk_seconds[row + 1]
        first = upper[column] + across * (upper[column + 1] - upper[column])
        second = lower[column] + across * (lower[column + 1] - lower[column])
        return max(1e-6, first + along * (second - first) + self.load_block * blocks)


def _place(grid: Sequence[int], value: int) -> tuple[int, float]:
    """Return the interval of a value in a grid and its position in the interval; outside, the last ones continue."""
    index = min(max(bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])


@dataclass(frozen=True)
class Recording:
    """A recording of an engine: its limits, its step times and the error of the fit."""

    shape: EngineShape
    times: StepTimes
    error: dict[str, float] = field(default_factory=dict)
    """Relative errors of the fit, by name."""
    about: dict[str, Any] = field(default_factory=dict)
    """How it was recorded."""
    samples: dict[str, Any] = field(default_factory=dict)
    """The measured durations."""

    @property
    def problem(self) -> str:
        """What is wrong with the recording; empty if its check succeeded."""
        wrong = self.error.get("check_total", 0.0)
        return f"The step times differ by {wrong:+.0%} from those of the engine." if abs(wrong) > MOST_WRONG else ""

    def write(self, path: Path) -> None:
        """Write the recording as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Return the recording in a JSON file."""
        return cls.parse(json.loads(path.read_text()))

    @classmethod
    def parse(cls, found: dict[str, Any]) -> Recording:
        """Return the recording of parsed JSON."""
        return cls(_load(EngineShape, found["shape"]), _load(StepTimes, found["times"]), found["error"], found["about"])

    def scaled(self, factor: float) -> Recording:
        """Return a recording in which every step takes `factor` times as long."""
        times = self.times
        return replace(
            self,
            times=replace(
                times,
                decode_base=tuple(factor * each for each in times.decode_base),
                decode_row=tuple(factor * each for each in times.decode_row),
                chunk_seconds=tuple(tuple(factor * each for each in row) for row in times.chunk_seconds),
                load_block=factor * times.load_block,
            ),
        )


def _load(kind: type[_T], found: dict[str, Any]) -> _T:
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # both kinds are dataclasses
    return kind(**{name: _tuples(value) for name, value in found.items() if name in known})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def fit_decode(samples: Iterable[tuple[int, int, float]], slots: int) -> tuple[list[float], list[float]]:
    """Fit the seconds of decode steps, given as batch, cached tokens in total, seconds; minimize relative errors.

    >>> base, row = fit_decode([(1, 100, 1.1), (1, 300, 1.3), (2, 100, 2.1), (2, 300, 2.3)], 2)
    >>> [round(each, 6) for each in (*base, *row)]
    [0.0, 1.0, 2.0, 0.0, 0.001, 0.001]
    """
    by_batch: dict[int, list[tuple[int, float]]] = {}
    for batch, rows, seconds in samples:
        by_batch.setdefault(batch, []).append((rows, seconds))
    known = sorted(by_batch)
    fits = []
    for batch in known:
        held, took = np.array(by_batch[batch], float).T
        matrix = np.stack([np.ones_like(held), held], 1) / took[:, None]
        fits.append(np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)[0])
    every = range(1, slots + 1)
    base, row = (np.interp(every, known, [fit[part] for fit in fits]).tolist() for part in (0, 1))
    return [0.0, *base], [0.0, *row]
