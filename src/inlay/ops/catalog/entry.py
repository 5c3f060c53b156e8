"""Entries of the catalog."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from inlay.ops.catalog.operator_registry import is_registered


@dataclass(frozen=True)
class KernelEntry:
    """An existing kernel: what it computes, and where it is defined."""

    name: str
    source: str
    """`aten`, `onednn`, `quantized`, `inlay`, `inductor`, or the package that contains it."""
    operations: tuple[str, ...]
    """Regions of a program that it can replace, by the names that candidates use."""
    evidence: str
    """Path and symbol; for packages that are not installed, those in the repository."""
    operator: str = ""
    """`namespace::name`, looked up to check whether it is available."""
    package: str = ""
    """The Python package that contains it, if it is not an operator."""
    dtypes: tuple[str, ...] = ()
    """Supported dtypes; empty means all."""
    conditions: str = ""
    transform: str = ""
    """The Inlay transform that inserts it into a program."""

    @property
    def is_available(self) -> bool:
        """Whether it can be called in this process."""
        if self.operator:
            return is_registered(self.operator)
        return not self.package or importlib.util.find_spec(self.package) is not None

    def is_usable(self, dtype: str) -> bool:
        """Return whether it can be called in this process with this dtype."""
        return self.is_available and (not self.dtypes or not dtype or dtype in self.dtypes)
