"""The checklist of a fusion review; each item is evaluated and contains its evidence."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from inlay.config import resolve_config
from inlay.config.layers import find_overlays
from inlay.insight.candidates.op_kinds import OpKind, op_kind
from inlay.insight.candidates.region import ConcreteSizes
from inlay.insight.explanation import drop_contract, explain
from inlay.insight.report.recorder import contract_status
from inlay.insight.verify import Change, NumericsCheck, NumericsVerdict
from inlay.machine import peak_memory
from inlay.program.graphs import all_nodes
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.printer import save_text
from inlay.testing.review.mutant_runs import MutantReport, run_mutants
from inlay.testing.review.mutants import EVERYWHERE, NOTHING
from inlay.testing.review.previous_revision import previous_sites
from inlay.transforms import configure, registry, run, steps_through
from inlay.transforms.base import Numerics, Stage
from inlay.transforms.lock import Lock, LockOptions
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.config import ResolvedConfig
    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pass_manager import TransformRecord

_ROWS = 512
"""Number of rows for which the memory of values is computed."""
_LIMIT = 0.5
"""Relative error from which a result is not an approximation any more."""
_MAX_SECONDS = 10
"""Seconds from which a transform that takes most of the time of all transforms is too slow."""


@dataclass(frozen=True)
class ChecklistItem:
    """One item of the checklist."""

    title: str
    passed: bool
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class ModelReview:
    """The effect of a transform on one model."""

    model: str
    record: TransformRecord
    seconds: float
    """Total time of all transforms up to and including this one."""
    anchors: Mapping[str, int]
    near_miss: str
    """The closest near miss, if there is one."""
    verdict: NumericsVerdict | None
    operator_changes: Mapping[str, int]
    """Change of the call count of each operator; positive for new calls."""
    bytes_written: tuple[int, int]
    """Bytes that kernels write, before and after, for 512 rows."""
    memory: int
    """Growth of the peak memory of the process, in bytes."""
    folder: str
    before: tuple[int | None, str]
    """Sites of the lock or of the previous revision, and which; None if unknown, and why."""
    contract: Mapping[str, Any]
    """The contract, whether it is broken, and the `origin` of its count."""
    toggle_problem: str
    """How a saved toggle gives another result."""


@dataclass(frozen=True)
class Review:
    """The complete result of a review."""

    transform: type[Transform]
    models: tuple[ModelReview, ...]
    mutant_report: MutantReport
    checks: tuple[ChecklistItem, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every item of the checklist passed."""
        return all(each.passed for each in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the review as JSON data."""
        return {
            "transform": self.transform.name,
            "passed": self.passed,
            "checks": [vars(each) for each in self.checks],
            "models": {each.model: each.record.sites for each in self.models},
            "tests": [{"name": each.name, "noticed": sorted(each.killed)} for each in self.mutant_report.tests],
        }


def review(
    cls: type[Transform],
    programs: Mapping[str, Program],
    *,
    tests: Sequence[Path] = (),
    config: Sequence[Path] = (),
    folder: Path,
    expected_sites: Mapping[str, Mapping[str, int]] | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Review:
    """Evaluate the review checklist of a transform on these models.

    `expected_sites` are the counts of a lock, by model and transform. Without one, git's previous revision is run.
    """
    models = tuple(
        _review_model(cls, name, program, config, folder, (expected_sites or {}).get(name, {}), on_step)
        for name, program in programs.items()
    )
    noticing = run_mutants(cls, tests or _sibling_tests(cls), on_step)
    checks = (
        _check_presence(models),
        _check_registration(cls, config),
        _check_toggles(models),
        _check_overlays(cls, models),
        _check_matches(models),
        _check_dumps(models),
        _check_tests(cls, noticing),
        _check_outputs(cls, models),
        _check_cost(models),
    )
    return Review(cls, models, noticing, checks)


def _sibling_tests(cls: type[Transform]) -> list[Path]:
    """Return the test file next to the file of a transform, where `inlay candidates --scaffold` writes it."""
    file = Path(inspect.getfile(cls))
    test = file.with_name(f"test_{file.stem}.py")
    return [test] if test.exists() else []


def _review_model(
    cls: type[Transform],
    name: str,
    program: Program,
    config: Sequence[Path],
    folder: Path,
    locked: Mapping[str, int],
    on_step: Callable[[str], None],
) -> ModelReview:
    on_step(f"transforming {name}")
    resolved = resolve_config(architecture=program.facts.architecture, model=program.name, files=config)
    steps = _steps(cls, resolved)
    stated = [each.options["expect"] for each in resolved.entries if each.key == cls.name and "expect" in each.options]
    before, records = run(program, [drop_contract(step) for step in steps[:-1]])
    height = peak_memory()
    after, (record,) = run(before, [drop_contract(steps[-1])])
    grown = peak_memory() - height
    seen = NumericsCheck(locked, rounds=2)
    if not cls.adds_inputs:
        run(before, [drop_contract(steps[-1])], [seen])
    near = ""
    if not record.sites:
        findings = explain(before, [steps[-1]])[0].findings
        near = findings[0].text if findings else ""
    counts = Counter(after.op_counts())
    counts.subtract(before.op_counts())
    return ModelReview(
        name,
        record,
        sum(each.seconds for each in (*records, record)),
        {anchor: count for anchor in cls.anchors if (count := before.op_counts().get(anchor, 0))},
        near,
        seen.verdicts[-1] if seen.verdicts else None,
        {operator: change for operator, change in counts.items() if change},
        (_bytes_written(before), _bytes_written(after)),
        grown,
        _save(folder, name, before, after),
        (locked[cls.name], "lock") if cls.name in locked else previous_sites(steps[-1].transform, before),
        contract_status(steps[-1], before, record) | {"origin": stated[0].origin if stated else ""},
        _toggle_problem(steps[-1].key, before, record, config, folder),
    )


def _toggle_problem(key: str, before: Program, record: TransformRecord, config: Sequence[Path], folder: Path) -> str:
    """Save both toggles in a configuration file and in a lock, and run what is read back."""
    if record.transform not in registry():
        return "no file can name it, because it is not registered"
    architecture, file = before.facts.architecture, folder / "toggle.yaml"
    for enabled in (True, False):
        file.write_text(yaml.safe_dump({"transforms": {key: {"enabled": enabled}}}))
        text = Lock(models=[], options=LockOptions.from_files([*config, file], (), "")).text()
        locked = Lock.model_validate(yaml.safe_load(text)).options.files
        read = [
            configure(resolve_config(architecture=architecture, model=before.name, files=files))
            for files in ([*config, file], locked)
        ]
        saved = [next(step for step in steps if step.key == key) for steps in read]
        if saved[0].transform.options != saved[1].transform.options:
            return f"enabled: {enabled} is not the same in a lock"
        made, (again,) = run(before, [drop_contract(saved[0])])
        if enabled and again.sites != record.sites:
            return f"saved as enabled, it has {again.sites} sites instead of {record.sites}"
        if not enabled and (again.status != "disabled" or made is not before):
            return f"saved as disabled, it {again.status}"
    return ""


def _steps(cls: type[Transform], resolved: ResolvedConfig) -> list[TransformStep]:
    steps = configure(resolved)
    if cls.name in {step.key for step in steps}:
        return steps_through(cls.name, steps)
    order = list(Stage)
    earlier = [step for step in steps if order.index(step.transform.stage) <= order.index(cls.stage)]
    return [*earlier, TransformStep(cls.name, cls())]


def _bytes_written(program: Program) -> int:
    sizes = ConcreteSizes(program, _ROWS)
    return sum(
        sizes.bytes(node.meta.get("val"))
        for node in all_nodes(program.graph)
        if node.op == "call_function" and op_kind(node) is not OpKind.VIEW
    )


def _save(folder: Path, name: str, before: Program, after: Program) -> str:
    place = folder / "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in name)
    place.mkdir(parents=True, exist_ok=True)
    save_text(dump_folded(before), place / "before.folded.py")
    save_text(dump_folded(after), place / "after.folded.py")
    return str(place)


def _check_presence(models: Sequence[ModelReview]) -> ChecklistItem:
    lines = []
    for each in models:
        there = ", ".join(f"{count} × {name}" for name, count in each.anchors.items())
        lines.append(
            f"{each.model}: {there or ('sites without an anchor' if each.record.sites else each.near_miss or 'absent')}"
        )
    passed = any(each.anchors or each.record.sites or each.near_miss for each in models)
    return ChecklistItem("The models contain the structure it matches", passed, tuple(lines))


def _check_registration(cls: type[Transform], config: Sequence[Path]) -> ChecklistItem:
    entry = next((each for each in resolve_config(files=config).entries if each.name == cls.name), None)
    if entry is None:
        line = f"not in the configuration: add `{cls.name}: {{enabled: false}}`"
    else:
        setting = entry.options.get("enabled")
        state = "disabled" if setting is not None and not setting.value else "enabled; the other items must pass"
        line = f"registered by {cls.__module__}; {state} ({setting.origin if setting else 'default.yaml'})"
    return ChecklistItem("Registered, configured, disabled until reviewed", entry is not None, (line,))


def _check_toggles(models: Sequence[ModelReview]) -> ChecklistItem:
    lines = [f"{each.model}: {each.toggle_problem or 'enabled and disabled give the same again'}" for each in models]
    passed = not any(each.toggle_problem for each in models)
    return ChecklistItem("Saved toggles, in a configuration file or a lock, are reproducible", passed, tuple(lines))


def _check_overlays(cls: type[Transform], models: Sequence[ModelReview]) -> ChecklistItem:
    lines, used = [], {each.contract["origin"] for each in models}
    for each in models:
        terms, origin = each.contract, each.contract["origin"] or "no layer states a count"
        stated = f", expect {terms['expect']}" if terms["expect"] is not None else ""
        lines.append(f"{each.model}: {origin}{stated}: {terms['broken'] or f'{each.record.sites} sites, met'}")
    others = (item for item in find_overlays(cls.name).items() if item[0] not in used)
    lines += [f"{name}: {settings}: not checked, no such model was given" for name, settings in others]
    passed = not any(each.contract["broken"] for each in models)
    return ChecklistItem("The count that overlays or files expect of it is met", passed, tuple(lines))


def _check_matches(models: Sequence[ModelReview]) -> ChecklistItem:
    lines, passed = [], any(each.record.sites for each in models)
    for each in models:
        if each.record.sites:
            refused = len(each.record.misses)
            more = (f", {refused} misses" if refused else "") + f"; before: {before_text(each)}"
            lines.append(f"{each.model}: {each.record.sites} sites{more}")
        elif each.anchors and not each.near_miss and not each.record.misses:
            passed = False
            lines.append(f"{each.model}: none, although it contains {', '.join(each.anchors)}; the reason is unknown")
        else:
            why = each.near_miss or (each.record.misses[0].reason if each.record.misses else "no near misses")
            lines.append(f"{each.model}: none: {why}")
    return ChecklistItem("It matches, or the reason for no match is known", passed, tuple(lines))


def before_text(model: ModelReview) -> str:
    """Return the number of sites before this revision and its origin, or that it is unknown."""
    sites, origin = model.before
    return f"{'unknown' if sites is None else sites} ({origin})"


def _check_dumps(models: Sequence[ModelReview]) -> ChecklistItem:
    lines, passed = [], True
    for each in models:
        files = [Path(each.folder) / f"{name}.folded.py" for name in ("before", "after")]
        texts = [file.read_text() if file.exists() else "" for file in files]
        fault = "" if all(texts) else "not saved"
        if all(texts) and (texts[0] != texts[1]) != bool(each.record.sites):
            fault = f"{'equal' if texts[0] == texts[1] else 'different'}, with {each.record.sites} sites"
        passed = passed and not fault
        lines.append(f"{each.folder}/before.folded.py, after.folded.py" + (f": {fault}" if fault else ""))
    return ChecklistItem("The programs before and after are saved, and differ where it matches", passed, tuple(lines))


def _check_tests(cls: type[Transform], noticing: MutantReport) -> ChecklistItem:
    lines = [f"{len(noticing.tests)} tests, {len(noticing.mutants)} mutants"]
    success, others = noticing.kill_count(NOTHING), noticing.kill_count(EVERYWHERE)
    lines.append(f"{success} tests fail when it does nothing, {others} when it fires everywhere")
    lines += [f"fails without a mutant: {each.name}: {each.problem}" for each in noticing.failing_tests]
    lines += [f"cannot fail: {each.name} passes under every mutant" for each in noticing.ineffective_tests]
    lines += [f"mutant survives: it {name}" for name in noticing.survivors]
    lines += [f"killed only by the fuzzer: it {name}" for name in sorted(noticing.killed_by_fuzzer)]
    bad = noticing.failing_tests or noticing.ineffective_tests or noticing.survivors
    if cls.adds_inputs:
        lines.append("it adds inputs: a separate test compares the results")
    passed = bool(success and others) and not bad
    return ChecklistItem("Positive and negative tests, which fail when it is broken", passed, tuple(lines))


def _check_outputs(cls: type[Transform], models: Sequence[ModelReview]) -> ChecklistItem:
    lines, passed = [], True
    for each in models:
        verdict = each.verdict
        if verdict is None:
            why = "not compared, because it adds inputs" if cls.adds_inputs else "no matches, no change"
            if each.before[1] == "lock" and (lost := (each.before[0] or 0) - each.record.sites) > 0:
                passed, why = False, f"{why}; {lost} fewer sites than expected"
            lines.append(f"{each.model}: {why}")
            continue
        text = f"{each.model}: {verdict.change.value}"
        if verdict.change in (Change.MORE_ACCURATE, Change.LESS_ACCURATE):
            text += f", error against float64 {verdict.error_before:.1e} → {verdict.error_after:.1e}: acceptable drift"
            if cls.numerics is Numerics.EXACT:
                passed, text = False, f"{text}, but it declares exact numerics"
        elif verdict.change is Change.WRONG and cls.numerics is Numerics.APPROXIMATE and verdict.error_after < _LIMIT:
            text += f": it declares approximate numerics, error {verdict.error_after:.1e}"
        elif verdict.change is not Change.NONE:
            passed = False
        lines.append(f"{text}; {verdict.reason}" if verdict.reason else text)
    return ChecklistItem("Outputs: no wrong types, match loss or metadata loss; acceptable drift", passed, tuple(lines))


def _check_cost(models: Sequence[ModelReview]) -> ChecklistItem:
    lines, passed = [], True
    for each in models:
        before, after = each.record.nodes
        lines.append(
            f"{each.model}: {each.record.seconds:.2f} s of {each.seconds:.2f} s, {before} → {after} nodes, peak memory"
            f" grew by {each.memory / 1e6:.0f} MB; kernels write {each.bytes_written[0] / 1e6:.1f} →"
            f" {each.bytes_written[1] / 1e6:.1f} MB for {_ROWS} rows"
        )
        slow = each.record.seconds > _MAX_SECONDS and each.record.seconds > each.seconds / 2
        passed = passed and not slow and each.bytes_written[1] <= each.bytes_written[0]
    title = "Build time and memory: kernels write no more, and it does not take most of the time"
    return ChecklistItem(title, passed, tuple(lines))
