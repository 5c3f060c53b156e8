"""Inlay: compiled inference packages with state updated in place, and a reason for every match and miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay._version import __version__

if TYPE_CHECKING:
    from inlay.api import bisect, diff, explain, measure_accuracy, verify
    from inlay.errors import InlayError
    from inlay.flow import BuildOptions, build
    from inlay.frontend import Example, capture
    from inlay.program import Program
    from inlay.runtime import LanguageModel, Sampling, load

_HOMES = {
    "BuildOptions": "inlay.flow",
    "Example": "inlay.frontend",
    "InlayError": "inlay.errors",
    "LanguageModel": "inlay.runtime",
    "Program": "inlay.program",
    "Sampling": "inlay.runtime",
    "bisect": "inlay.api",
    "build": "inlay.flow",
    "capture": "inlay.frontend",
    "diff": "inlay.api",
    "explain": "inlay.api",
    "load": "inlay.runtime",
    "measure_accuracy": "inlay.api",
    "verify": "inlay.api",
}
__all__ = [
    "BuildOptions",
    "Example",
    "InlayError",
    "LanguageModel",
    "Program",
    "Sampling",
    "__version__",
    "bisect",
    "build",
    "capture",
    "diff",
    "explain",
    "load",
    "measure_accuracy",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import inlay` and `inlay --help` do not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'inlay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
