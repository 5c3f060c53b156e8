"""The manifest of a package: one table of bindings, buckets of steps over it, files and their hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from inlay.errors import PackageError
from inlay.lowering.buckets import Bucket  # noqa: TC001 - `from_json` reads the annotations
from inlay.package.files import sha256 as sha256
from inlay.program.bindings import Binding, Bindings  # noqa: TC001 - `from_json` reads the annotations
from inlay.program.decoder import DecoderSignature  # noqa: TC001 - `from_json` reads the annotations
from inlay.program.json_values import DECODE_ERRORS, from_json

FORMAT = 3
"""3: names of fields, and the signature of decoders."""
NAME = "manifest.json"
CHUNK = 1 << 26
"""Weights are hashed in chunks of this many bytes."""


@dataclass(frozen=True)
class Target:
    """What the code was built for. It runs nowhere else."""

    torch: str
    machine: str
    cpu_features: tuple[str, ...]
    threads: int


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
    decoder: DecoderSignature | None = None
    """Names of the inputs and the output of a decoder."""
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
        manifest: Manifest = from_json(Manifest, found)
        return manifest
    except DECODE_ERRORS as error:
        raise PackageError("The manifest is not what its format says.", "Copy or build the package again.") from error


def version_hash(data: bytes) -> str:
    """The name of a version of a package: the hash of its manifest, which holds all other hashes.

    >>> version_hash(b"{}")
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return hashlib.sha256(data).hexdigest()
