"""The derived cache: values that follow from the source files of Inlay and the version of torch, kept between runs.

Values are JSON, in one folder for each source key. A file that is damaged, or cannot be read or written, is ignored:
its value is computed again. Nothing is cached while a source file is newer than the process, which may run older code.
Only the commands of `inlay` use the cache: another program may have replaced functions of Inlay or torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from inlay import machine

_MAX_KEYS, _MAX_VALUES = 4, 500
"""Number of source keys, and of values of each, that are kept: the most recently written."""
_PACKAGE = Path(__file__).parent
_is_enabled = False


def enable() -> None:
    """Use the cache in this process."""
    global _is_enabled
    _is_enabled = True


def read(name: str) -> Any:
    """Return the value of this name, or None."""
    folder = _folder()
    if folder is None:
        return None
    try:
        held = json.loads((machine.make_private_folder(folder) / f"{name}.json").read_text())
        return held["value"] if held["checksum"] == _checksum(held["value"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write(name: str, value: Any) -> None:
    """Keep a value. Readers see the old file or the new one."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError):
        machine.make_private_folder(folder)
        handle, made = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as out:
            json.dump({"checksum": _checksum(value), "value": value}, out)
        os.replace(made, folder / f"{name}.json")
        for each in _latest_first(folder)[_MAX_VALUES:]:
            each.unlink(missing_ok=True)
        for each in _latest_first(folder.parent)[_MAX_KEYS:]:
            shutil.rmtree(each, ignore_errors=True)


def clear() -> int:
    """Remove all values; return the number of bytes."""
    root = machine.cache_folder() / "derived"
    freed = sum(each.stat().st_size for each in root.rglob("*") if each.is_file())
    for each in root.iterdir() if root.is_dir() else ():
        shutil.rmtree(each, ignore_errors=True)
    return freed


def _latest_first(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)


def _folder() -> Path | None:
    key = source_key() if _is_enabled else ""
    try:
        return machine.cache_folder() / "derived" / key if key else None
    except RuntimeError:  # there is no home folder
        return None


@cache
def source_key() -> str:
    """Return the hash of Inlay's source files and of the versions of Python and torch.

    It is empty if a file was changed after this process started, or if there are no source files to read.
    """
    found = hashlib.sha256(f"{platform.python_version()} {machine.package_version('torch')}\0".encode())
    spec = importlib.util.find_spec("torch")
    try:
        files = sorted(each for each in _PACKAGE.rglob("*") if each.suffix in (".py", ".yaml"))
        if not any(each.suffix == ".py" for each in files) or any(map(machine.is_newer_than_process, files)):
            return ""
        files += [Path(spec.origin).with_name("version.py")] if spec and spec.origin else []
        for each in files:
            found.update(f"{each}\0{each.stat().st_size}\0".encode())
            found.update(each.read_bytes())
    except OSError:
        return ""
    return found.hexdigest()[:32]


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
