"""The manifest of a package: one table of bindings, buckets of steps over it, files and their hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from inlay.compile.files import sha256 as sha256
from inlay.errors import PackageError
from inlay.program.bindings import Binding, Bindings  # noqa: TC001 - `value_of` reads the annotations
from inlay.program.from_json import REFUSED, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 2
"""2: kernels belong to a phase, so what a token gives does not depend on the call it is in."""
NAME = "manifest.json"
CHUNK = 1 << 26
"""Weights are hashed in chunks of this many bytes."""
_LENGTH = "length"
"""The size that says how many tokens of a sequence a call has."""


def decoding(buckets: Sequence[Mapping[str, tuple[int, int | None]]]) -> list[bool]:
    """Which of these buckets, the last of which takes all sizes, are for the tokens of answers alone.

    Those of one token, if one of them takes every number of sequences. Otherwise answers need code of prompts too.

    >>> every = {"batch": (1, 4), "length": (1, 64)}
    >>> decoding([{"batch": (1, 4), "length": (1, 1)}, every])
    [True, False]
    >>> decoding([{"batch": (4, 4), "length": (1, 1)}, every])
    [False, False]
    """
    if not buckets:
        return []
    single = {**buckets[-1], _LENGTH: (1, 1)}
    complete = _LENGTH in buckets[-1] and single in buckets[:-1]
    return [complete and sizes.get(_LENGTH) == (1, 1) for sizes in buckets[:-1]] + [False]


@dataclass(frozen=True)
class Target:
    """What the code was built for. It runs nowhere else."""

    torch: str
    machine: str
    cpu_features: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class KernelRow:
    """A linear layer of a piece: its weight, and which way was the fastest for how many rows (`compile.kernels`)."""

    weight: str
    features: int
    depth: int
    bits: int
    zero: int
    group: int
    singly: int
    tiled: int
    timings: dict[str, dict[str, float]]
    """Rows → kernel → microseconds of the fastest call."""
    spread: float = 0.0
    """How much longer than the fastest call half of the calls took, at most; 0: nothing was timed."""

    def way(self, rows: int) -> str:
        """How the kernel multiplies so many rows."""
        return "dot" if rows <= self.singly else "tiles8" if rows <= self.tiled else "tiles16"


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
    written: tuple[str, ...] = ()
    """Inputs that it writes to."""
    accesses: tuple[dict[str, str], ...] = ()
    calls: int = 0
    """How many calls it leaves to torch. Pieces that leave none run without Python in between."""
    kernels: tuple[KernelRow, ...] = ()


@dataclass(frozen=True)
class Step:
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
    steps: tuple[Step, ...]
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


@dataclass(frozen=True)
class WeightRow:
    """A tensor of the weights file: which tensors of the model it is made from, by which map."""

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    """Names in the model; empty for what no checkpoint holds."""
    map: str = "same"


@dataclass(frozen=True)
class FileRow:
    """A file of the package: its size and hash."""

    size: int
    sha256: str


@dataclass(frozen=True)
class WeightsFile:
    """The file that holds all weights, and the hashes of its chunks."""

    size: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is known of a package without opening another file."""

    model: str
    architecture: str
    kind: str
    """`decoder`: tokens in, scores out, with a cache of its own; `program`: anything else."""
    bindings: Bindings
    buckets: tuple[Bucket, ...]
    weights: dict[str, WeightRow]
    weights_file: WeightsFile
    files: dict[str, FileRow]
    target: Target
    initial: dict[str, str] = field(default_factory=dict)
    """State that starts with a value → the tensor that holds it."""
    facts: dict[str, int] = field(default_factory=dict)
    inlay: str = ""
    format: int = FORMAT

    def text(self) -> str:
        """The manifest as JSON; equal manifests give equal text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def states(self) -> tuple[Binding, ...]:
        """The state bindings."""
        return self.bindings.state


def parse(text: str | bytes) -> Manifest:
    """A manifest from its JSON."""
    try:
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise PackageError(
                f"The package has format {found.get('format')}, and this Inlay reads format {FORMAT}.",
                f"It was built by Inlay {found.get('inlay') or 'of another version'}: build it again, or install that.",
            )
        manifest: Manifest = value_of(Manifest, found)
        return manifest
    except REFUSED as error:
        raise PackageError("The manifest is not what its format says.", "Copy or build the package again.") from error


def identity(data: bytes) -> str:
    """The name of a version of a package: the hash of its manifest, which holds all other hashes.

    >>> identity(b"{}")
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return hashlib.sha256(data).hexdigest()
