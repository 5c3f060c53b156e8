"""The effect of each transform on the results, measured against a float64 reference."""

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
"""Largest growth of the error that rounding explains; the old error counts as at least epsilon."""
_MAX_DEVIATIONS = 3


class Change(StrEnum):
    """How a transform changed the results of a program."""

    NONE = "none"
    MATCH_LOSS = "match loss"
    METADATA_LOSS = "metadata loss"
    MORE_ACCURATE = "rounding, nearer"
    LESS_ACCURATE = "rounding, farther"
    MISTYPED = "wrong type"
    """A replacement has another type than the original, or a value has another type than its node declares."""
    WRONG = "wrong"


FAILURES = (Change.WRONG, Change.MISTYPED, Change.MATCH_LOSS)
"""Changes that are failures, whatever numerics a transform declares."""


@dataclass(frozen=True)
class NodeDeviation:
    """A value with a large difference before and after a transform."""

    node: str
    source: str
    error: float


@dataclass(frozen=True)
class NumericsVerdict:
    """The effect of one transform on the results."""

    transform: str
    sites: int
    change: Change
    difference: float
    """Largest difference from the previous program, relative to the largest result."""
    error_before: float
    error_after: float
    """Relative root mean square error against the float64 reference, before and after."""
    reason: str = ""
    worst: tuple[NodeDeviation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON data."""
        return {**vars(self), "worst": [vars(each) for each in self.worst]}


@dataclass(frozen=True)
class _RunResult:
    """The results of a program for all inputs, nodes with a wrong declared type, and the error if it failed."""

    results: list[Any]
    type_errors: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True)
class _EdgeCase:
    """Unusual inputs, the float64 results of the captured program for them, and the results of the last program."""

    name: str
    inputs: Mapping[str, Any]
    reference: list[Any]
    last: _RunResult


@dataclass
class NumericsCheck:
    """An instrument that runs the program after each transform that changed it and collects `verdicts`."""

    expected_sites: Mapping[str, int] = field(default_factory=dict)
    """Expected number of sites of each transform, from a lock."""
    seed: int = 0
    rounds: int = 4
    """Number of random inputs whose errors are combined; a single one may be more accurate by chance.

    Other sizes and large numbers are also checked for wrong results."""
    verdicts: list[NumericsVerdict] = field(default_factory=list)
    interpreter: ProgramInterpreter = field(default_factory=ProgramInterpreter)

    def before(self, transform: Transform, program: Program) -> None:
        """Compute the float64 reference from the first program."""
        if not hasattr(self, "_inputs"):
            self._inputs = [random_inputs(program, self.seed + each) for each in range(self.rounds)]
            self._reference = [
                each for given in self._inputs for each in self.interpreter(program, given, compute_dtype=torch.float64)
            ]
            self._last = self._run(program, self._inputs)
            if self._last.error:
                raise ProgramError(f"The program fails before the transforms run: {self._last.error}.")
            self._edge_cases = list(self._make_edge_cases(program))
            self._program = program

    def _make_edge_cases(self, program: Program) -> Iterator[_EdgeCase]:
        """Yield large numbers and other sizes that the program accepts."""
        given = {"large numbers": random_inputs(program, self.seed, scale=100.0)}
        for sizes in other_sizes(program):
            text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            given[text] = random_inputs(program, self.seed, sizes)
        for what, inputs in given.items():
            last = self._run(program, [inputs])
            if not last.error:
                yield _EdgeCase(what, inputs, self.interpreter(program, inputs, compute_dtype=torch.float64), last)

    def after(self, transform: Transform, program: Program, record: TransformRecord) -> None:
        """Compare the results and classify the change."""
        if not record.was_applied or self._last.error:
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
                verdict = replace(verdict, change=Change.MATCH_LOSS, reason=f"{lost} fewer sites than expected")
        if record.sites or verdict.reason:
            self.verdicts.append(verdict)

    def _check_edge_cases(self, verdict: NumericsVerdict, program: Program) -> NumericsVerdict:
        for place, corner in enumerate(self._edge_cases):
            run = self._run(program, [corner.inputs])
            if run.error:
                why = f"{corner.name}: the program fails: {run.error}"
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
            why = f"the program fails: {run.error}"
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
            change, reason = Change.METADATA_LOSS, f"{lost} calls lost their source location"
        elif difference:
            change = Change.MORE_ACCURATE if after <= before else Change.LESS_ACCURATE
        worst = self._find_deviations(program) if change in (Change.WRONG, Change.LESS_ACCURATE) else ()
        return NumericsVerdict(record.key, record.sites, change, difference, before, after, reason, worst)

    def _find_deviations(self, program: Program) -> tuple[NodeDeviation, ...]:
        """Return the first value that differs between both programs, and those that differ most, by name."""
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
    """Return whether results changed by more than rounding, measured against the float64 reference."""
    if [_shape(each) for each in before] != [_shape(each) for each in after]:
        return True
    if _has_new_nonfinite(before, after, reference):
        return True
    return _error(after, reference) > _MAX_ERROR_GROWTH * max(_error(before, reference), _epsilon(after))


def _has_new_nonfinite(before: Sequence[Any], after: Sequence[Any], referee: Sequence[Any]) -> bool:
    """Return whether a non-finite value appeared or vanished, unless the old result or the reference has it too."""
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
    """Return a mask of where two values are equal or both NaN."""
    return (one == two) | (one.isnan() & two.isnan())


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)


def _relative_difference(one: Any, two: Any) -> float:
    """Return the largest difference relative to the largest value; infinite if shapes differ or only one is finite."""
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
    """Return the root mean square error relative to the reference, over results that are finite in both."""
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
    """Return how many more calls than before have no source location."""

    def silent(program: Program) -> int:
        return sum(
            1
            for node in all_nodes(program.graph)
            if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
            if not node.meta.get(SOURCE) and not node.meta.get(MODULE)
        )

    return max(0, silent(after) - silent(before))
