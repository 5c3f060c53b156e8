"""What was observed of one pass on one graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.insight.findings import Finding


@dataclass(frozen=True)
class PassRecord:
    """One call of a pass: its matches by pattern, and its near misses, closest first."""

    name: str
    """Name of the pass."""
    compile_id: str
    """torch's number of the compilation, such as `0/0`; empty outside of torch.compile."""
    num_patterns: int
    matches: int
    patterns: Mapping[str, int] = field(default_factory=dict)
    """Pattern → number of matches, for those that matched."""
    places: tuple[str, ...] = ()
    """Source line of each match."""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    """Why the near misses are incomplete."""

    @property
    def near_misses(self) -> tuple[Finding, ...]:
        """The findings without the trivial ones."""
        return tuple(each for each in self.findings if not each.is_trivial)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON data."""
        return {
            "pass": self.name,
            "compile_id": self.compile_id,
            "num_patterns": self.num_patterns,
            "matches": self.matches,
            "patterns": dict(self.patterns),
            "places": list(self.places),
            "findings": [finding.to_json() for finding in self.findings],
            "error": self.error,
        }
