"""What each transform did to the numbers, held against a referee of higher precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ProgramError, one_line
from inlay.insight.interpreter import ProgramInterpreter, other_sizes, random_inputs
from inlay.program.graphs import MODULE, SOURCE, all_nodes
from inlay.program.type_checks import RunTypeChecker
from inlay.rewrite.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pass_manager import TransformRecord

_MAX_ERROR_GROWTH = 4.0
"""Errors that grow by more than this factor, beyond a few roundings, are no rounding."""
_MAX_DEVIATIONS = 3


class Change(StrEnum):
    """What became of the results of a program."""

    NONE = "none"
    MATCH_LOSS = "match loss"
    METADATA_LOSS = "metadata loss"
    MORE_ACCURATE = "rounding, nearer"
    LESS_ACCURATE = "rounding, farther"
    MISTYPED = "wrong type"
    """A replacement of another type than what it replaces, or a value that is not of the type its node states."""
    WRONG = "wrong"


FAILURES = (Change.WRONG, Change.MISTYPED, Change.MATCH_LOSS)
"""Changes that nobody wants, whatever a transform says about its numerics."""


@dataclass(frozen=True)
class NodeDeviation:
    """A value that differs most before and after a transform."""

    node: str
    source: str
    error: float


@dataclass(frozen=True)
class NumericsVerdict:
    """How one transform changed the results."""

    transform: str
    sites: int
    change: Change
    difference: float
    """Largest difference to the program before it, relative to the largest result."""
    error_before: float
    error_after: float
    """Root mean square error against the referee, relative to the results, before and after."""
    reason: str = ""
    worst: tuple[NodeDeviation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        return {**vars(self), "worst": [vars(each) for each in self.worst]}


@dataclass(frozen=True)
class _RunResult:
    """What a program returned for all inputs, which nodes are not what they state, and why it could not be computed."""

    results: list[Any]
    type_errors: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True)
class _EdgeCase:
    """Unusual inputs, what the first program gives for them in higher precision, and what the last one gave."""

    name: str
    inputs: Mapping[str, Any]
    reference: list[Any]
    last: _RunResult


@dataclass
class NumericsCheck:
    """An instrument: runs the program after each transform that changed it. What it saw is in `verdicts`."""

    expected_sites: Mapping[str, int] = field(default_factory=dict)
    """Sites that each transform had before, from a lock."""
    seed: int = 0
    rounds: int = 4
    """Of how many random inputs the errors are taken together: one alone may be nearer by luck.

    Beside them, wrong results are looked for at other sizes and with large numbers."""
    verdicts: list[NumericsVerdict] = field(default_factory=list)
    interpreter: ProgramInterpreter = field(default_factory=ProgramInterpreter)

    def before(self, transform: Transform, program: Program) -> None:
        """The first program is what the others are held against; the referee computes it precisely."""
        if not hasattr(self, "_inputs"):
            self._inputs = [random_inputs(program, self.seed + each) for each in range(self.rounds)]
            self._reference = [
                each for given in self._inputs for each in self.interpreter(program, given, compute_dtype=torch.float64)
            ]
            self._last = self._run(program, self._inputs)
            self._edge_cases = list(self._make_edge_cases(program))
            self._program = program

    def _make_edge_cases(self, program: Program) -> Iterator[_EdgeCase]:
        """Large numbers and other sizes, as far as the program takes them."""
        given = {"large numbers": random_inputs(program, self.seed, scale=100.0)}
        for sizes in other_sizes(program):
            text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            given[text] = random_inputs(program, self.seed, sizes)
        for what, inputs in given.items():
            last = self._run(program, [inputs])
            if not last.error:
                yield _EdgeCase(what, inputs, self.interpreter(program, inputs, compute_dtype=torch.float64), last)

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Compare, and classify the change."""
        if record.status != "ran" or self._last.error:
            return
        refused = [each.reason for each in record.misses if Reason.parse(each.reason)[0] is Reason.REPLACEMENT]
        lost = self.expected_sites.get(record.key, record.sites) - record.sites
        verdict = NumericsVerdict(record.key, record.sites, Change.NONE, 0.0, 0.0, 0.0)
        if record.sites:
            run = self._run(program, self._inputs)
            verdict = self._classify(record, run, program)
            if verdict.change not in FAILURES:
                verdict = self._check_edge_cases(verdict, program)
            self._last, self._program = run, program
        if verdict.change not in (Change.WRONG, Change.MISTYPED):
            if refused:
                text = f"{refused[0]} ({len(refused)} sites refused)"
                verdict = replace(verdict, change=Change.MISTYPED, reason=text)
            elif lost > 0:
                verdict = replace(verdict, change=Change.MATCH_LOSS, reason=f"{lost} sites fewer")
        if record.sites or verdict.reason:
            self.verdicts.append(verdict)

    def _check_edge_cases(self, verdict: NumericsVerdict, program: Program) -> NumericsVerdict:
        for place, corner in enumerate(self._edge_cases):
            run = self._run(program, [corner.inputs])
            if run.error:
                why = f"{corner.name}: the program cannot be computed: {run.error}"
                return replace(verdict, change=Change.WRONG, error_after=math.inf, reason=why)
            if is_wrong(corner.last.results, run.results, corner.reference):
                errors = [_error(each, corner.reference) for each in (corner.last.results, run.results)]
                why = f"{corner.name}: the error grew from {errors[0]:.1e} to {errors[1]:.1e}"
                return replace(verdict, change=Change.WRONG, reason=why)
            self._edge_cases[place] = replace(corner, last=run)
        return verdict

    def _run(self, program: Program, rounds: Sequence[Mapping[str, Any]]) -> _RunResult:
        seen, results = RunTypeChecker(program.types), []
        try:
            for inputs in rounds:
                given = {
                    name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()
                }
                results += self.interpreter(program, given, on_value=seen.check)
                _check_inputs_unchanged(inputs, given)
        except Exception as error:
            return _RunResult([], seen.mismatches, one_line(error) or type(error).__name__)
        return _RunResult(results, seen.mismatches)

    def _classify(self, record: TransformRecord, run: _RunResult, program: Program) -> NumericsVerdict:
        verdict = NumericsVerdict(record.key, record.sites, Change.NONE, 0.0, 0.0, 0.0)
        last, results = self._last.results, run.results
        wrong = [text for name, text in run.type_errors.items() if name not in self._last.type_errors]
        if wrong:
            return replace(verdict, change=Change.MISTYPED, reason=wrong[0])
        if run.error:
            why = f"the program cannot be computed: {run.error}"
            return replace(verdict, change=Change.WRONG, error_after=math.inf, reason=why)
        difference = max((_relative_difference(one, two) for one, two in zip(last, results, strict=True)), default=0.0)
        before, after = (_error(each, self._reference) for each in (last, results))
        types = [(_type(one), _type(two)) for one, two in zip(last, results, strict=True)]
        change, reason = Change.NONE, ""
        if is_wrong(last, results, self._reference):
            change, reason = Change.WRONG, f"the error grew from {before:.1e} to {after:.1e}"
            if _has_new_nonfinite(last, results, self._reference):
                after, reason = math.inf, "not finite"
        elif any(one != two for one, two in types):
            one, two = next(pair for pair in types if pair[0] != pair[1])
            change, reason = Change.METADATA_LOSS, f"{one} became {two}"
        elif (lost := _lost_sources(self._program, program)) and difference == 0:
            change, reason = Change.METADATA_LOSS, f"{lost} calls do not say any more where they come from"
        elif difference:
            change = Change.MORE_ACCURATE if after <= before else Change.LESS_ACCURATE
        worst = self._find_deviations(program) if change in (Change.WRONG, Change.LESS_ACCURATE) else ()
        return NumericsVerdict(record.key, record.sites, change, difference, before, after, reason, worst)

    def _find_deviations(self, program: Program) -> tuple[NodeDeviation, ...]:
        """The values of both programs, by name, that differ most; the first one is where it begins."""
        values: dict[str, torch.Tensor] = {}
        found: list[tuple[float, int, fx.Node]] = []

        def keep(node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[node.name] = value

        def compare(node: fx.Node, value: Any) -> None:
            other = values.get(node.name)
            if isinstance(value, torch.Tensor) and other is not None and other.shape == value.shape:
                error = _relative_difference(other, value)
                if error:
                    found.append((error, len(found), node))

        self.interpreter(self._program, self._inputs[0], on_value=keep)
        self.interpreter(program, self._inputs[0], on_value=compare)
        worst = sorted(found, key=lambda each: (-each[0], each[1]))[:_MAX_DEVIATIONS]
        first = found[:1]
        chosen = list(dict.fromkeys((*first, *worst)))
        return tuple(NodeDeviation(node.name, str(node.meta.get(SOURCE, "")), error) for error, _, node in chosen)


def _check_inputs_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and not bool(_equal_or_nan(value, after[name]).all()):
            raise ProgramError(f"it writes to its input {name}.")


def is_wrong(before: Sequence[Any], after: Sequence[Any], reference: Sequence[Any]) -> bool:
    """Whether results differ from what they were by more than rounding, as a referee sees it."""
    if [_shape(each) for each in before] != [_shape(each) for each in after]:
        return True
    if _has_new_nonfinite(before, after, reference):
        return True
    return _error(after, reference) > _MAX_ERROR_GROWTH * max(_error(before, reference), _epsilon(after))


def _has_new_nonfinite(before: Sequence[Any], after: Sequence[Any], referee: Sequence[Any]) -> bool:
    """Whether a result is not finite where it was, or where it is and should not be, or is another kind of infinite."""
    for was, now, precise in zip(before, after, referee, strict=True):
        if not isinstance(was, torch.Tensor) or was.shape != now.shape or was.shape != precise.shape:
            continue
        odd = ~(was.isfinite() & now.isfinite() & precise.isfinite())
        was, now, precise = was[odd], now[odd], precise[odd]
        if not bool(
            (_equal_or_nan(now, was) | _equal_or_nan(now, precise) | now.isfinite() & precise.isfinite()).all()
        ):
            return True
    return False


def _equal_or_nan(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Where two values are equal, or neither is a number."""
    return (one == two) | (one.isnan() & two.isnan())


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)


def _relative_difference(one: Any, two: Any) -> float:
    """The largest difference, relative to the largest value; infinite when shapes differ, or only one is a number."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return 0.0 if one == two else math.inf
    if one.shape != two.shape:
        return math.inf
    if not one.numel():
        return 0.0
    left, right = one.double(), two.double()
    gap = (left - right).abs().masked_fill(_equal_or_nan(left, right), 0.0)
    scale = float(left.where(left.isfinite(), 0.0).abs().max()) or 1.0
    return float(gap.max()) / scale if bool(gap.isfinite().all()) else math.inf


def _error(results: Sequence[Any], referee: Sequence[Any]) -> float:
    """Root mean square error, relative to the referee, over all results that are finite in both."""
    total = scale = 0.0
    for one, two in zip(results, referee, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
            finite = one.isfinite() & two.isfinite()
            left, right = one[finite].double(), two[finite].double()
            total += float((left - right).square().sum())
            scale += float(right.square().sum())
    return math.sqrt(total / (scale or 1.0))


def _epsilon(results: Sequence[Any]) -> float:
    kinds = [each.dtype for each in results if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=1e-7)


def _type(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {list(value.stride())}"


def _lost_sources(before: Program, after: Program) -> int:
    """How many calls more than before do not say where in the model they come from."""

    def silent(program: Program) -> int:
        return sum(
            1
            for node in all_nodes(program.graph)
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
            if not node.meta.get(SOURCE) and not node.meta.get(MODULE)
        )

    return max(0, silent(after) - silent(before))
