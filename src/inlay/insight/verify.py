"""What each transform did to the numbers, held against a referee of higher precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ProgramError, one_line
from inlay.insight.running import Runner, other_sizes, random_inputs
from inlay.program.graphs import MODULE, SOURCE, all_nodes
from inlay.program.stated import Statements
from inlay.rewrite.reasons import Reason, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

    from inlay.program.program import Program
    from inlay.transforms.base import Transform
    from inlay.transforms.pipeline import Record

_WRONG = 4.0
"""Errors that grow by more than this factor, beyond a few roundings, are no rounding."""
_WORST = 3


class Change(StrEnum):
    """What became of the results of a program."""

    NONE = "none"
    MATCH_LOSS = "match loss"
    METADATA_LOSS = "metadata loss"
    NEARER = "rounding, nearer"
    FARTHER = "rounding, farther"
    MISTYPED = "wrong type"
    """A replacement of another type than what it replaces, or a value that is not of the type its node states."""
    WRONG = "wrong"


FAILURES = (Change.WRONG, Change.MISTYPED, Change.MATCH_LOSS)
"""Changes that nobody wants, whatever a transform says about its numerics."""


@dataclass(frozen=True)
class Deviation:
    """A value that differs most before and after a transform."""

    node: str
    source: str
    error: float


@dataclass(frozen=True)
class Verdict:
    """How one transform changed the results."""

    transform: str
    sites: int
    change: Change
    difference: float
    """Largest difference to the program before it, relative to the largest result."""
    before: float
    after: float
    """Root mean square error against the referee, relative to the results, before and after."""
    reason: str = ""
    worst: tuple[Deviation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        return {**vars(self), "worst": [vars(each) for each in self.worst]}


@dataclass(frozen=True)
class _Run:
    """What a program returned for all inputs, which nodes are not what they state, and why it could not be computed."""

    results: list[Any]
    wrong: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True)
class _Corner:
    """Unusual inputs, what the first program gives for them in higher precision, and what the last one gave."""

    what: str
    inputs: Mapping[str, Any]
    referee: list[Any]
    last: _Run


@dataclass
class Verify:
    """An instrument: runs the program after each transform that changed it. What it saw is in `verdicts`."""

    expected: Mapping[str, int] = field(default_factory=dict)
    """Sites that each transform had before, from a lock."""
    seed: int = 0
    rounds: int = 4
    """Of how many random inputs the errors are taken together: one alone may be nearer by luck.

    Beside them, wrong results are looked for at other sizes and with large numbers."""
    verdicts: list[Verdict] = field(default_factory=list)
    runner: Runner = field(default_factory=Runner)

    def before(self, step: Transform, program: Program) -> None:
        """The first program is what the others are held against; the referee computes it precisely."""
        if not hasattr(self, "_inputs"):
            self._inputs = [random_inputs(program, self.seed + each) for each in range(self.rounds)]
            self._referee = [
                each for given in self._inputs for each in self.runner(program, given, precise=torch.float64)
            ]
            self._last = self._run(program, self._inputs)
            self._corners = list(self._cornered(program))
            self._program = program

    def _cornered(self, program: Program) -> Iterator[_Corner]:
        """Large numbers and other sizes, as far as the program takes them."""
        given = {"large numbers": random_inputs(program, self.seed, scale=100.0)}
        for sizes in other_sizes(program):
            text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            given[text] = random_inputs(program, self.seed, sizes)
        for what, inputs in given.items():
            last = self._run(program, [inputs])
            if not last.error:
                yield _Corner(what, inputs, self.runner(program, inputs, precise=torch.float64), last)

    def after(self, step: Transform, program: Program, record: Record) -> None:
        """Compare, and classify the change."""
        if record.status != "ran" or self._last.error:
            return
        refused = [each.reason for each in record.misses if reason_of(each.reason) is Reason.REPLACEMENT]
        lost = self.expected.get(record.key, record.sites) - record.sites
        verdict = Verdict(record.key, record.sites, Change.NONE, 0.0, 0.0, 0.0)
        if record.sites:
            run = self._run(program, self._inputs)
            verdict = self._judge(record, run, program)
            if verdict.change not in FAILURES:
                verdict = self._look_into_corners(verdict, program)
            self._last, self._program = run, program
        if verdict.change not in (Change.WRONG, Change.MISTYPED):
            if refused:
                text = f"{refused[0]} ({len(refused)} sites refused)"
                verdict = replace(verdict, change=Change.MISTYPED, reason=text)
            elif lost > 0:
                verdict = replace(verdict, change=Change.MATCH_LOSS, reason=f"{lost} sites fewer")
        if record.sites or verdict.reason:
            self.verdicts.append(verdict)

    def _look_into_corners(self, verdict: Verdict, program: Program) -> Verdict:
        for place, corner in enumerate(self._corners):
            run = self._run(program, [corner.inputs])
            if run.error:
                why = f"{corner.what}: the program cannot be computed: {run.error}"
                return replace(verdict, change=Change.WRONG, after=math.inf, reason=why)
            if is_wrong(corner.last.results, run.results, corner.referee):
                errors = [_error(each, corner.referee) for each in (corner.last.results, run.results)]
                why = f"{corner.what}: the error grew from {errors[0]:.1e} to {errors[1]:.1e}"
                return replace(verdict, change=Change.WRONG, reason=why)
            self._corners[place] = replace(corner, last=run)
        return verdict

    def _run(self, program: Program, rounds: Sequence[Mapping[str, Any]]) -> _Run:
        seen, results = Statements(program.types), []
        try:
            for inputs in rounds:
                given = {
                    name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in inputs.items()
                }
                results += self.runner(program, given, on_value=seen.see)
                _refuse_changes(inputs, given)
        except Exception as error:
            return _Run([], seen.wrong, one_line(error) or type(error).__name__)
        return _Run(results, seen.wrong)

    def _judge(self, record: Record, run: _Run, program: Program) -> Verdict:
        verdict = Verdict(record.key, record.sites, Change.NONE, 0.0, 0.0, 0.0)
        last, results = self._last.results, run.results
        wrong = [text for name, text in run.wrong.items() if name not in self._last.wrong]
        if wrong:
            return replace(verdict, change=Change.MISTYPED, reason=wrong[0])
        if run.error:
            why = f"the program cannot be computed: {run.error}"
            return replace(verdict, change=Change.WRONG, after=math.inf, reason=why)
        difference = max((_relative(one, two) for one, two in zip(last, results, strict=True)), default=0.0)
        before, after = (_error(each, self._referee) for each in (last, results))
        types = [(_type(one), _type(two)) for one, two in zip(last, results, strict=True)]
        change, reason = Change.NONE, ""
        if is_wrong(last, results, self._referee):
            change, reason = Change.WRONG, f"the error grew from {before:.1e} to {after:.1e}"
            if _spoiled(last, results, self._referee):
                after, reason = math.inf, "not finite"
        elif any(one != two for one, two in types):
            one, two = next(pair for pair in types if pair[0] != pair[1])
            change, reason = Change.METADATA_LOSS, f"{one} became {two}"
        elif (lost := _lost_sources(self._program, program)) and difference == 0:
            change, reason = Change.METADATA_LOSS, f"{lost} calls do not say any more where they come from"
        elif difference:
            change = Change.NEARER if after <= before else Change.FARTHER
        worst = self._worst(program) if change in (Change.WRONG, Change.FARTHER) else ()
        return Verdict(record.key, record.sites, change, difference, before, after, reason, worst)

    def _worst(self, program: Program) -> tuple[Deviation, ...]:
        """The values of both programs, by name, that differ most; the first one is where it begins."""
        values: dict[str, torch.Tensor] = {}
        found: list[tuple[float, int, fx.Node]] = []

        def keep(node: fx.Node, value: Any) -> None:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[node.name] = value

        def compare(node: fx.Node, value: Any) -> None:
            other = values.get(node.name)
            if isinstance(value, torch.Tensor) and other is not None and other.shape == value.shape:
                error = _relative(other, value)
                if error:
                    found.append((error, len(found), node))

        self.runner(self._program, self._inputs[0], on_value=keep)
        self.runner(program, self._inputs[0], on_value=compare)
        worst = sorted(found, key=lambda each: (-each[0], each[1]))[:_WORST]
        first = found[:1]
        chosen = list(dict.fromkeys((*first, *worst)))
        return tuple(Deviation(node.name, str(node.meta.get(SOURCE, "")), error) for error, _, node in chosen)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if isinstance(value, torch.Tensor) and not bool(_alike(value, after[name]).all()):
            raise ProgramError(f"it writes to its input {name}.")


def is_wrong(before: Sequence[Any], after: Sequence[Any], referee: Sequence[Any]) -> bool:
    """Whether results differ from what they were by more than rounding, as a referee sees it."""
    if [_shape(each) for each in before] != [_shape(each) for each in after]:
        return True
    if _spoiled(before, after, referee):
        return True
    return _error(after, referee) > _WRONG * max(_error(before, referee), _epsilon(after))


def _spoiled(before: Sequence[Any], after: Sequence[Any], referee: Sequence[Any]) -> bool:
    """Whether a result is not finite where it was, or where it is and should not be, or is another kind of infinite."""
    for was, now, precise in zip(before, after, referee, strict=True):
        if not isinstance(was, torch.Tensor) or was.shape != now.shape or was.shape != precise.shape:
            continue
        odd = ~(was.isfinite() & now.isfinite() & precise.isfinite())
        was, now, precise = was[odd], now[odd], precise[odd]
        if not bool((_alike(now, was) | _alike(now, precise) | now.isfinite() & precise.isfinite()).all()):
            return True
    return False


def _alike(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Where two values are equal, or neither is a number."""
    return (one == two) | (one.isnan() & two.isnan())


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)


def _relative(one: Any, two: Any) -> float:
    """The largest difference, relative to the largest value; infinite when shapes differ, or only one is a number."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return 0.0 if one == two else math.inf
    if one.shape != two.shape:
        return math.inf
    if not one.numel():
        return 0.0
    left, right = one.double(), two.double()
    gap = (left - right).abs().masked_fill(_alike(left, right), 0.0)
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
