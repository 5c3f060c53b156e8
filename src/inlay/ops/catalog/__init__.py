"""The catalog of existing kernels: in torch, in Inlay, in installed packages and in other projects.

It is only for lookup; none of its kernels is called through it.
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
    """Return kernels for any of these operation names, which are ordered from specific to general.

    Kernels that can be called here in `dtype` come first, then in the order of names. Kernels of other dtypes and
    kernels that are not installed are included, and operators of installed packages that have one of the names.

    >>> lookup(["rms_norm"], "float32")[0].source
    'inlay'
    >>> lookup(["no_such_thing"])
    []
    """
    found = [entry for name in operations for entry in (*_find_cataloged(name), *_find_registered(name))]
    return sorted(dict.fromkeys(found), key=lambda entry: not entry.is_usable(dtype))


def _find_cataloged(name: str) -> list[KernelEntry]:
    return [entry for entry in KERNELS if name in entry.operations]


def _find_registered(name: str) -> list[KernelEntry]:
    """Return operators of this name that packages registered and that have no entry."""
    told = {entry.operator for entry in KERNELS}
    return [
        KernelEntry(f"{space}::{name}", space, (name,), f"torch.ops.{space}.{name}", operator=f"{space}::{name}")
        for space, names in sorted(operators_by_namespace().items())
        if space not in TORCH_NAMESPACES and name in names and f"{space}::{name}" not in told
    ]
