"""The pass manager: each transform runs on a copy, which replaces the program when its checks succeed."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from inlay.errors import ContractError, InlayError, TransformError, UsageError, one_line, suggest
from inlay.program.graphs import all_nodes, target_text
from inlay.program.remarks import Remark, RemarkKind
from inlay.program.symbols import evaluate
from inlay.program.type_checks import check_types
from inlay.rewrite.pattern_search import trace_alternatives
from inlay.rewrite.rule import Rule
from inlay.transforms.base import Stage, Transform, TransformOptions, TransformResult, find_transform, registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.config import ResolvedConfig
    from inlay.program.program import Program
    from inlay.rewrite import Refusal


@dataclass(frozen=True)
class TransformRecord:
    """The record of one transform of a run."""

    key: str
    transform: str
    stage: str
    status: str
    """`ran`, `disabled`, `failed` (not applied; only in the torch.compile backend), `analysis` (remarks of a build, no
    transform), or `skipped`: it ran, met its contract, has neither sites nor misses, and the program lacks what it
    needs."""
    skip_reason: str = ""
    """What the program lacks, if the transform was skipped."""
    sites: int = 0
    has_site_count: bool = True
    """Whether `sites` counts sites. Otherwise it counts the calls that changed."""
    seconds: float = 0.0
    nodes: tuple[int, int] = (0, 0)
    matched_roots: tuple[str, ...] = ()
    remarks: tuple[Remark, ...] = field(default=(), repr=False)

    @property
    def was_applied(self) -> bool:
        """Whether the transform was enabled and did not fail, so that `sites` is its count even if it is 0."""
        return self.status in ("ran", "skipped")

    @property
    def summary(self) -> str:
        """One line for logs and scripts."""
        if self.status != "ran":
            return f"{self.key}: [SUMMARY] {self.status}" + (f" ({self.skip_reason})" if self.skip_reason else "")
        before, after = self.nodes
        found = (
            f"matches={self.sites}" if self.has_site_count else f"changed_nodes={self.sites} (matches are not counted)"
        )
        return f"{self.key}: [SUMMARY] {found} nodes={before}→{after} time={self.seconds:.2f}s"

    @property
    def misses(self) -> tuple[Remark, ...]:
        """The remarks on sites that were not rewritten."""
        return tuple(each for each in self.remarks if each.kind is not RemarkKind.ANALYSIS)

    @property
    def notes(self) -> tuple[Remark, ...]:
        """The remarks of the kind `analysis`."""
        return tuple(each for each in self.remarks if each.kind is RemarkKind.ANALYSIS)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {
            "key": self.key,
            "transform": self.transform,
            "stage": self.stage,
            "status": self.status,
            "skip_reason": self.skip_reason,
            "matches": self.sites if self.has_site_count else None,
            "changed_nodes": None if self.has_site_count else self.sites,
            "seconds": round(self.seconds, 4),
            "nodes": list(self.nodes),
            "remarks": [remark.to_json() for remark in self.remarks],
        }


class Instrument(Protocol):
    """An observer of the program before and after each transform. It never changes the program."""

    def before(self, transform: Transform, program: Program) -> None:
        """Called before a transform runs."""

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Called after a transform ran or was disabled; `program` is the input of the next one."""


@dataclass(frozen=True)
class TransformStep:
    """A configured transform."""

    key: str
    transform: Transform
    aliases: tuple[str, ...] = ()
    """Other names of the step in the configuration."""


