"""Inlay: compiled inference packages with state updated in place, and a reason for every match and miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay._version import __version__

if TYPE_CHECKING:
    from inlay.api import bisect, diff, explain, measure_accuracy, verify
    from inlay.errors import InlayError
    from inlay.flow import BuildOptions, build
    from inlay.frontend import Example, capture
    from inlay.insight.watch import watch_patterns
    from inlay.integrations.external_pass import from_replacement
    from inlay.package.program_state import load_state, reset_state, save_state
    from inlay.program import Program
    from inlay.runtime import Encoder, LanguageModel, Sampling, load, load_encoder

_HOMES = {
    "inlay.api": ("bisect", "diff", "explain", "measure_accuracy", "verify"),
    "inlay.errors": ("InlayError",),
    "inlay.flow": ("BuildOptions", "build"),
    "inlay.frontend": ("Example", "capture"),
    "inlay.insight.watch": ("watch_patterns",),
    "inlay.integrations.external_pass": ("from_replacement",),
    "inlay.package.program_state": ("load_state", "reset_state", "save_state"),
    "inlay.program": ("Program",),
    "inlay.runtime": ("Encoder", "LanguageModel", "Sampling", "load", "load_encoder"),
}
__all__ = [
    "BuildOptions",
    "Encoder",
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
    "from_replacement",
    "load",
    "load_encoder",
    "load_state",
    "measure_accuracy",
    "reset_state",
    "save_state",
    "verify",
    "watch_patterns",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import inlay` and `inlay --help` do not import torch."""
    for module, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(module), name)
    raise AttributeError(f"module 'inlay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
