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
    """Kernels known by any of these names, which go from the particular to the general.

    Those that can be called here in `dtype` come first, then by name. A kernel of another dtype, or that is not
    installed, exists all the same. Operators of installed packages count when they are called what is looked for.

    >>> [entry.source for entry in lookup(["rms_norm"], "float32")][:2]
    ['inlay', 'flashinfer']
    >>> lookup(["no_such_thing"])
    []
    """
    found = [entry for name in computes for entry in (*_known(name), *_of_packages(name))]
    return sorted(dict.fromkeys(found), key=lambda entry: not entry.usable(dtype))


def _known(name: str) -> list[Entry]:
    return [entry for entry in ENTRIES if name in entry.computes]


def _of_packages(name: str) -> list[Entry]:
    """Operators of this name that packages have registered, and that no entry is about."""
    told = {entry.operator for entry in ENTRIES}
    return [
        Entry(f"{space}::{name}", space, (name,), f"torch.ops.{space}.{name}", operator=f"{space}::{name}")
        for space, names in sorted(operators().items())
        if space not in TORCH and name in names and f"{space}::{name}" not in told
    ]
