"""Finds the source files of Python modules and of all that they import, without importing anything.

The standard library and torch are excluded. Other installed packages count by version. The package of an installed
transform is read file by file. Modules with computed names and files that code reads as data are not found.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay import machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_IGNORED_MODULES = {*sys.stdlib_module_names, "torch", "__future__"}
SITE_FOLDERS = {"site-packages", "dist-packages"}
"""Folders of installed packages."""


@dataclass
class SourceFiles:
    """Source files by readable name, with path and hash; other packages with their versions."""

    files: dict[str, tuple[Path, str]] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


def collect_sources(modules: Iterable[str], without_imports: Iterable[str] = ()) -> SourceFiles:
    """Return the files of modules and of all their imports; for `without_imports`, only the files of the modules.

    >>> sorted(collect_sources(["inlay.errors"]).files)
    ['inlay/__init__.py', 'inlay/_version.py', 'inlay/errors.py']
    """
    found, todo = SourceFiles(), list(modules)
    own = {"inlay", *(name.partition(".")[0] for name in todo)}
    seen: set[str] = set()
    for name in without_imports:
        _add(found, name, own)
    while todo:
        name = todo.pop()
        if name in seen or name.partition(".")[0] in _IGNORED_MODULES:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        todo += [parent] if parent else []
        todo += _add(found, name, own)
    return found


def source_file(name: str) -> Path | None:
    """Return the file of a module, or None if it has none."""
    file = getattr(sys.modules.get(name), "__file__", None) or getattr(_spec(name), "origin", None)
    return Path(file) if file and Path(file).is_file() else None


def _add(found: SourceFiles, name: str, own: set[str]) -> list[str]:
    """Add a module; return the modules it imports."""
    file, top = source_file(name), name.partition(".")[0]
    if file is None:
        return []
    if top not in own and not SITE_FOLDERS.isdisjoint(file.parts):
        found.packages[top] = _version(top)
        return []
    data = file.read_bytes()
    found.files[_label(name, file)] = (file, hashlib.sha256(data).hexdigest())
    return list(_find_imports(data, name, file.stem == "__init__")) if file.suffix == ".py" else []


def _label(name: str, file: Path) -> str:
    """Return the path of a module's file relative to its import folder.

    >>> _label("inlay.package", Path("/x/inlay/package/__init__.py")), _label("mine", Path("/x/mine.py"))
    ('inlay/package/__init__.py', 'mine.py')
    """
    depth = name.count(".") + (2 if file.stem == "__init__" else 1)
    return "/".join(file.parts[-depth:])


def _spec(name: str) -> Any:
    """Return the spec of a module. Unlike `importlib.util.find_spec`, this does not import parent packages."""
    loaded: Any = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    parent = name.rpartition(".")[0]
    places = _search_paths(parent) if parent else None
    if parent and not places:
        return None
    for finder in sys.meta_path:
        found = finder.find_spec(name, places) if hasattr(finder, "find_spec") else None
        if found is not None:
            return found
    return None


def _search_paths(package: str) -> Sequence[str] | None:
    """Return the folders of a package's modules; empty or None for a single-file module."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    return getattr(_spec(package), "submodule_search_locations", None)


@lru_cache(maxsize=4096)
def _find_imports(source: bytes, name: str, is_package: bool) -> tuple[str, ...]:
    """Return the modules that a file imports. A name imported from a package may be a module."""
    found: dict[str, None] = {}
    for node in _walk_runtime_code(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= dict.fromkeys(each.name for each in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(module or "", name, level, is_package)
                found |= dict.fromkeys((base, *(f"{base}.{each.name}" for each in names)))
            case ast.Call(func=called, args=[ast.Constant(value=str(text)), *_]) if _is_import_call(called):
                found[text if not text.startswith(".") else _absolute(text.lstrip("."), name, 1, is_package)] = None
    return tuple(each for each in found if each)


def _walk_runtime_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those inside `if TYPE_CHECKING`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from _walk_runtime_code(other)
        else:
            yield from _walk_runtime_code(child)


def _is_import_call(called: ast.expr) -> bool:
    return ast.unparse(called).rpartition(".")[2] in ("import_module", "__import__")


def _absolute(module: str, name: str, level: int, is_package: bool) -> str:
    """Return the absolute name of a module imported by the module `name`.

    >>> _absolute("b", "top.inner.a", 1, False), _absolute("", "top.inner", 1, True), _absolute("x", "a", 0, False)
    ('top.inner.b', 'top.inner', 'x')
    """
    if not level:
        return module
    parts = name.split(".")
    up = level - 1 if is_package else level
    return ".".join([*parts[: len(parts) - up], *([module] if module else [])])


@cache
def _version(top: str) -> str:
    """Return the version of the distribution that contains a module; their names may differ."""
    found = machine.package_version(top)
    if not found:
        names = packages_distributions().get(top, [])
        found = ", ".join(f"{name} {machine.package_version(name)}" for name in sorted(set(names)))
    return found or "unknown"
