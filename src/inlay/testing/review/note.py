"""The review as Markdown for a pull request, ending in the iteration note."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.ops.catalog import ENTRIES
from inlay.ops.define import DEVICES

if TYPE_CHECKING:
    from inlay.testing.review.checklist import Review


def markdown(review: Review) -> str:
    """The whole review."""
    cls = review.transform
    lines = [f"## Review of `{cls.name}`", "", cls.summary(), ""]
    for check in review.checks:
        lines.append(f"- [{'x' if check.passed else ' '}] **{check.title}**")
        lines += [f"  - {line}" for line in check.evidence]
    return "\n".join([*lines, "", *iteration_note(review), ""])


def iteration_note(review: Review) -> list[str]:
    """What a change to a fusion leaves behind for the next one."""
    cls = review.transform
    path, rationale = _path(review)
    open_risks = [check.title for check in review.checks if not check.passed]
    open_risks += [f"only the fuzzer notices that it {name}" for name in sorted(review.noticing.fuzzed)]
    sites = "; ".join(f"{each.model} {each.record.sites}" for each in review.models)
    drift = {each.verdict.change.value for each in review.models if each.verdict is not None}
    logs = "; ".join(f"matches before 0 / after {each.record.sites} ({each.model})" for each in review.models)
    tests = review.noticing
    return [
        f"Candidate: {cls.name}",
        f"Path: {path}",
        f"Rationale: {rationale}",
        f"Graph validation: {sites} sites; outputs: {', '.join(sorted(drift)) or 'not compared'}",
        f"Summary logs: {logs}",
        f"Tests: {len(tests.tests)} pass; {len(tests.breakages) - len(tests.unnoticed)} of {len(tests.breakages)} ways"
        " to break it are noticed",
        f"Open risks: {'; '.join(open_risks) or 'none found'}",
    ]


def _path(review: Review) -> tuple[str, str]:
    """By what computes the operators that came: somebody's kernel, Triton, or neither."""
    came = sorted({name for each in review.models for name, change in each.operators.items() if change > 0})
    if not came:
        return "other", "no operator came into a program"
    known = {entry.operator: entry for entry in ENTRIES if entry.operator}
    names = [name.rpartition(".")[0].replace(".", "::") for name in came]
    if any(name in DEVICES for name in names):
        return "triton_fallback_path", f"{', '.join(came)}: a Triton kernel of Inlay's"
    found = [known[name] for name in names if name in known]
    if found or all(name.startswith("aten::") for name in names):
        evidence = "; ".join(entry.evidence for entry in found) or "torch's own operators"
        return "existing_kernel_path", f"{', '.join(came)}: {evidence}"
    return "other", f"{', '.join(came)}: computed by its reference, which the compiler sees into"
