"""Run every transform on a program and compare results, written inputs and types before and after.

A transform with exact numerics must give the same numbers. For a transform that changes rounding, each value has its
own tolerance: the program before it runs several times, with every number that it reads or computes changed at random
in its last place (Monte Carlo arithmetic, Parker 1997). The deviation of these runs from the unperturbed run is the
sensitivity of a value, and the transform may deviate by a small multiple of it. A sum with cancellation thus gets a
large tolerance without affecting other values. Values computed from numbers that overflowed depend on the order of
computation and are not compared. NaN and infinity in inputs do not count as overflow, except for attention without a
mask that reads them, because torch's kernel turns NaN into 0 there.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import one_line
from inlay.program.bindings import Role
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import is_view, written_operands
from inlay.program.type_checks import RunTypeChecker
from inlay.program.weights import DerivedTensor
from inlay.testing.fuzz.generator import COND
from inlay.transforms.base import Numerics, find_transform, registry
from inlay.transforms.pass_manager import check_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inlay.program.program import Program

    Inputs = Mapping[str, torch.Tensor]

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
PERTURBED_RUNS = 6
"""Number of perturbed runs that measure the sensitivity of a value."""
TOLERANCE_FACTOR = 6.0
"""Allowed deviation of a transform, as a multiple of the measured sensitivity."""
MIN_ULPS = 2.0
"""Deviation in ULPs that is always allowed."""
QUANTIZATION_LEVELS = 127
"""Quantization steps of approximate weights for the largest value of a row."""


class InvalidProgramError(Exception):
    """The generated program fails or has values of undeclared types, so that there is nothing to compare with."""


@dataclass(frozen=True, eq=False)
class Failure:
    """A transform that changed the results of a program, or raised an error."""

    transform: str
    program: Program
    runs: Sequence[Inputs]
    problem: str


@dataclass
class FuzzCounts:
    """Counts of matches and misses of each transform, and of compared values."""

    matches: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    values: int = 0
    """Number of elements compared within a tolerance."""
    ill_conditioned: int = 0
    """Elements whose tolerance is more than a tenth of their value; their comparison shows little."""


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run."""

    values: list[torch.Tensor]
    """Outputs, then inputs after the run."""
    aliases: set[tuple[int, int]]
    """Which of them share storage."""
    type_error: str
    """The first node whose value does not have the declared type, as text."""
    has_overflow: list[bool]
    """Which of them are computed from numbers that overflowed."""


def check(
    program: Program, runs: Sequence[Inputs], transforms: Sequence[str] = (), tally: FuzzCounts | None = None
) -> Failure | None:
    """Run the transforms in sequence, each on the result of the previous one; return the first failure."""
    tally = FuzzCounts() if tally is None else tally
    expected = [_run_reference(program, inputs) for inputs in runs]
    copy: Program | None = None
    for name in transforms or registry():
        transform = find_transform(name)()
        copy = program.copy() if copy is None else copy
        try:
            applied = transform.apply(copy)
            check_metadata(applied.program, program)
        except Exception as error:
            return Failure(
                name, program, _add_derived_weights(program, runs), f"raised {type(error).__name__}: {error}"
            )
        tally.misses[name] += len(applied.misses)
        if not applied.sites:
            continue  # no match: the copy is unchanged and can be reused
        copy = None
        if transform.adds_inputs:
            continue  # results with added inputs cannot be compared here; such transforms have separate tests
        actual = []
        for inputs, before in zip(runs, expected, strict=True):
            try:
                after = compute(applied.program, inputs)
            except (RuntimeError, IndexError) as error:
                return Failure(
                    name, program, _add_derived_weights(program, runs), f"the transformed program fails: {error}"
                )
            problem = after.type_error or compare_results(program, inputs, before, after, transform.numerics, tally)
            if problem:
                return Failure(name, program, _add_derived_weights(program, runs), problem)
            actual.append(after)
        tally.matches[name] += applied.sites
        program, expected = applied.program, actual
    return None


def _run_reference(program: Program, inputs: Inputs) -> Result:
    try:
        result = compute(program, inputs)
    except (RuntimeError, IndexError) as error:
        raise InvalidProgramError(one_line(error)) from error
    if result.type_error:
        raise InvalidProgramError(result.type_error)
    return result


