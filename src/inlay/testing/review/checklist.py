"""The checklist of a fusion review: each line is looked at, and says what was seen."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.config import resolve
from inlay.config.layers import overlays_of
from inlay.host import peak_memory
from inlay.insight.candidates.region import Sizes
from inlay.insight.candidates.work import Work, work_of
from inlay.insight.near_misses import explain, unbound
from inlay.insight.verify import Change, Verdict, Verify
from inlay.program.folded import dump_folded
from inlay.program.graphs import all_nodes
from inlay.program.text import save_text
from inlay.testing.broken import EVERYWHERE, NOTHING
from inlay.testing.review.noticing import Noticing, notice
from inlay.transforms import configure, run, up_to
from inlay.transforms.base import Numerics, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pipeline import Record

_ROWS = 512
"""Rows for which memory of values is told."""
_LIMIT = 0.5
"""An error of this share of the results is no approximation of them."""


@dataclass(frozen=True)
class Check:
    """One line of the checklist."""

    title: str
    passed: bool
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class OnModel:
    """What a transform did to one model."""

    model: str
    record: Record
    seconds: float
    """Of all transforms up to and with this one."""
    anchors: Mapping[str, int]
    near: str
    """The best near miss, when there is one."""
    verdict: Verdict | None
    operators: Mapping[str, int]
    """Operators that came (positive) and went."""
    values: tuple[int, int]
    """Bytes that kernels write, before and after, for 512 rows."""
    memory: int
    """Bytes by which the process grew to a new height."""
    saved: str


@dataclass(frozen=True)
class Review:
    """All that was looked at."""

    transform: type[Transform]
    models: tuple[OnModel, ...]
    noticing: Noticing
    checks: tuple[Check, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether every line of the checklist holds."""
        return all(each.passed for each in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The review for machines."""
        return {
            "transform": self.transform.name,
            "passed": self.passed,
            "checks": [vars(each) for each in self.checks],
            "models": {each.model: each.record.sites for each in self.models},
            "tests": [{"name": each.name, "noticed": sorted(each.noticed)} for each in self.noticing.tests],
        }


def review(
    cls: type[Transform],
    programs: Mapping[str, Program],
    *,
    tests: Sequence[Path] = (),
    config: Sequence[Path] = (),
    folder: Path,
    locked: Mapping[str, int] | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Review:
    """Look at everything a reviewer asks about a transform, on these models."""
    models = tuple(
        _on_model(cls, name, program, config, folder, locked or {}, on_step) for name, program in programs.items()
    )
    noticing = notice(cls, tests or _beside(cls), on_step)
    checks = (
        _present(models),
        _listed(cls, config),
        _overlays(cls),
        _matches(models),
        _saved(models),
        _tests(cls, noticing),
        _outputs(cls, models),
        _cost(models),
    )
    return Review(cls, models, noticing, checks)


def _beside(cls: type[Transform]) -> list[Path]:
    """The test file beside a transform's own file, where `inlay candidates --scaffold` writes it."""
    file = Path(inspect.getfile(cls))
    test = file.with_name(f"test_{file.stem}.py")
    return [test] if test.exists() else []


def _on_model(
    cls: type[Transform],
    name: str,
    program: Program,
    config: Sequence[Path],
    folder: Path,
    locked: Mapping[str, int],
    on_step: Callable[[str], None],
) -> OnModel:
    on_step(f"transforming {name}")
    steps = _steps(cls, program, config)
    before, records = run(program, [unbound(step) for step in steps[:-1]])
    height = peak_memory()
    after, (record,) = run(before, [unbound(steps[-1])])
    grown = peak_memory() - height
    seen = Verify(locked, rounds=2)
    if not cls.adds_inputs:
        run(before, [unbound(steps[-1])], [seen])
    near = ""
    if not record.sites:
        findings = explain(before, [steps[-1]])[0].findings
        near = findings[0].text if findings else ""
    counts = Counter(after.op_counts())
    counts.subtract(before.op_counts())
    return OnModel(
        name,
        record,
        sum(each.seconds for each in (*records, record)),
        {anchor: count for anchor in cls.anchors if (count := before.op_counts().get(anchor, 0))},
        near,
        seen.verdicts[-1] if seen.verdicts else None,
        {operator: change for operator, change in counts.items() if change},
        (_written(before), _written(after)),
        grown,
        _save(folder, name, before, after),
    )


def _steps(cls: type[Transform], program: Program, config: Sequence[Path]) -> list[Any]:
    from inlay.transforms.pipeline import Step

    resolved = resolve(architecture=program.facts.architecture, model=program.name, files=config)
    steps = configure(resolved)
    if cls.name in {step.key for step in steps}:
        return up_to(cls.name, steps)
    order = list(Stage)
    earlier = [step for step in steps if order.index(step.transform.stage) <= order.index(cls.stage)]
    return [*earlier, Step(cls.name, cls())]


def _written(program: Program) -> int:
    sizes = Sizes(program, _ROWS)
    return sum(
        sizes.bytes(node.meta.get("val"))
        for node in all_nodes(program.graph)
        if node.op == "call_function" and work_of(node) is not Work.VIEW
    )


def _save(folder: Path, name: str, before: Program, after: Program) -> str:
    place = folder / "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in Path(name).name)
    place.mkdir(parents=True, exist_ok=True)
    save_text(dump_folded(before), place / "before.folded.py")
    save_text(dump_folded(after), place / "after.folded.py")
    return str(place)


def _present(models: Sequence[OnModel]) -> Check:
    lines = []
    for each in models:
        there = ", ".join(f"{count} × {name}" for name, count in each.anchors.items())
        lines.append(
            f"{each.model}: {there or ('sites without an anchor' if each.record.sites else each.near or 'no')}"
        )
    passed = any(each.anchors or each.record.sites or each.near for each in models)
    return Check("The structure it is for is in current programs", passed, tuple(lines))


def _listed(cls: type[Transform], config: Sequence[Path]) -> Check:
    entry = next((each for each in resolve(files=config).entries if each.name == cls.name), None)
    if entry is None:
        return Check(
            "Registered, listed, off until proven", False, (f"not listed: add `{cls.name}: {{enabled: false}}`",)
        )
    setting = entry.options.get("enabled")
    state = "off" if setting is not None and not setting.value else "on; what follows is its proof"
    where = setting.origin if setting else "default.yaml"
    return Check("Registered, listed, off until proven", True, (f"registered by {cls.__module__}; {state} ({where})",))


def _overlays(cls: type[Transform]) -> Check:
    lines = tuple(f"{name}: {settings}" for name, settings in overlays_of(cls.name).items())
    return Check("Overlays that touch it", True, lines or ("none",))


def _matches(models: Sequence[OnModel]) -> Check:
    lines, passed = [], any(each.record.sites for each in models)
    for each in models:
        if each.record.sites:
            refused = len(each.record.misses)
            lines.append(f"{each.model}: {each.record.sites} sites" + (f", {refused} misses" if refused else ""))
        elif each.anchors and not each.near and not each.record.misses:
            passed = False
            lines.append(f"{each.model}: none, though {', '.join(each.anchors)} is there, and nobody knows why")
        else:
            why = each.near or (each.record.misses[0].reason if each.record.misses else "nothing starts like it")
            lines.append(f"{each.model}: none: {why}")
    return Check("It matches, or it is known why not", passed, tuple(lines))


def _saved(models: Sequence[OnModel]) -> Check:
    return Check("Before and after are saved", True, tuple(f"{each.saved}/before.folded.py, after" for each in models))


def _tests(cls: type[Transform], noticing: Noticing) -> Check:
    lines = [f"{len(noticing.tests)} tests, {len(noticing.breakages)} ways to break it"]
    success, others = noticing.notice(NOTHING), noticing.notice(EVERYWHERE)
    lines.append(f"{success} fail when it does nothing, {others} when it fires everywhere")
    lines += [f"fails as it is: {each.name}: {each.problem}" for each in noticing.failing]
    lines += [f"cannot fail: {each.name} passes however the transform is broken" for each in noticing.cannot_fail]
    lines += [f"nothing notices that it {name}" for name in noticing.unnoticed]
    lines += [f"only the fuzzer notices that it {name}" for name in sorted(noticing.fuzzed)]
    bad = noticing.failing or noticing.cannot_fail or noticing.unnoticed
    if cls.adds_inputs:
        lines.append("it adds inputs: numbers are compared by a test of its own")
    passed = bool(success and others) and not bad
    return Check("Tests of success and of intended non-match, which fail when it is broken", passed, tuple(lines))


def _outputs(cls: type[Transform], models: Sequence[OnModel]) -> Check:
    lines, passed = [], True
    for each in models:
        verdict = each.verdict
        if verdict is None:
            why = "it adds inputs: not compared here" if cls.adds_inputs else "no site, no change"
            lines.append(f"{each.model}: {why}")
            continue
        text = f"{each.model}: {verdict.change.value}"
        if verdict.change in (Change.NEARER, Change.FARTHER):
            text += f", error {verdict.before:.1e} → {verdict.after:.1e} of a float64 referee: acceptable drift"
            if cls.numerics is Numerics.EXACT:
                passed, text = False, f"{text}, but it says it is exact"
        elif verdict.change is Change.WRONG and cls.numerics is Numerics.APPROXIMATE and verdict.after < _LIMIT:
            text += f": it says it is approximate, error {verdict.after:.1e}"
        elif verdict.change is not Change.NONE:
            passed = False
        lines.append(f"{text}; {verdict.reason}" if verdict.reason else text)
    return Check("Outputs: types, match loss, metadata loss or acceptable drift", passed, tuple(lines))


def _cost(models: Sequence[OnModel]) -> Check:
    lines = []
    for each in models:
        before, after = each.record.nodes
        lines.append(
            f"{each.model}: {each.record.seconds:.2f} s of {each.seconds:.2f} s, {before} → {after} nodes, the process"
            f" grew by {each.memory / 1e6:.0f} MB; kernels write {each.values[0] / 1e6:.1f} →"
            f" {each.values[1] / 1e6:.1f} MB for {_ROWS} rows"
        )
    return Check("Effect on build time and memory", True, tuple(lines))
