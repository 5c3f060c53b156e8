"""Remarks: what a transform matched, missed or refused, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class RemarkKind(StrEnum):
    """The kind of a remark: `passed`: a site was rewritten; `missed`: a site almost matches the pattern; `refused`: the
    pattern matched and a check failed; `analysis`: a finding without a rewrite."""

    PASSED = "passed"
    MISSED = "missed"
    REFUSED = "refused"
    ANALYSIS = "analysis"


@dataclass(frozen=True)
class Remark:
    """One JSON line. `reason` begins with one of a fixed set of phrases: another consumer, dtype, constant differs, …

    >>> Remark(RemarkKind.MISSED, "match_rope", "match_rope", "another consumer: mul_7").to_json()["kind"].value
    'missed'
    """

    kind: RemarkKind
    transform: str
    rule: str
    reason: str = ""
    suggestion: str = ""
    nodes: tuple[str, ...] = ()
    source: str = ""
    layer: int | None = None
    matched_nodes: int = 0
    """Number of nodes of the pattern that were found."""
    pattern_nodes: int = 0
    """Number of nodes in the pattern."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)
