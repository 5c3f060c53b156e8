"""The folder of a package: versions, and a link to the current one.

DIR/current → versions/HASH. HASH is the hash of the manifest in that folder, which contains the hashes of all other
files. A version is complete and flushed to disk before the link is switched. A build that dies leaves the package
unchanged, or no package. A writer holds a lock on the folder it writes to; the system releases it if the writer dies.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inlay.errors import PackageError, UsageError
from inlay.package import integrity
from inlay.package import manifest as manifests
from inlay.package.files import lock_folder, stage_folder, sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LINK, VERSIONS, STAGING = "current", "versions", ".building-"
_HASH = re.compile("[0-9a-f]{64}")
_REMEDY = "Copy or build the package again."


def locate(path: Path) -> Path:
    """Return the folder of the current version. Links that point anywhere else are not followed."""
    link = path / LINK
    if not link.is_symlink():
        if link.exists():
            raise PackageError(
                f"{path} was copied without its links: {LINK} must be a symbolic link.",
                "Copy it with `cp -a` or `rsync -a`.",
            )
        raise PackageError(f"{path} is not an Inlay package.", "Make one with `inlay build MODEL -o DIR`.")
    folder, _, name = os.readlink(link).partition("/")
    if folder != VERSIONS or not _HASH.fullmatch(name):
        raise PackageError(f"{path} is damaged: {LINK} does not point to one of its versions.", _REMEDY)
    found = path / VERSIONS / name
    if found.is_symlink() or not found.is_dir():
        raise PackageError(f"{path} is incomplete: version {name[:12]} is missing.", _REMEDY)
    return found


def is_package(path: Path) -> bool:
    """Whether a path is a package, complete or not."""
    return (path / LINK).is_symlink()


def check_free(path: Path) -> None:
    """Raise an error if a folder contains anything but a package."""
    versions = path / VERSIONS
    if versions.is_dir() and not versions.is_symlink() and all(map(_is_version, versions.iterdir())):
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not an Inlay package.", "Choose another folder, or empty this one.")


@contextmanager
def stage_version(path: Path) -> Iterator[Path]:
    """Yield a folder to write a new version into. It is removed afterwards unless it was published."""
    check_free(path)
    (path / VERSIONS).mkdir(parents=True, exist_ok=True)
    with lock_folder(path / VERSIONS):
        (path / f".{LINK}").unlink(missing_ok=True)
    with stage_folder(path / VERSIONS, STAGING) as folder:
        folder.chmod(0o755)
        yield folder


def link_files(names: Iterable[str], version: Path, staging: Path) -> None:
    """Add files of a version to a new one as hard links, or as copies if the disk does not support links."""
    for name in names:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(version / name, target)
        except OSError:
            shutil.copyfile(version / name, target)


def publish(path: Path, folder: Path, text: str) -> Path:
    """Publish a staged folder, with this manifest, as the current version of the package."""
    (folder / manifests.NAME).write_bytes(text.encode())
    for file in sorted(folder.rglob("*")):
        sync(file)
    sync(folder)
    home = path / VERSIONS / manifests.version_hash(text.encode())
    with lock_folder(path / VERSIONS):
        # An identical version stays in place: replacing it would leave a moment without a package.
        if not (home.is_dir() and integrity.is_intact(home)):
            shutil.rmtree(home, ignore_errors=True)
            folder.rename(home)
        sync(home.parent)
        link = path / f".{LINK}"
        link.unlink(missing_ok=True)
        link.symlink_to(f"{VERSIONS}/{home.name}")
        link.rename(path / LINK)
        sync(path)
        sync(path.absolute().parent)
        for other in (path / VERSIONS).iterdir():
            if other != home and _HASH.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
    return home


def _is_version(path: Path) -> bool:
    return bool(_HASH.fullmatch(path.name)) or path.name.startswith(STAGING)
