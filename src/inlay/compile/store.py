"""Where a package lies: a folder of versions and one link that says which of them it is.

DIR/current → versions/HASH, and HASH is the hash of the manifest in there, which holds the hashes of all other files.
A version is written whole and on the disk before the link is switched, so a build that dies leaves the package as it
was, or none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.compile import manifest as manifests
from inlay.errors import PackageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

LINK, VERSIONS, STAGING = "current", "versions", ".building-"
MARK = ".verified"
"""Says that the weights of this very file were hashed before; not part of the package."""


def locate(path: Path) -> Path:
    """The folder of the current version of a package."""
    link = path / LINK
    if not link.is_symlink():
        raise PackageError(f"{path} is no package.", "Make one with `inlay build MODEL -o DIR`.")
    folder = link.resolve()
    if not folder.is_dir():
        raise PackageError(f"{path} is incomplete: {folder.name[:12]} is missing.", "Copy or build it again.")
    return folder


def is_package(path: Path) -> bool:
    """Whether a path is a package, whole or not."""
    return (path / LINK).is_symlink()


def check_free(path: Path) -> None:
    """A folder with something else in it is not written to."""
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / VERSIONS).is_dir())):
        raise UsageError(f"{path} exists and is no package.", "Choose another folder, or empty it.")


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A folder to write a new version into. It is gone afterwards, unless it was published."""
    check_free(path)
    (path / VERSIONS).mkdir(parents=True, exist_ok=True)
    _sweep(path)
    folder = Path(tempfile.mkdtemp(prefix=f"{STAGING}{os.getpid()}-", dir=path / VERSIONS))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(path: Path, folder: Path, text: str) -> Path:
    """Make a staged folder, with this manifest, the package."""
    (folder / manifests.NAME).write_text(text)
    for file in sorted(folder.rglob("*")):
        _sync(file)
    _sync(folder)
    home = path / VERSIONS / manifests.identity(text)
    if home.exists():
        shutil.rmtree(home)  # the same bytes: somebody built this before
    folder.rename(home)
    _sync(home.parent)
    link = path / f".{LINK}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(f"{VERSIONS}/{home.name}")
    link.rename(path / LINK)
    _sync(path)
    for other in (path / VERSIONS).iterdir():
        if other != home and not other.name.startswith(STAGING):
            shutil.rmtree(other, ignore_errors=True)
    return home


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(path: Path) -> None:
    """Remove what builds that died have left behind."""
    for folder in (path / VERSIONS).glob(f"{STAGING}*"):
        number = folder.name.removeprefix(STAGING).partition("-")[0]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(folder, ignore_errors=True)
    for link in path.glob(f".{LINK}-*"):
        if not Path("/proc", link.name.rpartition("-")[2]).exists():
            link.unlink(missing_ok=True)
