"""An observer for reports: of every transform the difference it made, its sites, its misses, its contract."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from inlay.errors import ContractError
from inlay.insight.findings import layer_of, layers_text
from inlay.insight.near_misses import findings_of
from inlay.program.diff import diff
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes
from inlay.rewrite.differences import role
from inlay.transforms import Applied
from inlay.transforms.pipeline import check_contract, count_expected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from inlay.insight.report.lines import Lines
    from inlay.program.program import Program
    from inlay.transforms import Record, Transform
    from inlay.transforms.pipeline import Step

_NAMES = 400
"""Names of one group of sites that are kept; the rest is counted."""


@dataclass
class Watch:
    """Keeps what a report says of each transform. Contracts are judged here, so that a broken one is shown."""

    steps: Sequence[Step]
    lines: Lines
    on_step: Callable[[str], None] = lambda step: None
    transforms: list[dict[str, Any]] = field(default_factory=list)
    _before: Program | None = None

    def before(self, step: Transform, program: Program) -> None:
        """Remember what goes in."""
        self._before = program

    def after(self, step: Transform, program: Program, record: Record) -> None:
        """Describe what came out."""
        assert self._before is not None
        self.on_step(f"transforming ({record.key})")
        asked = self.steps[len(self.transforms)]
        made = described(step, record)
        if record.status == "ran":
            made["contract"] = _contract(asked, self._before, record)
            made["places"] = _places(self._before, record)
            made["misses"] = [_miss(each.to_json()) for each in findings_of(step, self._before, record)]
        if record.status == "ran" and record.sites:
            made["diff"] = compared(self._before, program, self.lines)
        self.transforms.append(made)


def described(step: type[Transform] | Transform, record: Record) -> dict[str, Any]:
    """What a record says, and what the transform says of itself."""
    return {
        "key": record.key,
        "stage": record.stage,
        "status": record.status,
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


def compared(left: Program, right: Program, lines: Lines) -> dict[str, Any]:
    """Two programs side by side, folded alike."""
    found = diff(left, right)
    return {
        "equal": found.equal,
        "rows": lines.rows(found.rows),
        "nodes": list(found.nodes),
        "operators": dict(found.operators),
        "bindings": list(found.bindings),
    }


def _contract(step: Step, before: Program, record: Record) -> dict[str, Any]:
    options = step.transform.options
    broken, wanted = "", None
    try:
        check_contract(step, before, Applied(before, record.sites))
        if options.expect not in (None, "any"):
            wanted = count_expected(options.expect, before)
    except ContractError as error:
        broken = error.problem
    return {"expect": options.expect, "wanted": wanted, "reason": options.reason, "broken": broken}


def _places(before: Program, record: Record) -> list[dict[str, Any]]:
    """The sites of a transform, those at the same place of several layers together."""
    nodes = {node.name: node for node in all_nodes(before.graph)}
    blocks = cache(lambda: fold(before).layer_of)
    groups: dict[tuple[str, str], list[fx.Node]] = {}
    for name in record.places:
        if name in nodes:
            groups.setdefault(role(nodes[name]), []).append(nodes[name])
    found = []
    for (module, source), group in groups.items():
        layers = [number for node in group if (number := layer_of(node, blocks)) is not None]
        found.append(
            {
                "module": module,
                "source": source,
                "count": len(group),
                "layers": layers_text(layers) if layers else "",
                "names": [node.name for node in group[:_NAMES]],
            }
        )
    return found


def _miss(finding: dict[str, Any]) -> dict[str, Any]:
    """What a report needs of a finding."""
    kept = ("kind", "reason", "source", "matched", "of", "suggestion")
    made = {name: finding[name] for name in kept}
    made["count"] = len(finding["places"])
    made["layers"] = layers_text(finding["layers"]) if finding["layers"] else ""
    made["names"] = list(finding["places"][:_NAMES])
    return made
