"""Loading a package: everything is checked, then libraries are loaded and weights mapped. Nothing is compiled.

A package holds native code: load only what you or somebody you trust built. Hashes find damage, not malice.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from inlay import host
from inlay.compile import manifest as manifests
from inlay.compile import store, weights_file
from inlay.compile.calls import Calls
from inlay.compile.execute import BoundStep, Executable, Execution
from inlay.compile.native import Library
from inlay.errors import PackageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.compile.manifest import Bucket, FileRow, Manifest, PieceFile


def read_manifest(path: str | Path) -> tuple[Manifest, Path]:
    """The manifest of a package and the folder of its current version; no other file is opened."""
    folder = store.locate(Path(path))
    file = folder / manifests.NAME
    if not file.is_file():
        raise PackageError(f"{path} has no manifest.", "Copy or build it again.")
    try:
        text = file.read_text()
    except UnicodeDecodeError as error:
        raise _damaged(file.name) from error
    if manifests.identity(text) != folder.name:
        raise _damaged(file.name)
    return manifests.parse(text), folder


def check(manifest: Manifest, folder: Path, *, verify: bool = False) -> None:
    """Does the package fit this machine, and is every file what it was? Weights are read once, or with `verify`."""
    _check_target(manifest)
    for name, row in manifest.files.items():
        _check_file(folder / name, row)
    weights = folder / weights_file.NAME
    if not weights.is_file() or weights.stat().st_size != manifest.weights_file.size:
        raise _damaged(weights.name)
    mark, seen = folder / store.MARK, _state_of(weights)
    if verify or not mark.is_file() or mark.read_text(errors="replace") != seen:
        weights_file.check(weights, manifest.weights_file)
        _mark(mark, seen)


def load_package(path: str | Path, *, verify: bool = False) -> LoadedPackage:
    """Check a package, map its weights and load its libraries."""
    manifest, folder = read_manifest(path)
    check(manifest, folder, verify=verify)
    return LoadedPackage(manifest, folder)


class LoadedPackage(Executable):
    """A package that runs. Weights are mapped once and shared by all its buckets."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.manifest, self.folder = manifest, folder
        self.weights = weights_file.mapped(folder / weights_file.NAME, manifest.weights)
        buckets = [(bucket, self._execution(bucket)) for bucket in manifest.buckets]
        super().__init__(manifest.bindings, buckets, {name: self.weights[of] for name, of in manifest.initial.items()})

    def _execution(self, bucket: Bucket) -> Execution:
        pieces = {piece.name: piece for piece in bucket.pieces}
        code = {name: self._code(piece) for name, piece in pieces.items()}
        steps = []
        for step in bucket.steps:
            piece = pieces[step.piece]
            if len(step.ins) != len(piece.ins) or len(step.outs) != len(piece.outs):
                raise PackageError(f"A step of {piece.name} does not fit what it takes or gives.")
            steps.append(
                BoundStep(code[step.piece]([self.weights[name] for name in step.constants]), step.ins, step.outs)
            )
        return Execution(steps, bucket.results)

    def _code(self, piece: PieceFile) -> Callable[[list[torch.Tensor]], Any]:
        """Something that makes a call of a piece from its constants."""
        file = self.folder / piece.file
        if file.suffix == ".json":
            calls = Calls(json.loads(file.read_text()))
            return lambda constants: lambda inputs: calls([*constants, *inputs])
        library = Library(file, len(piece.ins), len(piece.outs))
        return lambda constants: library.bind(dict(zip(piece.constants, constants, strict=True)))


def _check_target(manifest: Manifest) -> None:
    target = manifest.target
    here = torch.__version__.partition("+")[0]
    if target.torch != here:
        raise PackageError(
            f"The package was built with torch {target.torch}, and torch {here} is installed.",
            f"pip install torch=={target.torch}, or build the package again.",
        )
    if target.machine != platform.machine():
        raise PackageError(f"The package was built for {target.machine}, and this is {platform.machine()}.")
    missing = sorted(set(target.cpu_features) - set(host.cpu_features()))
    if missing:
        raise PackageError(
            f"The package was built for a CPU with {', '.join(missing)}, which this one has not.",
            "Build it again on this machine.",
        )


def _check_file(file: Path, row: FileRow) -> None:
    if not file.is_file() or file.stat().st_size != row.size or manifests.sha256(file) != row.sha256:
        raise _damaged(file.name)


def _damaged(name: str) -> PackageError:
    return PackageError(f"{name} is damaged or incomplete.", "Copy or build the package again.")


def _state_of(file: Path) -> str:
    """What changes when a file is copied or written to."""
    found = file.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _mark(mark: Path, seen: str) -> None:
    try:
        mark.write_text(seen)
    except OSError:
        return  # a folder that cannot be written to is checked at every load
