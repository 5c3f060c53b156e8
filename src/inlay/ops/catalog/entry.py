"""What the catalog says of a kernel."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from inlay.ops.catalog.operator_registry import is_registered


@dataclass(frozen=True)
class KernelEntry:
    """A kernel that exists: what it computes, and where it was seen."""

    name: str
    source: str
    """`aten`, `onednn`, `quantized`, `inlay`, `inductor`, or the package that has it."""
    operations: tuple[str, ...]
    """What regions of a program it can stand for, by the names candidates use."""
    evidence: str
    """Path and symbol; of packages that are not installed, the repository's."""
    operator: str = ""
    """`namespace::name`, looked up when asked whether it is here."""
    package: str = ""
    """The Python package that brings it, where it is no operator."""
    dtypes: tuple[str, ...] = ()
    """Number formats it works in; none: all."""
    conditions: str = ""
    transform: str = ""
    """The transform of Inlay that puts it into a program."""

    @property
    def is_available(self) -> bool:
        """Whether it can be called in this process."""
        if self.operator:
            return is_registered(self.operator)
        return not self.package or importlib.util.find_spec(self.package) is not None

    def is_usable(self, dtype: str) -> bool:
        """Whether it can be called here on numbers of this format."""
        return self.is_available and (not self.dtypes or not dtype or dtype in self.dtypes)