def configure(resolved: ResolvedConfig) -> list[TransformStep]:
    """Return the steps in stage order. Unknown names and options raise an error with a suggestion."""
    known = registry()
    for alias, target in resolved.aliases.items():
        if target.partition("#")[0] not in known:
            hint = suggest(target, known) or "`inlay passes` lists them."
            raise UsageError(f"The alias {alias} stands for {target}, but there is no such transform.", hint)
        if alias in known:
            raise UsageError(f"{alias} is a transform and cannot be an alias of {target}.", "Choose another name.")
    steps = []
    for entry in resolved.entries:
        cls = find_transform(entry.name)
        values = {name: setting.value for name, setting in entry.options.items()}
        try:
            options = cls.Options.model_validate(values)
        except ValidationError as error:
            raise _option_error(entry.key, cls.Options, error, entry.options) from error
        if options.expect == "any" and not options.reason:
            raise UsageError(f"{entry.key}: `expect: any` needs a reason.", "State in `reason` why there is no count.")
        use = entry.key.removeprefix(entry.name)  # "" or "#2"
        targets = resolved.aliases | {alias + use: target + use for alias, target in resolved.aliases.items()}
        aliases = tuple(alias for alias, target in targets.items() if target == entry.key)
        steps.append(TransformStep(entry.key, cls(options), aliases))
    order = list(Stage)
    return sorted(steps, key=lambda step: order.index(step.transform.stage))


def steps_through(name: str, steps: Sequence[TransformStep]) -> list[TransformStep]:
    """Return the steps up to and including the one with this name or alias, which is enabled if it was disabled.

    >>> from inlay.config import resolve_config
    >>> [step.key for step in steps_through("match_layer_norm", configure(resolve_config()))]
    ['clean_noops', 'fold_length_comparisons', 'match_layer_norm']
    """
    last = next((at for at, step in enumerate(steps) if name in (step.key, *step.aliases)), None)
    if last is None:
        find_transform(name)
        keys = [step.key for step in steps]
        raise UsageError(f"{name} is not in the configuration.", suggest(name, keys) or "Add it with --config.")
    *earlier, step = steps[: last + 1]
    options = step.transform.options.model_copy(update={"enabled": True})
    return [*earlier, replace(step, transform=type(step.transform)(options))]


def _option_error(key: str, known: type[TransformOptions], error: ValidationError, origins: Any) -> UsageError:
    first = error.errors()[0]
    name = str(first["loc"][0])
    origin = f" (from {origins[name].origin})" if name in origins else ""
    if first["type"] == "extra_forbidden":
        return UsageError(f"{key} has no option {name}{origin}.", suggest(name, known.model_fields))
    return UsageError(f"{key}.{name}{origin}: {first['msg'].lower()}.")


def run(
    program: Program,
    steps: Sequence[TransformStep],
    instruments: Sequence[Instrument] = (),
    *,
    optional_matches: bool = False,
) -> tuple[Program, list[TransformRecord]]:
    """Run the steps in order. On an error the input program is unchanged.

    `optional_matches`: a transform whose anchors are present may match nothing, if that only costs speed. A note says
    so. Stated expectations (`expect`) must hold in any case.
    """
    records: list[TransformRecord] = []
    _trace_patterns(program, steps)
    for step in steps:
        for instrument in instruments:
            instrument.before(step.transform, program)
        program, record = _run_step(program, step, [each.key for each in records if each.was_applied], optional_matches)
        records.append(record)
        for instrument in instruments:
            instrument.after(step.transform, program, record)
    return program, records


def _trace_patterns(program: Program, steps: Sequence[TransformStep]) -> None:
    """Trace the patterns of all steps at once, which takes half the time."""
    rules = [step.transform for step in steps if step.transform.options.enabled and isinstance(step.transform, Rule)]
    with suppress(Exception):  # a rule that fails here fails again in its own step, which reports it
        trace_alternatives(program, *rules)


