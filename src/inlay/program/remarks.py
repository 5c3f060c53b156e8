"""Remarks: what a transform did, did not do, and why. One record, many views."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class RemarkKind(StrEnum):
    """`passed`: a site was rewritten; `missed`: a place started like the pattern and differs; `refused`: it matched and
    a check said no; `analysis`: something worth knowing."""

    PASSED = "passed"
    MISSED = "missed"
    REFUSED = "refused"
    ANALYSIS = "analysis"


@dataclass(frozen=True)
class Remark:
    """One JSON line. `reason` begins with a word from a small fixed set: another consumer, dtype, constant differs, …

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
    """How many nodes of the pattern were found."""
    pattern_nodes: int = 0
    """How many nodes the pattern has."""

    def to_json(self) -> dict[str, Any]:
        """The record for machines."""
        return asdict(self)
