"""Inlay: compiled inference packages with state updated in place, and a reason for every match and miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = ["Example", "InlayError", "LanguageModel", "Program", "Sampling", "__version__", "build", "load"]

if TYPE_CHECKING:
    from inlay.capture import Example
    from inlay.errors import InlayError
    from inlay.flow import build
    from inlay.program import Program
    from inlay.runtime import LanguageModel, Sampling, load

_HOMES = {
    "Example": "inlay.capture",
    "InlayError": "inlay.errors",
    "LanguageModel": "inlay.runtime",
    "Program": "inlay.program",
    "Sampling": "inlay.runtime",
    "build": "inlay.flow",
    "load": "inlay.runtime",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import inlay` and `inlay --help` must not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'inlay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
