"""Loading a package: everything is checked, then libraries are loaded and weights mapped. Nothing is compiled.

A package holds native code: load only what you or somebody you trust built. Hashes find damage, not malice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.compile import store, weights_file
from inlay.compile.calls import Calls
from inlay.compile.execute import BoundStep, Executable, Execution
from inlay.compile.native import Library, chained
from inlay.compile.verify import check as check
from inlay.compile.verify import read
from inlay.errors import PackageError
from inlay.ops import native

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from inlay.compile.manifest import Bucket, Manifest, PieceFile

    Code = Callable[[list[torch.Tensor]], Any]


def read_manifest(path: str | Path) -> tuple[Manifest, Path]:
    """The manifest of a package and the folder of its current version; no other file is opened."""
    folder = store.locate(Path(path))
    return read(folder), folder


def load_package(path: str | Path, *, verify: bool = False) -> LoadedPackage:
    """Check a package, map its weights and load its libraries."""
    folder = store.locate(Path(path))
    try:
        manifest = read(folder)
        check(manifest, folder, verify=verify)
        return LoadedPackage(manifest, folder)
    except (PackageError, OSError):
        if store.locate(Path(path)) == folder:
            raise
    return load_package(path, verify=verify)  # somebody has built a new version meanwhile, and removed the old one


class LoadedPackage(Executable):
    """A package that runs. Weights are mapped once and shared by all its buckets."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self.manifest, self.folder = manifest, folder
        self.weights = weights_file.mapped(folder / weights_file.NAME, manifest.weights)
        code = [{piece.name: self._code(piece) for piece in bucket.pieces} for bucket in manifest.buckets]
        # All that can be found wrong was found by now: from here on native code is loaded.
        self.kernels = native.load(folder / native.NAME) if native.NAME in manifest.files else None
        self.steps = [self._bound(bucket, made) for bucket, made in zip(manifest.buckets, code, strict=True)]
        """For each bucket its steps, one by one."""
        buckets = [
            (bucket, Execution(chained(steps, bucket.results), bucket.results))
            for bucket, steps in zip(manifest.buckets, self.steps, strict=True)
        ]
        super().__init__(manifest.bindings, buckets, {name: self.weights[of] for name, of in manifest.initial.items()})

    def _bound(self, bucket: Bucket, code: dict[str, Code]) -> list[BoundStep]:
        return [
            BoundStep(code[step.piece]([self.weights[name] for name in step.constants]), step.ins, step.outs)
            for step in bucket.steps
        ]

    def _code(self, piece: PieceFile) -> Code:
        """Something that makes a call of a piece from its constants."""
        file = self.folder / piece.file
        if file.suffix == ".json":
            calls = Calls.read(file)
            return lambda constants: lambda inputs: calls([*constants, *inputs])

        library = Library(file, len(piece.ins), len(piece.outs))

        def bind(constants: list[torch.Tensor]) -> Any:
            library.kernels = None if piece.calls else self.kernels
            return library.bind(dict(zip(piece.constants, constants, strict=True)))

        return bind
