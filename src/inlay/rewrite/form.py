"""A tensor as a function of its index, and the arithmetic that operators on such tensors are written in.

Arithmetic is followed as arithmetic of integers, so every number on the way must be one that its dtype holds exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from inlay.rewrite.inequalities import (
    ALWAYS,
    NEVER,
    Formula,
    Linear,
    UndecidedError,
    Variable,
    all_of,
    at_least_zero,
    impossible,
    inequalities,
    negated,
    replaced,
    some_of,
)
from inlay.rewrite.schema import normalised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inlay.rewrite.forms import Forms

LONGEST = 2**22
"""No size is larger: a mask of that many rows and columns takes 16 TiB. So float32 holds sums of positions exactly."""
_MOST_CASES, _MOST_PARTS = 64, 4096

Number: TypeAlias = Linear | float
"""What a tensor holds in one case: a sum of indexes and sizes; or a constant that is infinite or no integer."""
Case: TypeAlias = tuple[Formula, Number]
ONE, ZERO = Linear((), 1), Linear()
SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class UnknownFormError(Exception):
    """Why the form of a tensor is not known."""


@dataclass(frozen=True)
class Form:
    """A tensor as a function of its index: in each case (exactly one applies) a number."""

    dtype: torch.dtype
    shape: tuple[Linear, ...]
    cases: tuple[Case, ...]

    @property
    def nonzero(self) -> Formula:
        """Where it is not 0."""
        return some_of(all_of((where, not_zero(number))) for where, number in self.cases)


def domain(shape: Sequence[Linear]) -> list[Linear]:
    """What is known of the index of a tensor of this shape."""
    known = []
    for axis, size in enumerate(shape, -len(shape)):
        if size != ONE:  # the only index is 0, and stands nowhere
            known += [Linear.of(axis), size - Linear.of(axis) - 1]
    return known


class Call:
    """One call: its arguments by name, its type, and what its result is made with."""

    def __init__(self, forms: Forms, node: fx.Node) -> None:
        self.forms, self.node = forms, node
        self.given: dict[str, Any] = dict(normalised(node))
        value = node.meta["val"]
        self.dtype: torch.dtype = value.dtype
        self.shape = _shape(value)

    def form(self, name: str) -> Form:
        """A tensor that was given."""
        return self.forms.known(self.given[name])

    def operand(self, name: str) -> Form:
        """A tensor or a number that was given, as a tensor."""
        value = self.given[name]
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            return self.forms.known(value)
        return Form(scalar_dtype(held(value)), (), ((ALWAYS, number(value)),))

    def made(self, cases: Iterable[Case], shape: Sequence[Linear] | None = None) -> Form:
        """The result: equal numbers are one case, cases that no index reaches are none, every number is exact."""
        shape = self.shape if shape is None else tuple(shape)
        alone: dict[Variable, Linear] = {
            axis: ZERO for axis, size in enumerate(shape, -len(shape)) if size == ONE
        }  # an axis of size 1 has one index
        where: dict[Number, Formula] = {}
        for formula, each in cases:
            if alone:
                formula, each = replaced(formula, alone), each.at(alone) if isinstance(each, Linear) else each
            if formula != NEVER:
                where[each] = some_of((where[each], formula)) if each in where else formula
        if len(where) > 1 and self.dtype != torch.bool:
            known = domain(shape)
            where = {each: formula for each, formula in where.items() if not impossible(known, formula)}
        if len(where) > _MOST_CASES or sum(1 for each in where.values() for _ in inequalities(each)) > _MOST_PARTS:
            raise UndecidedError
        if len(where) == 1:
            where = dict.fromkeys(where, ALWAYS)
        for each in where:
            self.exact(each, self.dtype, shape)
        return Form(self.dtype, shape, tuple((formula, each) for each, formula in where.items()))

    def made_true(self, formula: Formula) -> Form:
        """The result, a boolean: true where this holds."""
        return self.made(((formula, ONE), (negated(formula), ZERO)))

    def exact(self, each: Number, dtype: torch.dtype, shape: Sequence[Linear]) -> None:
        """Raise unless a tensor of this dtype holds the number exactly, at every index and length."""
        if not isinstance(each, Linear):
            if not dtype.is_floating_point:
                raise UnknownFormError(f"{each} is no integer")
            if math.isfinite(each) and _rounded(each, dtype) != each:
                raise UnknownFormError(f"{_short(dtype)} does not hold {each} exactly")
            return
        low, high = self.forms.bounds(each, shape)
        least, most = _exact_range(dtype)
        if not (least <= low and high <= most) and not (not each.terms and _representable(each.constant, dtype)):
            if math.isinf(low) or math.isinf(high):
                raise UnknownFormError(f"how large {each} may be is not known")
            raise UnknownFormError(f"{_short(dtype)} does not hold {each} exactly at every length")

    def cast(self, form: Form, dtype: torch.dtype) -> tuple[Case, ...]:
        """The cases of a tensor in another dtype, if that changes no number."""
        if dtype == torch.bool and form.dtype != torch.bool:
            return (form.nonzero, ONE), (negated(form.nonzero), ZERO)
        for _, each in form.cases:
            self.exact(each, dtype, form.shape)
        return form.cases

    def broadcast(self, *forms: Form) -> None:
        """Raise unless these have the result's sizes where they are not 1: axes count from the end."""
        for form in forms:
            for axis in range(-len(form.shape), 0):
                if form.shape[axis] not in (ONE, self.shape[axis]):
                    raise UnknownFormError(f"a size of {form.shape[axis]} meets one of {self.shape[axis]}")

    def moved(self, form: Form, values: Mapping[Variable, Linear]) -> Form:
        """The result, which at its own index is what `form` is at the index `values`."""
        return self.made(
            (replaced(formula, values), each.at(values) if isinstance(each, Linear) else each)
            for formula, each in form.cases
        )

    def combined(self, combine: Callable[..., Number], *operands: tuple[Case, ...]) -> Form:
        """The result of a function of numbers, in every combination of the operands' cases."""
        return self.made(
            (all_of(formula for formula, _ in chosen), combine(*(each for _, each in chosen)))
            for chosen in combinations(*operands)
        )


