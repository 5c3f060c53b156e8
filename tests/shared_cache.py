"""What tests share: the cache of compiled kernels, folders that are slow to make, and exported models."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.frontend.source_model import SourceModel

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


_EXPORTS: dict[Any, Any] = {}


def export_once(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_export` of the frontend, which exports a stock model once a worker and configuration.

    An export depends on the configuration and the code of the model, not on its weights, which are references.
    """

    def shared(model: SourceModel, on_step: Callable[[str], None]) -> Any:
        config = getattr(model.example.module, "config", None)
        is_frontend = "tests/frontend/" in os.environ.get("PYTEST_CURRENT_TEST", "")
        if is_frontend or config is None or model.kind == "module" or model.exported is not None:
            return export(model, on_step)
        code = frozenset((type(each), type(each).forward.__code__) for each in model.example.module.modules())
        types = sorted({str(value.dtype) for value in model.example.module.state_dict().values()})
        sizes = str((model.example.args, sorted(model.example.kwargs.items()), model.example.axes, model.max_sizes))
        key = config.to_json_string(use_diff=False), config._attn_implementation, code, str(types), sizes
        if key not in _EXPORTS:
            _EXPORTS[key] = export(model, on_step)
        else:
            on_step("exporting")
            on_step("making it functional")
        return _EXPORTS[key]

    return shared
