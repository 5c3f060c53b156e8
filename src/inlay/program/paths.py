"""Qualified names as Python: `model.layers.3.mlp.weight` is `model.layers[3].mlp.weight`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.program.bindings import Binding


def attribute_path(parts: Sequence[str]) -> str:
    """
    >>> attribute_path(["layers", "3", "mlp"])
    '.layers[3].mlp'
    """
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def path_text(root: str, row: Binding) -> str:
    """A binding's target as an attribute of `root`."""
    return root + attribute_path(row.target.split("."))


@dataclass(frozen=True)
class Owner:
    """The module that holds all weights of one occurrence of a block."""

    parts: tuple[str, ...]
    root: str = "model"

    @property
    def text(self) -> str:
        """The module as an attribute of the root."""
        return self.root + attribute_path(self.parts)

    @property
    def base(self) -> str:
        """The list the module stands in, when it stands in one."""
        return self.root + attribute_path(self.parts[:-1]) if self.parts[-1].isdigit() else ""

    @property
    def number(self) -> int:
        """Its place in that list."""
        return int(self.parts[-1])

    def inside(self, name: str, row: Binding) -> str:
        """A weight of this module, relative to it."""
        return name + attribute_path(row.target.split(".")[len(self.parts) :])


def common_owner(rows: Sequence[Sequence[Binding]], root: str = "model") -> list[Owner]:
    """For each occurrence the deepest module that holds all its weights; empty when they have nothing in common.

    All occurrences must use the same names inside their module, else a block could not name its weights.
    """
    if not rows or not rows[0]:
        return []
    owners = [Owner(_shared_parts([row.target.split(".")[:-1] for row in each]), root) for each in rows]
    insides = {tuple(owner.inside("w", row) for row in each) for owner, each in zip(owners, rows, strict=True)}
    distinct = len({owner.parts for owner in owners}) == len(owners)
    return owners if len(insides) == 1 and distinct and all(owner.parts for owner in owners) else []


def _shared_parts(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return tuple(shared)
