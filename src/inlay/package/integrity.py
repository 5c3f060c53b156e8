"""Checks that a package is complete and fits this machine, before any of its code is loaded.

Three things must agree: the name of the folder, which is the hash of the manifest; the manifest, which lists all files
with their hashes; and the files on disk. Missing files and extra files are both errors.
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
"""File that records which weights file was already hashed; not part of the package."""
_REMEDY = "Copy or build the package again."


def read_version(folder: Path) -> Manifest:
    """Return the manifest of a version; no other file is opened."""
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
    """Check that the package fits this machine and all hashes match. Weights are hashed once, or with `verify`."""
    _check_target(manifest)
    if manifest.kind == "decoder" and manifest.decoder != SIGNATURE:
        raise _manifest_error("the inputs are not those of a decoder")
    try:
        _check_files(manifest, folder, verify)
    except OSError as error:
        raise PackageError(f"The package cannot be read: {one_line(error)}.", _REMEDY) from error
    for bucket in manifest.buckets:
        _check_steps(manifest, bucket)


def is_intact(folder: Path) -> bool:
    """Whether a version is complete and all hashes match."""
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
            f"The package was built with torch {target.torch}, but torch {here} is installed.",
            f"pip install torch=={target.torch}, or build the package again.",
        )
    if target.machine != platform.machine():
        raise PackageError(
            f"The package was built for {target.machine}, but this machine is {platform.machine()}.",
            "Build it again on this machine.",
        )
    missing = sorted(set(target.cpu_features) - set(machine.cpu_features()))
    if missing:
        raise PackageError(
            f"The package was built for a CPU with {', '.join(missing)}, which this CPU does not have.",
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
    """Check that the folder contains only regular files that the manifest lists."""
    known = {*manifest.files, manifests.NAME, weights_file.NAME, MARK}
    for name in manifest.files:
        if name.startswith("/") or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise PackageError(f"The manifest lists {name!r}, which is outside the package.", "Do not use the package.")
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_symlink():
            raise PackageError(
                f"{name} is a symbolic link, but packages contain only files.", "Replace it with the file."
            )
        if name not in known and not file.is_dir():
            raise PackageError(f"{name} is not part of the package.", f"Remove {file}.")


def _check_file(file: Path, row: FileRow) -> None:
    if not file.is_file() or file.stat().st_size != row.size or manifests.sha256(file) != row.sha256:
        raise _damage_error(file.name)


def _check_steps(manifest: Manifest, bucket: Bucket) -> None:
    """Check that every piece is a file of the package and every step has its inputs."""
    pieces = {piece.name: piece for piece in bucket.pieces}
    for piece in bucket.pieces:
        needed = {piece.file, piece.file.rpartition(".")[0] + ".json"}
        if not piece.file.endswith((".so", ".json")) or not needed <= set(manifest.files):
            raise _manifest_error(f"{piece.name} is not a file of the package")
    values = {row.name for row in manifest.bindings.ins}
    for step in bucket.steps:
        taken = pieces.get(step.piece)
        if taken is None:
            raise _manifest_error(f"a step calls {step.piece}, which is not a piece")
        compiled = taken.file.endswith(".so")
        if (len(step.ins), len(step.outs)) != (len(taken.ins), len(taken.outs)) or (
            compiled and len(step.constants) != len(taken.constants)
        ):
            raise _manifest_error(f"a step of {step.piece} does not match its inputs or outputs")
        missing = [name for name in step.constants if name not in manifest.weights]
        missing += [name for name in step.ins if name not in values]
        if missing:
            raise _manifest_error(f"a step of {step.piece} uses {missing[0]}, which is not defined")
        values |= set(step.outs)
    if not values.issuperset(bucket.results) or not set(manifest.initial.values()) <= set(manifest.weights):
        raise _manifest_error("a result or initial state is not defined")


def _manifest_error(what: str) -> PackageError:
    return PackageError(f"The manifest contradicts itself: {what}.", "Build the package again.")


def _damage_error(name: str) -> PackageError:
    return PackageError(f"{name} is damaged or incomplete.", _REMEDY)


def _file_stamp(file: Path) -> str:
    """Return a text that changes when the file is copied or written."""
    found = file.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _mark(mark: Path, seen: str) -> None:
    try:
        mark.write_text(seen)
    except OSError:
        return  # without the mark, a read-only folder is checked at every load