def _run_step(
    program: Program, step: TransformStep, predecessors: list[str], optional_matches: bool
) -> tuple[Program, TransformRecord]:
    each = step.transform
    record = TransformRecord(step.key, each.name, each.stage.value, "disabled")
    if not each.options.enabled:
        return program, record
    start = time.perf_counter()
    try:
        applied = each.apply(program.copy())
        check_metadata(applied.program, program)
    except Exception as error:
        problem = str(error) if isinstance(error, InlayError) else f"{type(error).__name__}: {one_line(error)}."
        after = f" after {', '.join(predecessors)}" if predecessors else ""
        raise TransformError(f"The transform {step.key}{after} failed: {problem} The program is unchanged.") from error
    try:
        check_contract(step, program, applied)
    except ContractError as error:
        if not optional_matches or each.is_required or each.options.expect is not None:
            raise
        applied.notes = [*applied.notes, f"{error.problem} The result is correct, but slower. {error.remedy}".strip()]
    nodes = (len(program), len(applied.program))
    seconds = time.perf_counter() - start
    remarks = tuple(_remark(each, miss) for miss in applied.misses)
    remarks += tuple(Remark(RemarkKind.ANALYSIS, each.name, each.name, note) for note in applied.notes)
    why = "" if applied.sites or applied.misses else each.skip_reason(program)
    record = replace(
        record,
        status="skipped" if why else "ran",
        skip_reason=why,
        sites=applied.sites,
        has_site_count=applied.has_site_count,
        seconds=seconds,
        nodes=nodes,
        matched_roots=tuple(applied.matched_roots),
        remarks=remarks,
    )
    is_changed = applied.sites or applied.program.symbols != program.symbols  # a range may be narrowed without a site
    return applied.program if is_changed else program, record


def _remark(each: Transform, miss: Refusal) -> Remark:
    kind = RemarkKind.MISSED if miss.is_mismatch else RemarkKind.REFUSED
    nodes = tuple(dict.fromkeys((miss.root.name, miss.node.name)))
    return Remark(
        kind,
        each.name,
        each.name,
        miss.reason,
        nodes=nodes,
        source=miss.source,
        matched_nodes=miss.matched,
        pattern_nodes=miss.pattern_nodes,
    )


def check_metadata(program: Program, before: Program) -> None:
    """Check that every value has a type, that types that are new since `before` follow from the operands, that operands
    are computed before they are used, and that outputs have their declared types."""
    for node in all_nodes(program.graph):
        if node.op == "call_function" and "val" not in node.meta:
            raise TransformError(f"{node.name} ({target_text(node.target)}) has no type.")
    program.graph.lint()
    check_types(program, before)


def check_contract(step: TransformStep, before: Program, applied: TransformResult) -> None:
    """Raise an error if the count is not the expected one, or if anchors are present and no site matched."""
    expect = step.transform.options.expect
    if expect == "any":
        return
    if expect is not None:
        wanted = expected_count(expect, before)
        if applied.sites != wanted:
            remedy = f"If this count is right, set {step.key}.expect; `inlay config MODEL` shows where it was set."
            raise ContractError(
                f"{step.key} matched {applied.sites} sites, expected {wanted} ({expect}).",
                f"{_nearest_misses_text(step, before, applied)} {remedy}".strip(),
            )
    elif not applied.sites:
        anchors = [name for name in step.transform.anchors if before.op_counts().get(name)]
        if anchors:
            raise ContractError(
                f"{step.key} matched nothing although the program has {', '.join(anchors)}.",
                _nearest_misses_text(step, before, applied) or "If this is right, set expect: any with a reason.",
            )


def _nearest_misses_text(step: TransformStep, before: Program, applied: TransformResult) -> str:
    """Return the nearest misses as text. They are searched only when a contract failed."""
    if isinstance(step.transform, Rule):
        from inlay.rewrite.near_misses import find_near_misses

        best: Sequence[Refusal] = find_near_misses(before, step.transform).misses[:3]
    else:
        best = sorted(applied.misses, key=lambda miss: -miss.matched / max(miss.pattern_nodes, 1))[:3]
    return " ".join(
        f"Nearest: {miss.root} ({miss.matched} of {miss.pattern_nodes} nodes): {miss.reason}." for miss in best
    )


def expected_count(expect: int | str, program: Program) -> int:
    """Return the value of `expect`, which may be an expression of the model's facts."""
    facts = {name: fact.value for name, fact in program.facts.items()}

    def lookup(name: str) -> int:
        if name not in facts:
            raise UsageError(f"expect: {expect!r} uses {name}, which is not a known fact.", suggest(name, facts))
        return facts[name]

    try:
        return int(evaluate(str(expect), lookup))
    except (SyntaxError, KeyError) as error:
        raise UsageError(f"expect: {expect!r} is not a number, an expression of facts, or any.") from error
