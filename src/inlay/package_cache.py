"""Packages that are built on demand: `inlay serve MODEL` and `inlay run MODEL` build once and start at once afterwards.

There is one package for each model, set of build options, installation of Inlay, CPU and number of threads. It is
replaced when the model's files, libraries, the compiler or its settings have changed since it was built.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay import machine
from inlay.errors import MachineError, PackageError, one_line
from inlay.package import store
from inlay.package.files import EXCLUSIVE, NON_BLOCKING, lock, lock_file, sha256, stamp, unlock
from inlay.split_files import split_parts, split_stem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KEY, _PACKAGE, _LOCK = "key.json", "package", ".lock-"


@dataclass(frozen=True)
class CachedPackage:
    """A package in the cache."""

    model: str
    folder: Path
    size: int
    last_used: float


class PackageCache:
    """A folder of packages, shared by all processes of a user."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or machine.cache_folder() / "packages"

    def ensure(
        self, model: str, options: Mapping[str, Any], on_step: Callable[[str], None] = lambda step: None
    ) -> Path:
        """Return the package of MODEL with these fields of `BuildOptions`. Build it if it is missing or outdated.

        `package.module:factory` is captured every time, because its result may depend on anything; the build cache then
        supplies the compiled code.
        """
        try:
            machine.make_private_folder(self.folder)
        except OSError as error:
            problem = f"The package cache cannot be used: {one_line(error)}."
            raise MachineError(problem, "Set XDG_CACHE_HOME to a folder of your own.") from error
        home = self.folder / _entry_name(model, options)
        if not _is_current(home, compute_key(model, options)):
            with lock_file(self.folder / f"{_LOCK}{home.name}", lambda: on_step("waiting for the same build")):
                key = compute_key(model, options)
                if not _is_current(home, key):
                    self._build(model, options, home, key, on_step)
        with suppress(OSError):
            (home / _KEY).touch()
        return home / _PACKAGE

    def entries(self) -> list[CachedPackage]:
        """Return all packages, the most recently used first. A build that died is an entry without a model."""
        found = []
        for home in self.folder.iterdir() if self.folder.is_dir() else ():
            with suppress(OSError):
                if home.is_dir():
                    size = sum(file.stat().st_size for file in home.rglob("*") if file.is_file())
                    used = max(home.stat().st_mtime, *(file.stat().st_mtime for file in home.glob(_KEY)), 0.0)
                    key = _read_key(home) or {"model": ""}
                    found.append(CachedPackage(key["model"], home / _PACKAGE, size, used))
        return sorted(found, key=lambda each: each.last_used, reverse=True)

    def clear(self, used_before: float) -> tuple[int, int]:
        """Remove packages that were last used before a point in time. Return how many, and their bytes.

        Packages that another process is building are left.
        """
        removed = [
            each for each in self.entries() if each.last_used <= used_before and self._remove(each.folder.parent)
        ]
        return len(removed), sum(each.size for each in removed)

    def _remove(self, home: Path) -> bool:
        file = self.folder / f"{_LOCK}{home.name}"
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            if not lock(handle, EXCLUSIVE | NON_BLOCKING):
                return False
            (home / _KEY).unlink(missing_ok=True)
            shutil.rmtree(home, ignore_errors=True)
            file.unlink(missing_ok=True)
            return not home.exists()
        finally:
            unlock(handle)

    def _build(
        self, model: str, options: Mapping[str, Any], home: Path, key: Mapping[str, Any], on_step: Callable[[str], None]
    ) -> None:
        from inlay.flow import BuildOptions, build

        (home / _KEY).unlink(missing_ok=True)
        if not (home / _PACKAGE / store.VERSIONS).is_dir():  # what is left of a removal that was interrupted
            shutil.rmtree(home, ignore_errors=True)
        build(_location(model), home / _PACKAGE, BuildOptions(**options), on_step=on_step)
        built = compute_key(model, options)
        is_same = built == {**key, "files": key["files"] or built["files"]}
        if is_same and not any(map(machine.is_newer_than_process, _sources())):  # otherwise the next start builds again
            staged = home / f".{_KEY}"
            staged.write_text(json.dumps(built, indent=1))
            staged.rename(home / _KEY)


