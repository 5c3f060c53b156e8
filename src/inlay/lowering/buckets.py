"""Buckets: code for ranges of sizes. Each is a list of steps over compiled pieces, as the manifest stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LENGTH = "length"
"""The size that says how many tokens of a sequence a call has."""


def find_decode_buckets(buckets: Sequence[Mapping[str, tuple[int, int | None]]]) -> list[bool]:
    """Which of these buckets, the last of which takes all sizes, are for the tokens of answers alone.

    Those of one token, if one of them takes every number of sequences. Otherwise answers need code of prompts too.

    >>> every = {"batch": (1, 4), "length": (1, 64)}
    >>> find_decode_buckets([{"batch": (1, 4), "length": (1, 1)}, every])
    [True, False]
    >>> find_decode_buckets([{"batch": (4, 4), "length": (1, 1)}, every])
    [False, False]
    """
    if not buckets:
        return []
    single = {**buckets[-1], _LENGTH: (1, 1)}
    complete = _LENGTH in buckets[-1] and single in buckets[:-1]
    return [complete and sizes.get(_LENGTH) == (1, 1) for sizes in buckets[:-1]] + [False]


@dataclass(frozen=True)
class KernelRow:
    """A linear layer of a piece: its weight, and which way was the fastest for how many rows (`compile.kernels`)."""

    weight: str
    features: int
    depth: int
    bits: int
    zero: int
    group: int
    dot_rows: int
    tiles8_rows: int
    timings: dict[str, dict[str, float]]
    """Rows → kernel → microseconds of the fastest call."""
    spread: float = 0.0
    """How much longer than the fastest call half of the calls took, at most; 0: nothing was timed."""

    def variant(self, rows: int) -> str:
        """How the kernel multiplies so many rows."""
        return "dot" if rows <= self.dot_rows else "tiles8" if rows <= self.tiles8_rows else "tiles16"


@dataclass(frozen=True)
class PieceFile:
    """A piece: a library and its source, or calls; and what it does to the states among its inputs."""

    name: str
    file: str
    constants: tuple[str, ...]
    """What the library calls its constants, in the order in which steps bind them; empty for calls."""
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...] = ()
    """Inputs that are state."""
    mutated_inputs: tuple[str, ...] = ()
    """Inputs that it writes to."""
    accesses: tuple[dict[str, str], ...] = ()
    fallback_calls: int = 0
    """How many calls it leaves to torch. Pieces that leave none run without Python in between."""
    kernels: tuple[KernelRow, ...] = ()


@dataclass(frozen=True)
class PlanStep:
    """One call of a piece: which weights are its constants, which values it takes, what its results are called."""

    piece: str
    constants: tuple[str, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]


@dataclass(frozen=True)
class Bucket:
    """Code for sizes within these ranges, by name."""

    name: str
    sizes: dict[str, tuple[int, int | None]]
    pieces: tuple[PieceFile, ...]
    steps: tuple[PlanStep, ...]
    results: tuple[str, ...]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes are within the ranges."""
        return all(
            low <= sizes[name] and (high is None or sizes[name] <= high)
            for name, (low, high) in self.sizes.items()
            if name in sizes
        )

    @property
    def text(self) -> str:
        """The ranges as people read them."""
        return ", ".join(
            f"{name} {low}" if low == high else f"{name} {low} … {'∞' if high is None else high}"
            for name, (low, high) in self.sizes.items()
        )
