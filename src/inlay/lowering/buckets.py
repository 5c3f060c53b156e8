"""Buckets: code for ranges of sizes. A bucket is a list of steps over compiled pieces, as stored in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LENGTH = "length"
"""The size that is the number of tokens per sequence in a call."""
READS_FILLED_ROWS = "filled rows"
"""The `reads` text of operators that read only the filled rows of a state."""


def find_decode_buckets(buckets: Sequence[Mapping[str, tuple[int, int | None]]]) -> list[bool]:
    """Return which of these buckets are for decode only. The last bucket accepts all sizes.

    They are the buckets of one token, if one of them accepts every number of sequences. Otherwise decode needs prefill
    code too, and no bucket is for decode only.

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
    """A linear layer of a piece: its weight, and the fastest kernel variant by number of rows (`compile.kernels`)."""

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
    """The largest ratio of the median to the fastest call; 0 if nothing was timed."""

    def variant(self, rows: int) -> str:
        """Return the kernel variant for this number of rows."""
        return "dot" if rows <= self.dot_rows else "tiles8" if rows <= self.tiles8_rows else "tiles16"


@dataclass(frozen=True)
class PieceFile:
    """A piece in a package: a library and its source, or a list of calls; and its accesses to states."""

    name: str
    file: str
    constants: tuple[str, ...]
    """The library's names of its constants, in the order in which steps bind them; empty for a list of calls."""
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...] = ()
    """Inputs that are state."""
    mutated_inputs: tuple[str, ...] = ()
    """Inputs that the piece writes to."""
    accesses: tuple[dict[str, str], ...] = ()
    fallback_calls: int = 0
    """How many calls fall back to torch. Consecutive pieces without any run without Python in between."""
    kernels: tuple[KernelRow, ...] = ()


@dataclass(frozen=True)
class PlanStep:
    """One call of a piece: the weights for its constants, and the names of its inputs and results."""

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
        """The ranges as text for messages."""
        return format_sizes(self.sizes)


def format_sizes(sizes: Mapping[str, tuple[int, int | None]]) -> str:
    """Format the sizes of a bucket with ranges.

    >>> format_sizes({"batch": (1, 1), "length": (1, None)})
    'batch 1, length 1 … ∞'
    """
    return ", ".join(
        f"{name} {low}" if low == high else f"{name} {low} … {'∞' if high is None else high}"
        for name, (low, high) in sizes.items()
    )


def measured_kernels(buckets: Sequence[Bucket]) -> dict[tuple[str, int, int, int], KernelRow]:
    """Return the choices that were measured at build by bucket name, features, depth and bits."""
    return {
        (bucket.name, row.features, row.depth, row.bits): row
        for bucket in buckets
        for piece in bucket.pieces
        for row in piece.kernels
        if row.timings
    }


def find_shared_slot_problem(buckets: Sequence[Bucket], states: Sequence[str]) -> str:
    """Return why rows of one call must not share a slot; empty if each row may read the rows before it.

    They may if the code writes all rows of a state before attention reads any, and does nothing else with it. The
    proof reads the accesses that the compiler recorded.
    """
    for bucket in buckets:
        pieces = {piece.name: piece for piece in bucket.pieces}
        written, read = set[str](), set[str]()
        for step in bucket.steps:
            piece = pieces[step.piece]
            for access in piece.accesses:
                state, reads = step.ins[piece.ins.index(access["state"])], access.get("reads", "")
                if state not in states:
                    continue
                if access.get("unknown") or (reads and (reads != READS_FILLED_ROWS or state not in written)):
                    return f"{access['kernel']} reads {state} in another way than attention to rows that are written"
                if access.get("writes") and state in read:
                    return f"{access['kernel']} writes to {state} after attention has read it"
                (read if reads else written).add(state)
        if missing := sorted(set(states) - (written & read)):
            return f"how the code {bucket.name} writes and reads {missing[0]} was not recorded"
    return ""