def is_package(text: str) -> bool:
    """Whether a command-line argument names a package instead of a model."""
    try:
        return os.path.lexists(Path(text).expanduser() / store.LINK)
    except (OSError, RuntimeError, ValueError):  # too long a name, or the home of an unknown user
        return False


def model_name(text: str) -> str:
    """Return the name under which a model is served.

    >>> model_name("models/SmolLM2.Q4_1.gguf"), model_name("org/name@main"), model_name("package.module:factory")
    ('SmolLM2.Q4_1', 'org/name', 'package.module:factory')
    """
    path = Path(_location(text))
    if path.suffix == ".gguf":
        return split_stem(path)
    return path.name if os.path.isdir(path) else text.partition("@")[0]


def _entry_name(model: str, options: Mapping[str, Any]) -> str:
    import torch

    where = [_location(model), str(Path.cwd()) if ":" in model else "", str(Path(machine.__file__).parent)]
    what = [*where, _plain(options), machine.cpu_name(), machine.cpu_features(), torch.get_num_threads()]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model_name(model)).strip('.-')[:80]}-{digest}"


def _location(model: str) -> str:
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(model).expanduser()
        if len(split_parts(path)) > 1:  # a link to one part leads away from the others
            path = path.parent.resolve() / path.name
            return str(path) if path.exists() else model
        return str(path.resolve()) if path.exists() else model
    return model


def compute_key(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that the package depends on. `files` is None if it cannot be known without opening the model."""
    from inlay.build_cache.key import machine_factors

    return {
        "model": _location(model),
        "files": _model_files(model),
        "options": _plain(options),
        # the build reports a file that cannot be read
        "config": [sha256(Path(file)) if os.path.isfile(file) else None for file in options.get("config", ())],
        # a finished package needs no compiler, so it may be missing or another one
        "machine": {name: value for name, value in machine_factors("native").items() if name != "C++ compiler"},
        "source": _digest(Path(machine.__file__).parent, _sources()),
    }


def _sources() -> list[Path]:
    root = Path(machine.__file__).parent
    return [file for kind in ("py", "cpp", "h", "yaml") for file in root.rglob(f"*.{kind}")]


def _model_files(model: str) -> str | None:
    """Return a digest of the names and stamps of the model's files."""
    path: Path | None = Path(_location(model))
    is_file = os.path.isfile(_location(model))  # unlike Path.is_file, it accepts too long a name
    if not is_file and not os.path.isdir(_location(model)):
        from inlay.frontend.model_spec import find_snapshot

        path = None if ":" in model else find_snapshot(model)
    if path is None:
        return None
    with suppress(PermissionError):  # opening the model reports it
        if is_file:
            return _digest(path.parent, split_parts(path))
        return _digest(path, [file for file in path.rglob("*") if file.is_file()])
    return None


def _digest(root: Path, files: list[Path]) -> str:
    rows = []
    for file in sorted(files):
        with suppress(FileNotFoundError):  # a download in progress
            rows.append((file.relative_to(root).as_posix(), stamp(file)))
    return hashlib.sha256(json.dumps([str(root.resolve()), rows]).encode()).hexdigest()


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dict(options), sort_keys=True, default=str))
    return found


def _read_key(home: Path) -> dict[str, Any] | None:
    """Return the key of a complete build."""
    try:
        found: dict[str, Any] = json.loads((home / _KEY).read_bytes())
        return found if isinstance(found.get("model"), str) else None
    except (OSError, ValueError, AttributeError):
        return None


def _is_current(home: Path, key: Mapping[str, Any]) -> bool:
    """Whether the package was built from this key, is complete and can run on this machine."""
    if key["files"] is None or _read_key(home) != key:
        return False
    from inlay.package.integrity import check_package, read_version

    try:
        folder = store.locate(home / _PACKAGE)
        check_package(read_version(folder), folder)
    except (PackageError, OSError):
        return False
    return True
