"""Running programs: compiled by an engine, below `torch.compile`, or as a package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inlay.compile.load import LoadedPackage, load_package
    from inlay.compile.program import CompiledProgram, compile_program
    from inlay.compile.torch_compile import Compiled, inlay

__all__ = ["Compiled", "CompiledProgram", "LoadedPackage", "compile_program", "inlay", "load_package"]

_HOMES = {
    "Compiled": "torch_compile",
    "CompiledProgram": "program",
    "LoadedPackage": "load",
    "compile_program": "program",
    "inlay": "torch_compile",
    "load_package": "load",
}


def __getattr__(name: str) -> Any:
    """Import on first use: loading a package must not pay for compilers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'inlay.compile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"inlay.compile.{_HOMES[name]}"), name)
