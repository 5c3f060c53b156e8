"""Run transforms and find the near misses of each: why it did not match."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from inlay.insight.findings import Finding, fold_misses, layer_of
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes
from inlay.rewrite import Reason, Refusal, Rule
from inlay.rewrite.near_misses import find_near_misses
from inlay.transforms import run
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms import Transform, TransformRecord


@dataclass(frozen=True)
class Explanation:
    """The matches of one transform and its near misses, closest first."""

    key: str
    status: str
    sites: int
    findings: tuple[Finding, ...] = ()
    skip_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        return {
            "transform": self.key,
            "status": self.status,
            "skip_reason": self.skip_reason,
            "matches": self.sites,
            "findings": [finding.to_json() for finding in self.findings],
        }


def explain(program: Program, steps: Sequence[TransformStep], key: str = "") -> list[Explanation]:
    """Run the steps without contracts and explain each of them, or only the step named `key`.

    >>> import torch
    >>> from inlay.config import resolve_config
    >>> from inlay.testing import program_of
    >>> from inlay.transforms import configure
    >>> def gated(x):
    ...     return torch.nn.functional.silu(x).neg() * (x + 1)
    >>> steps = configure(resolve_config())
    >>> explanations = explain(program_of(gated, [torch.ones(3)]), steps, "match_swiglu")
    >>> explanations[0].findings[0].reason
    'extra node: neg (aten.neg.default) stands in between'
    """
    asking = _Explainer(key)
    run(program, [drop_contract(step) for step in steps], [asking])
    return asking.explanations


def drop_contract(step: TransformStep) -> TransformStep:
    """Return the step without its contract, so that missing matches are reported instead of raised."""
    made = copy(step.transform)
    made.options = made.options.model_copy(update={"expect": "any", "reason": "explained"})
    return TransformStep(step.key, made)


@dataclass
class _Explainer:
    """An instrument that collects an explanation of each transform."""

    key: str
    explanations: list[Explanation] = field(default_factory=list)
    _before: Program | None = None

    def before(self, transform: Transform, program: Program) -> None:
        self._before = program

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        if self.key and record.key != self.key:
            return
        assert self._before is not None
        findings = collect_findings(transform, self._before, record) if record.was_applied else []
        # Trivial findings last, otherwise closest first.
        findings.sort(key=lambda finding: finding.is_trivial)
        explained = Explanation(record.key, record.status, record.sites, tuple(findings), record.skip_reason)
        self.explanations.append(explained)


def collect_findings(step: Transform, before: Program, record: TransformRecord) -> list[Finding]:
    """Return why a transform did not match elsewhere in the program that it ran on, closest first."""
    blocks = cache(lambda: fold(before).layer_of)

    def layer(node: fx.Node) -> int | None:
        return layer_of(node, blocks)

    if isinstance(step, Rule):
        search = find_near_misses(before, step)
        return fold_misses(step.name, search.misses, [site.outputs[0] for site in search.sites], layer)
    nodes = {node.name: node for node in all_nodes(before.graph)}
    misses = [
        Refusal(
            *(nodes[remark.nodes[0]], nodes[remark.nodes[-1]], *Reason.parse(remark.reason)),
            *(remark.matched_nodes, remark.pattern_nodes),
        )
        for remark in record.misses
        if remark.nodes and remark.nodes[0] in nodes and remark.nodes[-1] in nodes
    ]
    sites = [nodes[name] for name in record.matched_roots if name in nodes]
    found = fold_misses(step.name, misses, sites, layer)
    return sorted(found, key=lambda finding: (not finding.sites, -finding.matched / max(finding.of, 1)))
