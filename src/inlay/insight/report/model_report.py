"""The report of a model: runs the transforms of a build and records them; nothing is compiled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inlay import flow
from inlay.config import resolve_config
from inlay.errors import InlayError
from inlay.insight.candidates import SIZES_TEXT, find_candidates, searched_text
from inlay.insight.explanation import drop_contract
from inlay.insight.report.line_table import LineTable
from inlay.insight.report.recorder import TransformRecorder
from inlay.insight.report.tables import bindings_table, memory_table, plan_table, settings_table
from inlay.insight.verify import NumericsCheck
from inlay.program.text.folded_printer import dump_folded
from inlay.transforms import configure, run
from inlay.transforms.lock import versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.lowering.lower import LoweredProgram
    from inlay.program.program import Program


def report_program(
    program: Program,
    options: flow.BuildOptions | None = None,
    *,
    drift: bool = False,
    seconds: dict[str, float] | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Return the page data of a captured program: what a build with these options does to it, and why.

    With `drift` the program is also run before and after every transform, as `inlay verify` does.
    """
    options, clock, lines = options or flow.BuildOptions(), dict(seconds or {}), LineTable()
    captured, start = program, time.perf_counter()
    prepared = flow.prepare(program, options)
    program, resolved = prepared.program, prepared.config
    steps = configure(resolved)
    watch = TransformRecorder(steps, lines, on_step)
    before = lines.add(dump_folded(program).splitlines())
    made, records = run(program, [drop_contract(step) for step in steps], [watch])
    clock["transform"] = sum(record.seconds for record in records)
    clock["watch"] = time.perf_counter() - start - clock["transform"]
    on_step("lowering")
    lowered, why = _lower(made, options, clock)
    on_step("searching for candidates")
    candidates = _candidates(made, clock)
    return {
        "kind": "model",
        "title": program.name,
        "architecture": program.facts.architecture,
        "versions": versions(),
        "facts": [[name, fact.value, fact.origin] for name, fact in program.facts.items()],
        "nodes": [len(captured), len(made)],
        "seconds": {name: round(value, 3) for name, value in clock.items()},
        "transforms": watch.transforms,
        "programs": [
            {"title": "as captured", "lines": before},
            {"title": "after all transforms", "lines": lines.add(dump_folded(made).splitlines())},
        ],
        "candidates": candidates,
        "bindings": bindings_table(made.bindings, {name: ref.origin for name, ref in made.tensors.items()}),
        "plan": {"buckets": plan_table(lowered) if lowered is not None else [], "why": why},
        "memory": memory_table(made, lowered),
        "drift": _drift(captured, options, on_step) if drift else _empty_drift(),
        "configuration": {
            "rows": [[key, name, repr(value), origin] for key, name, value, origin in settings_table(resolved, steps)],
            "why": "",
        },
        "lines": lines.texts,
    }


def _lower(program: Program, options: flow.BuildOptions, clock: dict[str, float]) -> tuple[LoweredProgram | None, str]:
    start = time.perf_counter()
    try:
        return (
            flow.lower_program(program, options),
            "Code sizes and kernel choices are known after a build. Run `inlay report PACKAGE` to see them.",
        )
    except InlayError as error:
        return None, str(error)
    finally:
        clock["lower"] = time.perf_counter() - start


def _candidates(program: Program, clock: dict[str, float]) -> dict[str, Any]:
    start = time.perf_counter()
    search = find_candidates(program)
    clock["candidates"] = time.perf_counter() - start
    why = "" if search.candidates else "No repeated operators can be fused further."
    rows, searched = [each.to_json() for each in search.candidates], searched_text(program)
    return {"rows": rows, "sizes": SIZES_TEXT, "searched": searched, "why": why}


def _empty_drift() -> dict[str, Any]:
    return {
        "rows": [],
        "why": "Not measured. Use `inlay report MODEL --drift` or `inlay verify MODEL` to run the program before and"
        " after every transform.",
    }


def _drift(program: Program, options: flow.BuildOptions, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Measure the drift of each transform. A KV cache adds inputs, so the program is verified without one."""
    on_step("verifying")
    files: tuple[Path, ...] = options.config
    resolved = resolve_config(
        architecture=program.facts.architecture, model=program.name, files=files, settings=options.settings
    )
    seen = NumericsCheck(rounds=2)
    try:
        run(program, [drop_contract(step) for step in configure(resolved)], [seen])
    except InlayError as error:
        return {"rows": [], "why": f"Not measured: {error}"}
    rows = [each.to_json() for each in seen.verdicts]
    return {"rows": rows, "why": "" if rows else "No transform changed anything."}
