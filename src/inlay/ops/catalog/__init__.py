"""The catalog of kernels that exist: in torch, in Inlay, in installed packages, and known elsewhere.

Nothing in it is called. It answers one question: who computes this already?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.ops.catalog.entry import Entry
from inlay.ops.catalog.installed import INSTALLED
from inlay.ops.catalog.registered import TORCH, operators
from inlay.ops.catalog.upstream import UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENTRIES", "Entry", "lookup"]

ENTRIES = (*INSTALLED, *UPSTREAM)


def lookup(computes: Sequence[str], dtype: str = "") -> list[Entry]:
    """Kernels for the first of these names that has any, those that can be called here first.

    `computes` goes from the particular to the general. Kernels that do not work in `dtype` come last: they exist, and
    somebody may change the dtype. Operators of installed packages count when they are called what is looked for.

    >>> [entry.source for entry in lookup(["rms_norm"], "float32")][:2]
    ['inlay', 'vllm']
    >>> lookup(["no_such_thing"])
    []
    """
    for name in computes:
        known = [entry for entry in ENTRIES if name in entry.computes]
        names = {entry.operator for entry in known}
        found = [*known, *(each for each in _of_packages(name) if each.operator not in names)]
        if found:
            return sorted(found, key=lambda entry: not entry.usable(dtype))
    return []


def _of_packages(name: str) -> list[Entry]:
    """Operators of this name that packages have registered."""
    return [
        Entry(f"{space}::{name}", space, (name,), f"torch.ops.{space}.{name}", operator=f"{space}::{name}")
        for space, names in sorted(operators().items())
        if space not in TORCH and name in names
    ]
