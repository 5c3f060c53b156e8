"""Start watching in a process that knows nothing of Inlay: `INLAY_WATCH=FOLDER`.

`inlay watch` runs a program with this module as a startup hook, and vLLM calls `install` as a plugin. Nothing is
imported until a pattern pass runs, and nothing happens without the environment variable.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "INLAY_WATCH"
"""The environment variable that names the folder for the records."""
SUFFIX = ".watched.jsonl"
"""The end of the names of the files in it."""
_HOOKED = {
    "torch._inductor.pattern_matcher": ("PatternMatcherPass", "apply"),
    "torch.fx.passes.utils.matcher_utils": ("SubgraphMatcher", "match"),
    "torch.fx.passes.graph_transform_observer": ("GraphTransformObserver", "apply_graph_pass"),
}
_hooks: dict[Any, tuple[Any, str, Any]] = {}
"""Hook → class, name of the method, and original."""
_lock = threading.RLock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


def is_watch_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has records of watched processes."""
    try:
        return any(Path(path).glob(f"*{SUFFIX}"))
    except (OSError, ValueError):
        return False


def install() -> None:
    """Watch this process if the environment variable is set: at once, or when torch imports its matchers."""
    if not os.environ.get(VARIABLE) or any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _HOOKED:
        if name in sys.modules:
            _hook(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """Hooks the matchers of torch when they are imported."""

    def __init__(self) -> None:
        self.searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _HOOKED or name in self.searching:
            return None
        self.searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.discard(name)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _hook(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hook(module: ModuleType) -> None:
    """Replace the method of a class until the first call of any of them, which starts the watch."""
    class_name, method = _HOOKED[module.__name__]
    cls = getattr(module, class_name, None)
    original = getattr(cls, method, None)
    if original is None:
        print(f"inlay: this torch has no {class_name}.{method}, which is not watched.", file=sys.stderr)
        return

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        _start()
        # A hook that another library has wrapped stays, and what it was wrapped with calls it.
        return (original if start in _hooks else getattr(cls, method))(self, *args, **kwargs)

    setattr(cls, method, start)
    _hooks[start] = cls, method, original


def _start() -> None:
    """Remove the hooks, so that none is taken for an original, and watch. Until then, other threads wait."""
    with _lock:
        if not _hooks:
            return
        try:
            # by name: this module is below all others, so that they can use its constants
            folder: Any = importlib.import_module("inlay.insight.watch.folder")
        except Exception as error:
            folder = None
            print(f"inlay: nothing is watched: {type(error).__name__}: {error}", file=sys.stderr)
        for hook, (cls, method, original) in list(_hooks.items()):
            if vars(cls)[method] is hook:
                setattr(cls, method, original)
                _hooks.pop(hook, None)
        if folder is not None:
            folder.start_recording()
