"""The manifest of a package: bindings, buckets with their steps, files and hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from inlay.errors import PackageError
from inlay.lowering.buckets import Bucket  # noqa: TC001 - `from_json` reads the annotations
from inlay.package.files import sha256 as sha256
from inlay.program.bindings import Binding, Bindings  # noqa: TC001 - `from_json` reads the annotations
from inlay.program.decoder import DecoderSignature  # noqa: TC001 - `from_json` reads the annotations
from inlay.program.encoder import EncoderFacts  # noqa: TC001 - `from_json` reads the annotations
from inlay.program.json_values import DECODE_ERRORS, from_json
from inlay.program.weights import DerivedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.weights import TensorRef

FORMAT = 3
"""Format 3 changed names of fields and added the signature of decoders."""
NAME = "manifest.json"
CHUNK = 1 << 26
"""Weights are hashed in chunks of this many bytes."""


@dataclass(frozen=True)
class Target:
    """The machine and the torch version that the code was built for."""

    torch: str
    machine: str
    cpu_features: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class WeightRow:
    """A tensor of the weights file, with the tensors of the model and the weight map that it is derived from."""

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...] = ()
    """Names in the model; empty for tensors that are not in a checkpoint."""
    map: str = "same"

    def derive(self, tensors: Mapping[str, TensorRef]) -> DerivedTensor:
        """Return the tensor that the weight map computes from tensors of a model, which has all `sources`."""
        return DerivedTensor({source: tensors[source] for source in self.sources}, self.map)


@dataclass(frozen=True)
class FileRow:
    """Size and hash of a file of the package."""

    size: int
    sha256: str


@dataclass(frozen=True)
class WeightsFile:
    """Size of the weights file, and the hashes of its chunks."""

    size: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a package, read without opening another file."""

    model: str
    architecture: str
    kind: str
    """`decoder`: maps tokens to logits and has a KV cache; `encoder`: maps texts to embeddings; `program`: others."""
    bindings: Bindings
    buckets: tuple[Bucket, ...]
    weights: dict[str, WeightRow]
    weights_file: WeightsFile
    files: dict[str, FileRow]
    target: Target
    initial: dict[str, str] = field(default_factory=dict)
    """State with an initial value → name of the tensor with that value."""
    decoder: DecoderSignature | None = None
    """Names of the inputs and the output of a decoder."""
    encoder: EncoderFacts | None = None
    """How texts become embeddings."""
    facts: dict[str, int] = field(default_factory=dict)
    inlay: str = ""
    format: int = FORMAT

    def text(self) -> str:
        """Return the manifest as JSON; equal manifests have equal text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def states(self) -> tuple[Binding, ...]:
        """The state bindings."""
        return self.bindings.state


def parse(text: str | bytes) -> Manifest:
    """Parse a manifest from JSON."""
    try:
        found = json.loads(text)
        if found.get("format") != FORMAT:
            raise PackageError(
                f"The package has format {found.get('format')}, but this version of Inlay reads format {FORMAT}.",
                f"Build it again, or install the Inlay that built it: {found.get('inlay') or 'another version'}.",
            )
        manifest: Manifest = from_json(Manifest, found)
        return manifest
    except DECODE_ERRORS as error:
        raise PackageError("The manifest does not match its format.", "Copy or build the package again.") from error


def version_hash(data: bytes) -> str:
    """Return the name of a version: the hash of its manifest, which contains all other hashes.

    >>> version_hash(b"{}")
    '44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return hashlib.sha256(data).hexdigest()
