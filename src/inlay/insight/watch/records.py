"""What was observed of one pass on one graph."""

from __future__ import annotations

import functools
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from inlay import machine
from inlay.insight.findings import Finding  # noqa: TC001

MAX_RECORDS = 20_000
"""How many records of one watch, or of one process, are kept."""


@dataclass(frozen=True)
class PassRecord:
    """One call of a pass: its matches by pattern and its near misses; or what a function changed in a graph."""

    name: str
    """Name of the pass."""
    compile_id: str
    """torch's number of the compilation, such as `0/0`; empty outside of torch.compile."""
    num_patterns: int
    """0 for a function."""
    matches: int
    patterns: Mapping[str, int] = field(default_factory=dict)
    """Pattern → number of matches, for those that matched."""
    places: tuple[str, ...] = ()
    """Source line of each match."""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    """Why the near misses are incomplete."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """What a function did with calls, such as `removed aten.clone.default` → how many."""
    left: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operator → its first calls in the graph after a function: node, arguments, source line."""
    num_left: Mapping[str, int] = field(default_factory=dict)
    """Operator → number of its calls in the graph after a function."""
    dropped: int = 0
    """How many later records were not kept."""
    torch: str = field(default_factory=functools.cache(functools.partial(machine.package_version, "torch")))
    """The version of torch."""

    @property
    def near_misses(self) -> tuple[Finding, ...]:
        """The findings without the trivial ones."""
        return tuple(each for each in self.findings if not each.is_trivial)

    @property
    def count(self) -> int:
        """The matches of a pass, or the calls that a function changed."""
        return self.matches or sum(self.changes.values())

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data."""
        return {**vars(self), "findings": [finding.to_json() for finding in self.findings]}


@functools.cache
def _adapter() -> TypeAdapter[PassRecord]:
    return TypeAdapter(PassRecord)


def parse_record(line: str) -> PassRecord:
    """Return a record from JSON; one that has another form is a ValueError."""
    return _adapter().validate_json(line, strict=True)
