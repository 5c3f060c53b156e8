"""Format the review as Markdown for a pull request, with the iteration note at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ProgramError
from inlay.ops.catalog import KERNELS
from inlay.ops.registration import DECOMPOSITIONS, DEVICE_KERNELS
from inlay.program.text.literals import find_target
from inlay.testing.review.checklist import before_text

if TYPE_CHECKING:
    from inlay.testing.review.checklist import Review


def render_markdown(review: Review) -> str:
    """Return the whole review as Markdown."""
    cls = review.transform
    lines = [f"## Review of `{cls.name}`", "", cls.summary(), ""]
    for check in review.checks:
        lines.append(f"- [{'x' if check.passed else ' '}] **{check.title}**")
        lines += [f"  - {line}" for line in check.evidence]
    return "\n".join([*lines, "", *iteration_note(review), ""])


def iteration_note(review: Review) -> list[str]:
    """Return the iteration note: a summary of the change for the next one."""
    cls = review.transform
    path, rationale = _path(review)
    open_risks = [check.title for check in review.checks if not check.passed]
    open_risks += [f"killed only by the fuzzer: it {name}" for name in sorted(review.mutant_report.killed_by_fuzzer)]
    sites = "; ".join(f"{each.model} {each.record.sites}" for each in review.models)
    drift = {each.verdict.change.value for each in review.models if each.verdict is not None}
    logs = "; ".join(
        f"matches before {before_text(each)} / after {each.record.sites} ({each.model})" for each in review.models
    )
    tests = review.mutant_report
    return [
        f"Candidate: {cls.name}",
        f"Path: {path}",
        f"Rationale: {rationale}",
        f"Graph validation: {sites} sites; outputs: {', '.join(sorted(drift)) or 'not compared'}",
        f"Summary logs: {logs}",
        f"Tests: {len(tests.tests)} pass; {len(tests.mutants) - len(tests.survivors)} of {len(tests.mutants)}"
        " mutants are killed",
        f"Open risks: {'; '.join(open_risks) or 'none found'}",
    ]


def _path(review: Review) -> tuple[str, str]:
    """Return the path by the kernels of the new operators: an existing kernel, Triton, or other; and the rationale."""
    came = sorted({name for each in review.models for name, change in each.operator_changes.items() if change > 0})
    found = [(name, *_kernel(operator)) for name in came if (operator := _operator(name)) is not None]
    if not found:
        return "other", "no program has a new operator"
    paths = {path for _, path, _ in found}
    path = next(each for each in ("triton_fallback_path", "other", "existing_kernel_path") if each in paths)
    names: dict[str, list[str]] = {}
    for name, _, why in found:
        names.setdefault(why, []).append(name)
    return path, "; ".join(f"{', '.join(which)}: {why}" for why, which in names.items())


def _operator(name: str) -> Any:
    """Return the operator of this name; None if it is not an operator, such as `getitem`."""
    try:
        found = find_target(name)
    except ProgramError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def _kernel(operator: torch._ops.OpOverload) -> tuple[str, str]:
    """Return the path and the description of the kernel of an operator."""
    name = f"{operator.namespace}::{operator._opname}"
    known = [entry.evidence for entry in KERNELS if entry.operator == name]
    if name in DEVICE_KERNELS:
        return "triton_fallback_path", "a Triton kernel of Inlay"
    if known or operator.namespace == "aten":
        return "existing_kernel_path", "; ".join(known) or "built-in torch operators"
    if operator in DECOMPOSITIONS or operator._can_decompose():
        return "other", "computed by its reference, which the compiler can decompose"
    return "other", "a custom operator, opaque to Inductor: called without fusion"
