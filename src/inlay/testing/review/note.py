"""The review as Markdown for a pull request, ending in the iteration note."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.ops.catalog import KERNELS
from inlay.ops.registration import DECOMPOSITIONS, DEVICE_KERNELS

if TYPE_CHECKING:
    from inlay.testing.review.checklist import Review


def render_markdown(review: Review) -> str:
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
    open_risks += [f"only the fuzzer notices that it {name}" for name in sorted(review.mutant_report.killed_by_fuzzer)]
    sites = "; ".join(f"{each.model} {each.record.sites}" for each in review.models)
    drift = {each.verdict.change.value for each in review.models if each.verdict is not None}
    logs = "; ".join(f"matches before 0 / after {each.record.sites} ({each.model})" for each in review.models)
    tests = review.mutant_report
    return [
        f"Candidate: {cls.name}",
        f"Path: {path}",
        f"Rationale: {rationale}",
        f"Graph validation: {sites} sites; outputs: {', '.join(sorted(drift)) or 'not compared'}",
        f"Summary logs: {logs}",
        f"Tests: {len(tests.tests)} pass; {len(tests.mutants) - len(tests.survivors)} of {len(tests.mutants)} ways"
        " to break it are noticed",
        f"Open risks: {'; '.join(open_risks) or 'none found'}",
    ]


def _path(review: Review) -> tuple[str, str]:
    """By what computes the operators that came: somebody's kernel, Triton, or neither."""
    came = sorted({name for each in review.models for name, change in each.operator_changes.items() if change > 0})
    found = [(name, *_kernel(operator)) for name in came if (operator := _operator(name)) is not None]
    if not found:
        return "other", "no operator came into a program"
    paths = {path for _, path, _ in found}
    path = next(each for each in ("triton_fallback_path", "other", "existing_kernel_path") if each in paths)
    names: dict[str, list[str]] = {}
    for name, _, why in found:
        names.setdefault(why, []).append(name)
    return path, "; ".join(f"{', '.join(which)}: {why}" for why, which in names.items())


def _operator(name: str) -> Any:
    """The operator that a program calls by this name; None for what is no operator, such as `getitem`."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _kernel(operator: torch._ops.OpOverload) -> tuple[str, str]:
    """What computes an operator, and what a compiler makes of a call of it."""
    name = f"{operator.namespace}::{operator._opname}"
    known = [entry.evidence for entry in KERNELS if entry.operator == name]
    if name in DEVICE_KERNELS:
        return "triton_fallback_path", "a Triton kernel of Inlay's"
    if known or operator.namespace == "aten":
        return "existing_kernel_path", "; ".join(known) or "torch's own operators"
    if operator in DECOMPOSITIONS or operator._can_decompose():
        return "other", "computed by its reference, which the compiler sees into"
    return "other", "a custom operator, opaque to Inductor: called as it is, with nothing fused into it"
