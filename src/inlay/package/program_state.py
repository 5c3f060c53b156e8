"""Save, load and reset the state of packages, compiled programs, sessions and stock caches."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from inlay.errors import MachineError, UsageError, one_line, suggest
from inlay.lowering.owned_state import OwnedState
from inlay.package.files import sync
from inlay.program.bindings import tensor_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def save_state(owner: Any, path: str | Path) -> None:
    """Write the state that a package, program or session owns to a safetensors file, which is replaced as a whole."""
    state, path = _state(owner), Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            made = Path(folder, path.name)
            with state.exclusive():
                save_file({name: value.contiguous() for name, value in state.items()}, made)
            sync(made)
            os.replace(made, path)
        sync(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        problem = f"The state cannot be written to {path}: {one_line(error)}."
        raise MachineError(problem, "Choose another file.") from error


def load_state(owner: Any, path: str | Path) -> None:
    """Read the state from a file of `save_state`, in place. A file that does not fit is rejected; nothing changes."""
    state, remedy = _state(owner), "Load a file that save_state wrote for the same program with the same sizes."
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is not a state file: {one_line(error)}.", remedy) from error
    for name in sorted({*state, *found}):
        wanted, given = (
            tensor_text(values[name].dtype, values[name].shape) if name in values else "missing"
            for values in (state, found)
        )
        if wanted != given:
            raise UsageError(f"{path} does not fit: {name} is {given} in the file, and {wanted} here.", remedy)
    state.copy_from(found)


def reset_state(owner: Any, state: Mapping[str, torch.Tensor] | None = None) -> None:
    """Return a package, program, session or stock cache to its state before the first call, in place.

    The state of a program gets its initial values: those of the model's buffers, or zeros. Tensors of the caller are
    passed as `state`, by the names that calls take. The lengths of a session become 0; no row is read then. A cache of
    transformers is reset by its own method. If another thread is running a call on the state, an error is raised.
    """
    if state is not None:
        rows = {name: row.name for row in owner.bindings.state for name in (row.name, row.target.replace(".", "_"))}
        for name in state:
            if name not in rows:
                raise UsageError(f"The program has no state {name}.", suggest(name, rows))
        initial = {name: owner.initial[rows[name]] for name in state if rows[name] in owner.initial}
        OwnedState(state, {name: name for name in state}, initial).reset()
    elif hasattr(owner, "restart"):
        owner.restart()
    elif _is_stock_cache(owner):
        owner.reset()
    else:
        _state(owner).reset()


def _is_stock_cache(owner: Any) -> bool:
    module = sys.modules.get("transformers.cache_utils")  # imported by whoever created a cache
    return module is not None and isinstance(owner, module.Cache)


def _state(owner: Any) -> OwnedState:
    found = getattr(owner, "state", None)
    if not isinstance(found, OwnedState) or not found:
        remedy = "Pass a package, program or session with state, or reset_state(program, tensors) for your tensors."
        raise UsageError(f"This {type(owner).__name__} owns no state.", remedy)
    return found
