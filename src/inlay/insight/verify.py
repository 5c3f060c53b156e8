"""What each transform did to the numbers, held against a referee of higher precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from inlay.insight.running import Runner, random_inputs
from inlay.program.graphs import MODULE, SOURCE, all_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    WRONG = "wrong"


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


@dataclass
class Verify:
    """An instrument: runs the program after each transform that changed it. What it saw is in `verdicts`."""

    expected: Mapping[str, int] = field(default_factory=dict)
    """Sites that each transform had before, from a lock."""
    seed: int = 0
    rounds: int = 4
    """Of how many random inputs the errors are taken together: one alone may be nearer by luck."""
    verdicts: list[Verdict] = field(default_factory=list)
    runner: Runner = field(default_factory=Runner)

    def before(self, step: Transform, program: Program) -> None:
        """The first program is what the others are held against; the referee computes it precisely."""
        if not hasattr(self, "_inputs"):
            self._inputs = [random_inputs(program, self.seed + each) for each in range(self.rounds)]
            self._referee = self._run(program, torch.float64)
            self._results = self._run(program)
            self._program = program

    def after(self, step: Transform, program: Program, record: Record) -> None:
        """Compare, and classify the change."""
        if record.status != "ran":
            return
        lost = self.expected.get(record.key, record.sites) - record.sites
        if not record.sites:
            if lost > 0:
                self.verdicts.append(Verdict(record.key, 0, Change.MATCH_LOSS, 0.0, 0.0, 0.0, f"{lost} sites fewer"))
            return
        results = self._run(program)
        verdict = self._judge(record, results, program)
        if lost > 0 and verdict.change is not Change.WRONG:
            verdict = Verdict(**{**vars(verdict), "change": Change.MATCH_LOSS, "reason": f"{lost} sites fewer"})
        self.verdicts.append(verdict)
        self._results, self._program = results, program

    def _run(self, program: Program, precise: torch.dtype | None = None) -> list[Any]:
        return [each for inputs in self._inputs for each in self.runner(program, inputs, precise=precise)]

    def _judge(self, record: Record, results: list[Any], program: Program) -> Verdict:
        difference = max((_relative(one, two) for one, two in zip(self._results, results, strict=True)), default=0.0)
        before, after = (_error(each, self._referee) for each in (self._results, results))
        types = [(_type(one), _type(two)) for one, two in zip(self._results, results, strict=True)]
        change, reason = Change.NONE, ""
        if is_wrong(self._results, results, self._referee):
            change = Change.WRONG
            finite = _all_finite(results) or not _all_finite(self._results)
            reason = f"the error grew from {before:.1e} to {after:.1e}" if finite else "not finite"
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


def is_wrong(before: Sequence[Any], after: Sequence[Any], referee: Sequence[Any]) -> bool:
    """Whether results differ from what they were by more than rounding, as a referee sees it."""
    if [_shape(each) for each in before] != [_shape(each) for each in after]:
        return True
    if not _all_finite(after):
        return _all_finite(before)
    return _error(after, referee) > _WRONG * max(_error(before, referee), _epsilon(after))


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)


def _relative(one: Any, two: Any) -> float:
    """The largest difference, relative to the largest value; infinite when shapes differ."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return 0.0 if one == two else float("inf")
    if one.shape != two.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    left, right = one.double(), two.double()
    scale = float(left.abs().max()) or 1.0
    return float((left - right).abs().max()) / scale


def _error(results: Sequence[Any], referee: Sequence[Any]) -> float:
    """Root mean square error, relative to the referee, over all results."""
    total = scale = 0.0
    for one, two in zip(results, referee, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and one.shape == two.shape:
            total += float((one.double() - two.double()).square().sum())
            scale += float(two.double().square().sum())
    return (total / scale) ** 0.5 if scale else 0.0


def _epsilon(results: Sequence[Any]) -> float:
    kinds = [each.dtype for each in results if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return max((torch.finfo(kind).eps for kind in kinds), default=1e-7)


def _all_finite(results: Sequence[Any]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in results if isinstance(each, torch.Tensor))


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
