"""What all workers of a test run share: the cache of compiled kernels, and folders that are slow to make."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_CACHE = "INLAY_TESTS_CACHE"


def own_cache(folder: Path) -> str:
    """A cache of builds that is empty; kernels and traced patterns, which take a while, are those all share."""
    from inlay import machine

    (folder / "inlay").mkdir(parents=True)
    for name in ("kernels", "derived"):
        shared = (machine.cache_folder() / name).resolve()
        shared.mkdir(parents=True, exist_ok=True)
        (folder / "inlay" / name).symlink_to(shared)
    return str(folder)


def once_a_run(name: str, make: Callable[[Path], object]) -> Path:
    """A folder for all workers of this run, filled by the first that asks for it while the others wait.

    Read it only.
    """
    home = Path(os.environ[OWN_CACHE]).parent / "shared"
    home.mkdir(exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / name).exists():
            shutil.rmtree(home / f"{name}.begun", ignore_errors=True)
            (home / f"{name}.begun").mkdir()
            make(home / f"{name}.begun")
            (home / f"{name}.begun").rename(home / name)
    return home / name
