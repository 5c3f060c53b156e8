"""Loads a package: checks all files, loads the libraries and maps the weights. Nothing is compiled.

A package contains native code: load only packages from a trusted source. Hashes detect damage, not malicious code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import PackageError
from inlay.lowering.aoti_runtime import Library, chain_steps
from inlay.lowering.eager_graph import EagerGraph
from inlay.lowering.executable import BoundStep, Executable, PlanExecutor
from inlay.ops import native
from inlay.package import store, weights_file
from inlay.package.integrity import check_package as check_package
from inlay.package.integrity import read_version
from inlay.program.json_values import from_json
from inlay.program.remarks import Remark

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from inlay.lowering.buckets import Bucket, PieceFile
    from inlay.package.manifest import Manifest

    BindConstants = Callable[[list[torch.Tensor]], Any]


def read_manifest(path: str | Path) -> tuple[Manifest, Path]:
    """Return the manifest of a package and the folder of its current version; no other file is opened."""
    folder = store.locate(Path(path))
    return read_version(folder), folder


def load_package(path: str | Path, *, verify: bool = False) -> LoadedPackage:
    """Check a package, map its weights and load its libraries."""
    folder = store.locate(Path(path))
    try:
        manifest = read_version(folder)
        check_package(manifest, folder, verify=verify)
        return LoadedPackage(manifest, folder)
    except (PackageError, OSError):
        if store.locate(Path(path)) == folder:
            raise
    return load_package(path, verify=verify)  # another process replaced this version


class LoadedPackage(Executable):
    """A package loaded into memory. All buckets share the mapped weights."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.manifest, self.folder = manifest, folder
        self.weights = weights_file.map_tensors(folder / weights_file.NAME, manifest.weights)
        code = [{piece.name: self._load_piece(piece) for piece in bucket.pieces} for bucket in manifest.buckets]
        # All checks are done; native code is loaded from here on.
        self.kernels = native.load(folder / native.LIBRARY_NAME) if native.LIBRARY_NAME in manifest.files else None
        self.steps = [self._bind_steps(bucket, made) for bucket, made in zip(manifest.buckets, code, strict=True)]
        """The steps of each bucket."""
        buckets = [
            (bucket, PlanExecutor(chain_steps(steps, bucket.results), bucket.results))
            for bucket, steps in zip(manifest.buckets, self.steps, strict=True)
        ]
        initial = {name: self.weights[of] for name, of in manifest.initial.items()}
        super().__init__(manifest.bindings, buckets, initial, _read_copy_remarks(folder))
        self.version = folder.name

    def _bind_steps(self, bucket: Bucket, code: dict[str, BindConstants]) -> list[BoundStep]:
        return [
            BoundStep(code[step.piece]([self.weights[name] for name in step.constants]), step.ins, step.outs)
            for step in bucket.steps
        ]

    def _load_piece(self, piece: PieceFile) -> BindConstants:
        """Return a function that binds constants to a piece and returns its call."""
        file = self.folder / piece.file
        if file.suffix == ".json":
            calls = EagerGraph.read(file)
            return lambda constants: lambda inputs: calls([*constants, *inputs])

        library = Library(file, len(piece.ins), len(piece.outs))

        def bind(constants: list[torch.Tensor]) -> Any:
            library.kernels = None if piece.fallback_calls else self.kernels
            return library.bind(dict(zip(piece.constants, constants, strict=True)))

        return bind


def _read_copy_remarks(folder: Path) -> list[Remark]:
    """Return the remarks of the build on states that are not updated in place."""
    file = folder / "remarks.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if '"in_place"' in line]
    return [from_json(Remark, row) for row in rows if row["transform"] == "in_place"]
