"""Tensors in safetensors files: indexed by name, memory-mapped, loaded only when they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError, one_line

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor of a safetensors file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype_name: str = ""
    """Dtype as safetensors names it, such as `BF16` or `F8_E4M3`."""

    @property
    def origin(self) -> str:
        return f"{self.file.name}#{self.key}"

    def read(self) -> torch.Tensor:
        try:
            tensor: torch.Tensor = _open(self.file).get_tensor(self.key)
        except Exception as error:
            raise _read_error(self.file, error) from error
        return tensor


def index_folder(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return every tensor of the safetensors files in `folder`; empty if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    listed = folder / "model.safetensors.index.json"
    if listed.exists():
        files = _files_of_index(listed)
    elif (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    found: dict[str, SafetensorsTensor] = {}
    for file in files:
        try:
            opened = _open(file)
            for key in opened.keys():  # noqa: SIM118 - safe_open is not a mapping
                part = opened.get_slice(key)
                found[key] = SafetensorsTensor(file, key, tuple(part.get_shape()), str(part.get_dtype()))
        except ModelError:
            raise
        except Exception as error:
            raise _read_error(file, error) from error
    return found


def _files_of_index(listed: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(listed.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ModelError(
            f"{listed.name} is not an index of safetensors files: {one_line(error)}.", "Download it again."
        ) from error
    files = [listed.parent / str(name) for name in names]
    for file in files:
        if file.resolve().parent != listed.parent.resolve() and not file.is_symlink():
            raise ModelError(f"{listed.name} points outside its folder, at {file.name}.", "Do not use this checkpoint.")
        if not file.exists():
            raise ModelError(f"{file.name} is listed in {listed.name} but missing.", "Download the model again.")
    return files


@lru_cache(maxsize=64)
def _open_version(file: Path, stamp: tuple[int, int]) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def _open(file: Path) -> Any:
    try:
        stat = file.stat()
        return _open_version(file, (stat.st_mtime_ns, stat.st_size))
    except Exception as error:
        raise _read_error(file, error) from error


def _read_error(file: Path, error: BaseException) -> ModelError:
    return ModelError(
        f"{file.name} is not a readable safetensors file: {one_line(error)}.", "Download it again or check the disk."
    )