def _add_derived_weights(program: Program, runs: Sequence[Inputs]) -> list[Inputs]:
    """Return the inputs and the weights that earlier transforms derived from them."""
    made = {name: tensor.read() for name, tensor in program.tensors.items() if isinstance(tensor, DerivedTensor)}
    return [{**inputs, **made} for inputs in runs]


def compute(program: Program, inputs: Inputs) -> Result:
    """Run a program on copies of inputs."""
    return _NoisyInterpreter(program, inputs).result()


def values_of(program: Program, inputs: Inputs) -> dict[str, Any]:
    """Return the value of each node of the outermost graph, by name."""
    run = _NoisyInterpreter(program, inputs)
    run.result()
    return {node.name: run.values[node] for node in program.graph.nodes if node in run.values}


class _NoisyInterpreter:
    """Runs a program, optionally perturbed: every number read or computed is changed in its last place."""

    def __init__(
        self, program: Program, inputs: Inputs, noise: torch.Generator | None = None, numerics: Numerics | None = None
    ) -> None:
        self.program, self.noise, self.numerics = program, noise, numerics
        self.inputs = {
            name: deepcopy(value.detach()) for name, value in inputs.items()
        }  # a clone may have another memory layout
        self.parameters = {row.name for row in program.bindings.with_role(Role.PARAMETER)}
        self.values: dict[fx.Node, Any] = {}
        self.statements = RunTypeChecker(program.types)
        self.overflow_storages: set[int] = set()
        """Storages of values computed from numbers that overflowed."""

    def result(self) -> Result:
        torch.manual_seed(0)
        given = []
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                made = self.program.tensors.get(node.name)
                given.append(made.read() if isinstance(made, DerivedTensor) else self.inputs[node.name])
                self.statements.check(node, given[-1])
                self._perturb(given[-1], rough=node.name in self.parameters)
        found = self._graph(self.program.graph, given)
        every = [*found, *self.inputs.values()]
        places = list(map(_storage, every))
        shared = {(one, two) for two in range(len(every)) for one in range(two) if places[one] == places[two] != 0}
        wrong = next(iter(self.statements.mismatches.values()), "")
        return Result(
            [value.clone() for value in every], shared, wrong, [place in self.overflow_storages for place in places]
        )

    def _graph(self, graph: fx.Graph, given: Iterable[Any]) -> list[Any]:
        values, inputs = self.values, iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                assert graph.owning_module is not None
                values[node] = graph.owning_module.get_submodule(node.target)
            elif node.op == "output":
                return list(fx.map_arg(node.args[0], values.__getitem__))
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                if node.target is COND:
                    condition, yes, no, operands = args
                    values[node] = tuple(self._graph((yes if condition else no).graph, operands))
                    continue
                read = tree_leaves((args, kwargs))
                finite = _is_finite(read)
                values[node] = node.target(*args, **kwargs)
                made = [*tree_leaves(values[node]), *(values[each] for each in written_operands(node))]
                unclear = (finite and not _is_finite(made)) or (not finite and _may_drop_nan(node))
                if unclear or not self.overflow_storages.isdisjoint(_storages(read)):
                    self.overflow_storages |= _storages(made)
                self._look(node, values[node])
        return []

    def _look(self, node: fx.Node, value: Any) -> None:
        self.statements.check(node, value)
        if isinstance(value, torch.Tensor) and not is_view(node):
            self._perturb(value)

    def _perturb(self, value: torch.Tensor, *, rough: bool = False) -> None:
        """Change numbers in their last place, in place.

        Whole numbers do not change, because positions and other counts are exact. Numbers near the maximum of the dtype
        do not change either, because they stand for infinity.
        """
        if self.noise is None or not value.is_floating_point() or not value.numel() or 0 in value.stride():
            return
        limits, wide = torch.finfo(value.dtype), value.double()
        by = 2 * torch.rand(value.shape, generator=self.noise, dtype=torch.float64) - 1
        if rough and self.numerics is Numerics.APPROXIMATE:
            changed = wide + by * wide.abs().amax(-1, keepdim=True) / QUANTIZATION_LEVELS if value.dim() else wide
        else:
            changed = wide * (1 + by * limits.eps)
        size = wide.abs()
        exact = (wide == wide.round()) & (size < 1 / limits.eps) | ~(size < limits.max / 4)
        value.copy_(torch.where(exact, wide, changed))


