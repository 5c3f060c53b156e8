"""The catalog of kernels that exist: in torch, in Inlay, in installed packages, and known elsewhere.

Nothing in it is called. It answers one question: who computes this already?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.ops.catalog.entry import KernelEntry
from inlay.ops.catalog.kernels import BUNDLED_KERNELS, THIRD_PARTY_KERNELS
from inlay.ops.catalog.operator_registry import TORCH_NAMESPACES, operators_by_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KERNELS", "KernelEntry", "lookup"]

KERNELS = (*BUNDLED_KERNELS, *THIRD_PARTY_KERNELS)


def lookup(operations: Sequence[str], dtype: str = "") -> list[KernelEntry]:
    """Kernels known by any of these names, which go from the particular to the general.

    Those that can be called here in `dtype` come first, then by name. A kernel of another dtype, or that is not
    installed, exists all the same. Operators of installed packages count when they are called what is looked for.

    >>> [entry.source for entry in lookup(["rms_norm"], "float32")][:2]
    ['inlay', 'flashinfer']
    >>> lookup(["no_such_thing"])
    []
    """
    found = [entry for name in operations for entry in (*_find_cataloged(name), *_find_registered(name))]
    return sorted(dict.fromkeys(found), key=lambda entry: not entry.is_usable(dtype))


def _find_cataloged(name: str) -> list[KernelEntry]:
    return [entry for entry in KERNELS if name in entry.operations]


def _find_registered(name: str) -> list[KernelEntry]:
    """Operators of this name that packages have registered, and that no entry is about."""
    told = {entry.operator for entry in KERNELS}
    return [
        KernelEntry(f"{space}::{name}", space, (name,), f"torch.ops.{space}.{name}", operator=f"{space}::{name}")
        for space, names in sorted(operators_by_namespace().items())
        if space not in TORCH_NAMESPACES and name in names and f"{space}::{name}" not in told
    ]