def number(value: Any) -> Number:
    """A constant or a symbolic size as a number."""
    value = held(value)
    if isinstance(value, torch.SymInt):
        return _linear(value)
    if isinstance(value, (bool, int)):
        return Linear((), int(value))
    if isinstance(value, float) and not math.isnan(value):
        return Linear((), int(value)) if math.isfinite(value) and value == int(value) else value
    raise UnknownFormError(f"{value} is not a constant or a size")


def integer(value: Any) -> Linear:
    """A constant or a symbolic size that must be an integer."""
    made = number(value)
    if not isinstance(made, Linear):
        raise UnknownFormError(f"{made} is no integer")
    return made


def held(value: Any) -> Any:
    """What an argument is: of a node, its value."""
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _linear(size: Any) -> Linear:
    return _expanded(size.node.expr) if isinstance(size, torch.SymInt) else Linear((), int(size))


@lru_cache(maxsize=4096)
def _expanded(expression: Any) -> Linear:
    """A size as a sum; what is not a sum of symbols in it counts as a symbol of which nothing is known."""
    terms: dict[Variable, int] = {}
    constant = 0
    for term, factor in expression.expand().as_coefficients_dict().items():
        if term.is_number and (term * factor).is_Integer:
            constant += int(term * factor)
        elif factor.is_Integer:
            terms[str(term)] = int(factor)
        else:
            terms[str(term * factor)] = 1
    return Linear.total(terms, constant)


def _shape(value: torch.Tensor) -> tuple[Linear, ...]:
    return tuple(_linear(size) for size in value.shape)


def _exact_range(dtype: torch.dtype) -> tuple[float, float]:
    """The integers between these are all held exactly."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        whole = 2 / torch.finfo(dtype).eps
        return -whole, whole
    if dtype.is_complex:
        return 1, 0
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _representable(constant: int, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and abs(constant) < 2**1024 and _rounded(float(constant), dtype) == constant


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype).item())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scalar_dtype(value: Any) -> torch.dtype:
    """The dtype of a tensor made of a Python number."""
    if isinstance(value, bool):
        return torch.bool
    return torch.float64 if isinstance(value, float) else torch.int64


def not_zero(each: Number) -> Formula:
    """Where a number is not 0."""
    if not isinstance(each, Linear):
        return ALWAYS
    return some_of((at_least_zero(each - 1), at_least_zero(-each - 1)))


def combinations(*operands: tuple[Case, ...]) -> Iterable[tuple[Case, ...]]:
    """One case of each operand, in every combination."""
    if math.prod(len(cases) for cases in operands) > _MOST_CASES**2:
        raise UndecidedError
    return product(*operands)


def type_of(value: Any) -> tuple[torch.dtype, int | None]:
    """The dtype and the rank of an operand; no rank for what is no tensor."""
    value = held(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return scalar_dtype(value), None


@lru_cache
def common_dtype(*types: tuple[torch.dtype, int | None]) -> torch.dtype:
    """What operands are converted to before they are compared."""
    values: list[Any] = [
        {torch.bool: True, torch.int64: 1}.get(dtype, 1.0) if rank is None else torch.ones((1,) * rank, dtype=dtype)
        for dtype, rank in types
    ]
    return torch.result_type(*values)
