"""An instrument for reports: records the diff, sites, misses and contract of every transform."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from inlay.errors import ContractError
from inlay.insight.explanation import collect_findings
from inlay.insight.findings import format_layers, layer_of
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes
from inlay.program.text.diff import diff
from inlay.rewrite.differences import code_location
from inlay.transforms import TransformResult
from inlay.transforms.pass_manager import check_contract, expected_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from inlay.insight.report.line_table import LineTable
    from inlay.program.program import Program
    from inlay.transforms import Transform, TransformRecord
    from inlay.transforms.pass_manager import TransformStep

_NAMES = 400
"""Maximum number of node names stored per group of sites; the rest are only counted."""


@dataclass
class TransformRecorder:
    """Records the report data of each transform. Checks contracts itself, so that a broken one is shown, not raised."""

    steps: Sequence[TransformStep]
    lines: LineTable
    on_step: Callable[[str], None] = lambda step: None
    transforms: list[dict[str, Any]] = field(default_factory=list)
    _before: Program | None = None

    def before(self, transform: Transform, program: Program) -> None:
        """Store the program before the transform."""
        self._before = program

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Record the result of the transform."""
        assert self._before is not None
        self.on_step(f"transforming ({record.key})")
        asked = self.steps[len(self.transforms)]
        made = describe_transform(transform, record)
        if record.was_applied:
            made["contract"] = contract_status(asked, self._before, record)
            made["places"] = _group_sites(self._before, record)
            findings = sorted(collect_findings(transform, self._before, record), key=lambda each: each.is_trivial)
            made["misses"] = [_summarize_finding(each.to_json()) for each in findings]
        if record.sites:
            made["diff"] = compare_programs(self._before, program, self.lines)
        self.transforms.append(made)


def describe_transform(step: type[Transform] | Transform, record: TransformRecord) -> dict[str, Any]:
    """Return the data of a record and of its transform."""
    return {
        "key": record.key,
        "stage": record.stage,
        "status": record.status,
        "skip_reason": record.skip_reason,
        "summary": step.summary(),
        "numerics": step.numerics.value,
        "sites": record.sites,
        "nodes": list(record.nodes),
        "seconds": round(record.seconds, 4),
        "contract": None,
        "places": [],
        "misses": [],
        "notes": [remark.reason for remark in record.notes],
        "diff": None,
    }


def compare_programs(left: Program, right: Program, lines: LineTable) -> dict[str, Any]:
    """Return the side-by-side diff of two programs, folded in the same way."""
    found = diff(left, right)
    return {
        "equal": found.is_equal,
        "rows": lines.rows(found.rows),
        "nodes": list(found.node_counts),
        "operators": dict(found.operator_deltas),
        "bindings": list(found.binding_changes),
    }


def contract_status(step: TransformStep, before: Program, record: TransformRecord) -> dict[str, Any]:
    """Return the contract of a step, and what is broken about it."""
    options = step.transform.options
    broken, wanted = "", None
    try:
        check_contract(step, before, TransformResult(before, record.sites))
        if options.expect not in (None, "any"):
            wanted = expected_count(options.expect, before)
    except ContractError as error:
        broken = error.problem
    return {"expect": options.expect, "wanted": wanted, "reason": options.reason, "broken": broken}


def _group_sites(before: Program, record: TransformRecord) -> list[dict[str, Any]]:
    """Group the sites of a transform by code location, over all layers."""
    nodes = {node.name: node for node in all_nodes(before.graph)}
    blocks = cache(lambda: fold(before).layer_of)
    groups: dict[tuple[str, str], list[fx.Node]] = {}
    for name in record.matched_roots:
        if name in nodes:
            groups.setdefault(code_location(nodes[name]), []).append(nodes[name])
    found = []
    for (module, source), group in groups.items():
        layers = [number for node in group if (number := layer_of(node, blocks)) is not None]
        found.append(
            {
                "module": module,
                "source": source,
                "count": len(group),
                "layers": format_layers(layers) if layers else "",
                "names": [node.name for node in group[:_NAMES]],
            }
        )
    return found


def _summarize_finding(finding: dict[str, Any]) -> dict[str, Any]:
    """Return the report data of a finding."""
    kept = ("kind", "reason", "source", "matched", "of", "suggestion", "trivial")
    made = {name: finding[name] for name in kept}
    made["count"] = len(finding["roots"])
    made["layers"] = format_layers(finding["layers"]) if finding["layers"] else ""
    made["names"] = list(finding["roots"][:_NAMES])
    return made
