"""Is a package whole, and does it fit this machine? Answered before any of its code is loaded.

Three things are held against each other: the name of the folder, which is the hash of the manifest; the manifest, which
lists all files with their hashes; and the files that are there. One too many is as wrong as one too few.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from inlay import machine
from inlay.errors import PackageError, one_line
from inlay.package import manifest as manifests
from inlay.package import weights_file
from inlay.program.decoder import SIGNATURE

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.lowering.buckets import Bucket
    from inlay.package.manifest import FileRow, Manifest

MARK = ".verified"
"""Says that the weights of this very file were hashed before; not part of the package."""
_REMEDY = "Copy or build the package again."


def read_version(folder: Path) -> Manifest:
    """The manifest of a version; no other file is opened."""
    file = folder / manifests.NAME
    if file.is_symlink() or not file.is_file():
        raise PackageError(f"{folder.parent.parent} has no {file.name}.", _REMEDY)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PackageError(f"{file.name} cannot be read: {one_line(error)}.", _REMEDY) from error
    if manifests.version_hash(data) != folder.name:
        raise _damage_error(file.name)
    return manifests.parse(data)


def check_package(manifest: Manifest, folder: Path, *, verify: bool = False) -> None:
    """Does the package fit this machine, and is every file what it was? Weights are read once, or with `verify`."""
    _check_target(manifest)
    if manifest.kind == "decoder" and manifest.decoder != SIGNATURE:
        raise _manifest_error("its inputs are not those of a decoder")
    try:
        _check_files(manifest, folder, verify)
    except OSError as error:
        raise PackageError(f"The package cannot be read: {one_line(error)}.", _REMEDY) from error
    for bucket in manifest.buckets:
        _check_steps(manifest, bucket)


def is_intact(folder: Path) -> bool:
    """Whether a version is complete and every file what it was."""
    try:
        manifest = read_version(folder)
        _check_files(manifest, folder, True)
    except (PackageError, OSError):
        return False
    return True


def _check_target(manifest: Manifest) -> None:
    target = manifest.target
    here = torch.__version__.partition("+")[0]
    if target.torch != here:
        raise PackageError(
            f"The package was built with torch {target.torch}, and torch {here} is installed.",
            f"pip install torch=={target.torch}, or build the package again.",
        )
    if target.machine != platform.machine():
        raise PackageError(
            f"The package was built for {target.machine}, and this is {platform.machine()}.",
            "Build it again on this machine.",
        )
    missing = sorted(set(target.cpu_features) - set(machine.cpu_features()))
    if missing:
        raise PackageError(
            f"The package was built for a CPU with {', '.join(missing)}, which this one has not.",
            "Build it again on this machine.",
        )


def _check_files(manifest: Manifest, folder: Path, verify: bool) -> None:
    _check_listing(manifest, folder)
    for name, row in manifest.files.items():
        _check_file(folder / name, row)
    weights = folder / weights_file.NAME
    if not weights.is_file() or weights.stat().st_size != manifest.weights_file.size:
        raise _damage_error(weights.name)
    mark, seen = folder / MARK, _file_stamp(weights)
    if verify or not mark.is_file() or mark.read_text(errors="replace") != seen:
        weights_file.check(weights, manifest.weights_file)
        _mark(mark, seen)


def _check_listing(manifest: Manifest, folder: Path) -> None:
    """Plain files only, and none but those that are known: whoever reads the folder finds what was built."""
    known = {*manifest.files, manifests.NAME, weights_file.NAME, MARK}
    for name in manifest.files:
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise PackageError(f"The manifest names {name!r}, which lies outside the package.", "Do not use it.")
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_symlink():
            raise PackageError(f"{name} is a link, and packages hold files only.", "Put the file itself in its place.")
        if name not in known and not file.is_dir():
            raise PackageError(f"{name} is no part of the package.", f"Remove {file}.")


def _check_file(file: Path, row: FileRow) -> None:
    if not file.is_file() or file.stat().st_size != row.size or manifests.sha256(file) != row.sha256:
        raise _damage_error(file.name)


def _check_steps(manifest: Manifest, bucket: Bucket) -> None:
    """Every piece is a file that was checked, every step has what it takes."""
    pieces = {piece.name: piece for piece in bucket.pieces}
    for piece in bucket.pieces:
        needed = {piece.file, piece.file.rpartition(".")[0] + ".json"}
        if not piece.file.endswith((".so", ".json")) or not needed <= set(manifest.files):
            raise _manifest_error(f"{piece.name} is no file of the package")
    values = {row.name for row in manifest.bindings.ins}
    for step in bucket.steps:
        taken = pieces.get(step.piece)
        if taken is None:
            raise _manifest_error(f"a step calls {step.piece}, which is no piece")
        compiled = taken.file.endswith(".so")
        if (len(step.ins), len(step.outs)) != (len(taken.ins), len(taken.outs)) or (
            compiled and len(step.constants) != len(taken.constants)
        ):
            raise _manifest_error(f"a step of {step.piece} does not fit what it takes or gives")
        missing = [name for name in step.constants if name not in manifest.weights]
        missing += [name for name in step.ins if name not in values]
        if missing:
            raise _manifest_error(f"a step of {step.piece} takes {missing[0]}, which nothing gives")
        values |= set(step.outs)
    if not values.issuperset(bucket.results) or not set(manifest.initial.values()) <= set(manifest.weights):
        raise _manifest_error("a result or state comes from nowhere")


def _manifest_error(what: str) -> PackageError:
    return PackageError(f"The manifest contradicts itself: {what}.", "Build the package again.")


def _damage_error(name: str) -> PackageError:
    return PackageError(f"{name} is damaged or incomplete.", _REMEDY)


def _file_stamp(file: Path) -> str:
    """What changes when a file is copied or written to."""
    found = file.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _mark(mark: Path, seen: str) -> None:
    try:
        mark.write_text(seen)
    except OSError:
        return  # a folder that cannot be written to is checked at every load
