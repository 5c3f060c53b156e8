"""Findings: near misses grouped over layers, each with one sentence and one suggestion."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from inlay.program.graphs import MODULE, target_text
from inlay.rewrite.differences import code_location
from inlay.rewrite.near_misses import NearMiss
from inlay.rewrite.pattern_search import is_trivial
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import fx

    from inlay.rewrite import Refusal
    from inlay.rewrite.differences import CodeLocation

SUGGESTIONS = {
    Reason.ANOTHER_CONSUMER: "Recompute the value for its other consumer, or let that consumer read the result.",
    Reason.DTYPE: "Compute in the dtype of the other layers, or move the cast out of the pattern.",
    Reason.SHAPE: "Give the operand the shape it has in the other layers; reshape outside the pattern.",
    Reason.AXIS: "If the axis is intended, add a pattern for it; otherwise use the expected axis.",
    Reason.CONSTANT: "If the value is intended, add a pattern for it; otherwise use the expected value.",
    Reason.MISSING: "If this form is intended, add a pattern for it.",
    Reason.EXTRA: "Move the extra call before or after the pattern, or add a pattern with it.",
    Reason.MUTATION: "Move the write before or after the pattern.",
    Reason.OVERLAP: "Nothing to do: the nodes are part of another site.",
    Reason.REPLACEMENT: "Fix the replacement of the rule, or the fake kernel of the operator that it calls.",
    Reason.REFUSED: "",
}
_PATTERN_REASONS = (Reason.MISSING, Reason.EXTRA, Reason.AXIS, Reason.CONSTANT)
"""The suggestions for these reasons apply only to transforms with patterns."""


@dataclass(frozen=True)
class Finding:
    """One reason why a rule does not match, with all layers where it applies."""

    transform: str
    kind: Reason
    reason: str
    node: str
    """The node that differs, at the first site."""
    roots: tuple[str, ...]
    """The node where the output of the pattern would be, one per site."""
    layers: tuple[int, ...]
    source: str
    matched: int
    of: int
    sites: int
    """Number of corresponding sites in other layers that matched."""
    suggestion: str

    @property
    def is_trivial(self) -> bool:
        """Whether so little matched, with no site at this code location, that it is no near miss."""
        return not self.sites and self.matched < self.of and is_trivial(self.matched, self.of)

    @property
    def text(self) -> str:
        """The finding as one sentence."""
        total = self.sites + len(self.roots)
        share = f"{self.sites} of {total} matched; " if self.sites else ""
        alone = f"{self.roots[0]}: " if len(self.roots) == 1 else ""
        where = f"{format_layers(self.layers)}: " if self.layers else alone
        source = f" ({self.source})" if self.source else ""
        return f"{share}{where}{self.matched} of {self.of} nodes: {self.reason}{source}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
        return asdict(self) | {"kind": self.kind.value, "trivial": self.is_trivial, "text": self.text}


def format_layers(numbers: Sequence[int]) -> str:
    """Format layer numbers with ranges.

    >>> format_layers([3]), format_layers([3, 17]), format_layers([0, 1, 2, 5])
    ('layer 3', 'layers 3 and 17', 'layers 0–2 and 5')
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"layer{'s' if len(set(numbers)) > 1 else ''} {text}"


def layer_of(node: fx.Node, folds: Callable[[], dict[fx.Node, int]]) -> int | None:
    """Return the layer number of a node, from its module path or else from the repeated blocks."""
    number = re.search(r"\.(\d+)(?=\.|$)", str(node.meta.get(MODULE, "")))
    return int(number[1]) if number else folds().get(node)


def fold_misses(
    transform: str,
    misses: Iterable[Refusal],
    sites: Iterable[CodeLocation],
    layer: Callable[[fx.Node], int | None],
) -> list[Finding]:
    """Group misses into findings, closest first; the same reason at the same code location is one finding.

    `sites` are the code locations of the outputs of the sites that matched.
    """
    matched = Counter(sites)
    groups: dict[Any, list[Refusal]] = {}
    for miss in misses:
        key = (
            miss.kind,
            code_location(miss.root),
            code_location(miss.node),
            target_text(miss.node.target),
            miss.matched,
            miss.pattern_nodes,
        )
        groups.setdefault(key, []).append(miss)
    findings = []
    for (kind, where, *_), group in groups.items():
        first = group[0]
        numbers = {layer(each.root) for each in group}
        others = len(first.differences) - 1 if isinstance(first, NearMiss) else 0
        findings.append(
            Finding(
                transform=transform,
                kind=kind,
                reason=first.reason + (f", and {others} more" if others > 0 else ""),
                node=first.node.name,
                roots=tuple(each.root.name for each in group),
                layers=tuple(sorted(number for number in numbers if number is not None)),
                source=first.source,
                matched=first.matched,
                of=first.pattern_nodes,
                sites=matched[where],
                suggestion="" if kind in _PATTERN_REASONS and not isinstance(first, NearMiss) else SUGGESTIONS[kind],
            )
        )
    return findings
