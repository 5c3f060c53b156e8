"""Why did a transform not match here? Runs the transforms and looks for the near misses of each."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from inlay.insight.findings import Finding, fold_misses, layer_of
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes
from inlay.rewrite import Miss, Rule
from inlay.rewrite.near_misses import near_misses
from inlay.transforms import run
from inlay.transforms.pipeline import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms import Record, Transform


@dataclass(frozen=True)
class Explained:
    """What one transform matched, and what it almost matched, best first."""

    key: str
    status: str
    sites: int
    findings: tuple[Finding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "transform": self.key,
            "status": self.status,
            "matches": self.sites,
            "findings": [finding.to_json() for finding in self.findings],
        }


def explain(program: Program, steps: Sequence[Step], only: str = "") -> list[Explained]:
    """Run the steps, contracts off, and explain each of them; or the one called `only`.

    >>> import torch
    >>> from inlay.config import resolve
    >>> from inlay.testing import program_of
    >>> from inlay.transforms import configure
    >>> def gated(x):
    ...     return torch.nn.functional.silu(x).neg() * (x + 1)
    >>> steps = configure(resolve())
    >>> explained = explain(program_of(gated, [torch.ones(3)]), steps, "match_swiglu")
    >>> explained[0].findings[0].reason
    'extra node: neg (aten.neg.default) stands in between'
    """
    asking = _Asking(only)
    run(program, [unbound(step) for step in steps], [asking])
    return asking.explained


def unbound(step: Step) -> Step:
    """The same step without a contract: what would break it is what is asked about."""
    made = copy(step.transform)
    made.options = made.options.model_copy(update={"expect": "any", "reason": "explained"})
    return Step(step.key, made)


@dataclass
class _Asking:
    """An instrument that asks each transform why."""

    only: str
    explained: list[Explained] = field(default_factory=list)
    _before: Program | None = None

    def before(self, step: Transform, program: Program) -> None:
        self._before = program

    def after(self, step: Transform, program: Program, record: Record) -> None:
        if self.only and record.key != self.only:
            return
        assert self._before is not None
        findings = findings_of(step, self._before, record) if record.status == "ran" else []
        self.explained.append(Explained(record.key, record.status, record.sites, tuple(findings)))


def findings_of(step: Transform, before: Program, record: Record) -> list[Finding]:
    """What keeps a transform that ran from matching elsewhere in the program it ran on, best first."""
    blocks = cache(lambda: fold(before).layer_of)

    def layer(node: fx.Node) -> int | None:
        return layer_of(node, blocks)

    if isinstance(step, Rule):
        search = near_misses(before, step)
        return fold_misses(step.name, search.misses, [site.outputs[0] for site in search.sites], layer)
    nodes = {node.name: node for node in all_nodes(before.graph)}
    misses = [
        Miss(nodes[remark.nodes[0]], nodes[remark.nodes[-1]], remark.reason, remark.matched, remark.of)
        for remark in record.misses
        if remark.nodes and remark.nodes[0] in nodes and remark.nodes[-1] in nodes
    ]
    sites = [nodes[name] for name in record.places if name in nodes]
    found = fold_misses(step.name, misses, sites, layer)
    return sorted(found, key=lambda finding: (not finding.sites, -finding.matched / max(finding.of, 1)))