def _measure_sensitivity(
    program: Program, inputs: Inputs, expected: Result, numerics: Numerics, runs: int = PERTURBED_RUNS
) -> list[torch.Tensor]:
    """Return the largest deviation of perturbed runs from the unperturbed run, per element; infinite where only one of
    two values is finite."""
    noise = torch.Generator().manual_seed(1)
    found = [torch.zeros(value.shape, dtype=torch.float64) for value in expected.values]
    for _ in range(runs):
        result = _NoisyInterpreter(program, inputs, noise, numerics).result()
        for index, (one, two) in enumerate(zip(expected.values, result.values, strict=True)):
            found[index] = torch.maximum(found[index], _gap(one, two))
    return found


def _gap(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of two values; infinite where they cannot be compared."""
    same = (one == two) | (one.isnan() & two.isnan())
    if not one.is_floating_point():
        return torch.where(same, 0.0, math.inf).double()
    apart = (one.double() - two.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where(same, torch.zeros_like(apart), apart)


def compare_results(
    program: Program, inputs: Inputs, before: Result, after: Result, numerics: Numerics, tally: FuzzCounts
) -> str:
    """Return how two results differ, if by more than the numerics of the transform allow."""
    gaps = []
    for index, (one, two) in enumerate(zip(before.values, after.values, strict=True)):
        if one.dtype != two.dtype or one.shape != two.shape:
            return f"value {index} was {_type(one)} and is now {_type(two)}"
        gaps.append(_gap(one, two))
        if numerics is Numerics.EXACT and bool(gaps[-1].any()):
            return f"value {index} differs by {gaps[-1].max():.3g}, but the transform declares exact numerics"
    if not after.aliases <= before.aliases:
        return (
            f"values {sorted(after.aliases - before.aliases)[0]} now share storage; outputs are numbered before inputs"
        )
    least = [_minimum_tolerance(value) for value in before.values]
    if all(bool((gap <= room).all()) for gap, room in zip(gaps, least, strict=True)):
        tally.values += sum(gap.numel() for gap in gaps)
        return ""
    strayed = _measure_sensitivity(program, inputs, before, numerics)
    if any(
        bool((gap > TOLERANCE_FACTOR * far + room).any()) for gap, far, room in zip(gaps, strayed, least, strict=True)
    ):
        # With near cancellation, a few runs may all miss the rounding that matters.
        strayed = _measure_sensitivity(program, inputs, before, numerics, 16 * PERTURBED_RUNS)
    for index, (one, gap) in enumerate(zip(before.values, gaps, strict=True)):
        room = TOLERANCE_FACTOR * strayed[index] + least[index]
        if before.has_overflow[index]:
            room.fill_(math.inf)
        size = one.double().abs()
        tally.values += gap.numel()
        tally.ill_conditioned += int((room > 0.1 * size).sum())
        if bool((gap > room).any()):
            at = int((gap / room).nan_to_num(0).argmax())
            near, value = (float(each.flatten()[at]) for each in (gap, one.double()))
            return (
                f"value {index} differs by {near:.3g} at {value:.6g}, where rounding explains {room.flatten()[at]:.3g}"
            )
    return ""


def _is_finite(values: Sequence[Any]) -> bool:
    """Return whether all tensors and constants are finite; a mask filled with the constant -inf is not an overflow."""
    return all(
        bool(each.isfinite().all()) if isinstance(each, torch.Tensor) else math.isfinite(each)
        for each in values
        if isinstance(each, (float, torch.Tensor))
    )


def _may_drop_nan(node: fx.Node) -> bool:
    """Return whether torch's kernel returns 0 for rows of NaN scores: attention without a mask does (torch 2.13), with
    a mask it returns NaN."""
    return node.target is _SDPA and dict(normalize_args(node))["attn_mask"] is None


def _storages(values: Sequence[Any]) -> set[int]:
    return {_storage(each) for each in values if isinstance(each, torch.Tensor) and each.numel()}


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage().data_ptr())


def _minimum_tolerance(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return torch.zeros(value.shape, dtype=torch.float64)
    limits = torch.finfo(value.dtype)
    return MIN_ULPS * limits.eps * value.double().abs().nan_to_num(0, 0, 0) + limits.tiny


def _type(value: torch.Tensor) -> str:
    return f"{value.dtype}{list(value.shape)}"
