"""Index functions: tensors as functions of their index, and the arithmetic for operators on them.

Arithmetic is integer arithmetic, so every intermediate number must be one that its dtype represents exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from inlay.analysis.masks.inequalities import (
    FALSE,
    TRUE,
    AffineExpr,
    Formula,
    UndecidedError,
    Variable,
    at_least_zero,
    conjunction,
    disjunction,
    is_unsatisfiable,
    iter_inequalities,
    negate,
    substitute,
)
from inlay.program.call_arguments import normalize_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from inlay.analysis.masks.derivation import IndexAnalysis

MAX_SIZE = 2**22
"""Upper bound of a size: such a square mask takes 16 TiB. So float32 represents sums of positions exactly."""
_MAX_CASES, _MAX_PARTS = 64, 4096

Number: TypeAlias = AffineExpr | float
"""The value in one case: a sum of indices and sizes, or a constant that is infinite or not an integer."""
ValueCase: TypeAlias = tuple[Formula, Number]
ONE, ZERO = AffineExpr((), 1), AffineExpr()
SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class UnknownIndexFunctionError(Exception):
    """Raised with the reason why the index function of a tensor is unknown."""


@dataclass(frozen=True)
class IndexFunction:
    """A tensor as a function of its index: a number for each case. Exactly one case applies to an index."""

    dtype: torch.dtype
    shape: tuple[AffineExpr, ...]
    cases: tuple[ValueCase, ...]

    @property
    def nonzero(self) -> Formula:
        """The formula of the indices where the tensor is not 0."""
        return disjunction(conjunction((where, not_zero(number))) for where, number in self.cases)


def domain(shape: Sequence[AffineExpr]) -> list[AffineExpr]:
    """Return the inequalities that hold for the indices of a tensor of this shape."""
    known = []
    for axis, size in enumerate(shape, -len(shape)):
        if size != ONE:  # the only index is 0, and no formula contains it
            known += [AffineExpr.from_variable(axis), size - AffineExpr.from_variable(axis) - 1]
    return known


class OperatorCall:
    """One call: its arguments by name, its type, and the methods that build its result."""

    def __init__(self, analysis: IndexAnalysis, node: fx.Node) -> None:
        self.analysis, self.node = analysis, node
        self.args: dict[str, Any] = dict(normalize_args(node))
        value = node.meta["val"]
        self.dtype: torch.dtype = value.dtype
        self.shape = _shape(value)

    def tensor(self, name: str) -> IndexFunction:
        """Return a tensor argument."""
        return self.analysis.lookup(self.args[name])

    def operand(self, name: str) -> IndexFunction:
        """Return a tensor or number argument as a tensor."""
        value = self.args[name]
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            return self.analysis.lookup(value)
        return IndexFunction(scalar_dtype(meta_value(value)), (), ((TRUE, to_number(value)),))

    def build(self, cases: Iterable[ValueCase], shape: Sequence[AffineExpr] | None = None) -> IndexFunction:
        """Build the result: merge equal numbers, drop cases that no index reaches, check that numbers are exact."""
        shape = self.shape if shape is None else tuple(shape)
        alone: dict[Variable, AffineExpr] = {
            axis: ZERO for axis, size in enumerate(shape, -len(shape)) if size == ONE
        }  # an axis of size 1 has one index
        where: dict[Number, Formula] = {}
        for formula, each in cases:
            if alone:
                formula, each = (
                    substitute(formula, alone),
                    each.substitute(alone) if isinstance(each, AffineExpr) else each,
                )
            if formula != FALSE:
                where[each] = disjunction((where[each], formula)) if each in where else formula
        if len(where) > 1 and self.dtype != torch.bool:
            known = domain(shape)
            where = {each: formula for each, formula in where.items() if not is_unsatisfiable(known, formula)}
        if len(where) > _MAX_CASES or sum(1 for each in where.values() for _ in iter_inequalities(each)) > _MAX_PARTS:
            raise UndecidedError
        if len(where) == 1:
            where = dict.fromkeys(where, TRUE)
        for each in where:
            self.check_exact(each, self.dtype, shape)
        return IndexFunction(self.dtype, shape, tuple((formula, each) for each, formula in where.items()))

    def build_boolean(self, formula: Formula) -> IndexFunction:
        """Build a boolean result that is true where the formula holds."""
        return self.build(((formula, ONE), (negate(formula), ZERO)))

    def check_exact(self, each: Number, dtype: torch.dtype, shape: Sequence[AffineExpr]) -> None:
        """Raise unless this dtype represents the number exactly, at every index and length."""
        if not isinstance(each, AffineExpr):
            if not dtype.is_floating_point:
                raise UnknownIndexFunctionError(f"{each} is not an integer")
            if math.isfinite(each) and _round_to_dtype(each, dtype) != each:
                raise UnknownIndexFunctionError(f"{_dtype_name(dtype)} cannot represent {each} exactly")
            return
        low, high = self.analysis.bounds(each, shape)
        least, most = _exact_range(dtype)
        if not (least <= low and high <= most) and not (not each.terms and _is_representable(each.constant, dtype)):
            if math.isinf(low) or math.isinf(high):
                raise UnknownIndexFunctionError(f"the range of {each} is unknown")
            raise UnknownIndexFunctionError(f"{_dtype_name(dtype)} cannot represent {each} exactly at every length")

    def cast(self, form: IndexFunction, dtype: torch.dtype) -> tuple[ValueCase, ...]:
        """Return the cases of a tensor in another dtype; raise if the cast may change a number."""
        if dtype == torch.bool and form.dtype != torch.bool:
            return (form.nonzero, ONE), (negate(form.nonzero), ZERO)
        for _, each in form.cases:
            self.check_exact(each, dtype, form.shape)
        return form.cases

    def check_broadcast(self, *forms: IndexFunction) -> None:
        """Raise unless every size of these is 1 or the result's size; axes are aligned from the end."""
        for form in forms:
            for axis in range(-len(form.shape), 0):
                if form.shape[axis] not in (ONE, self.shape[axis]):
                    raise UnknownIndexFunctionError(f"a size of {form.shape[axis]} is broadcast to {self.shape[axis]}")

    def reindex(self, form: IndexFunction, values: Mapping[Variable, AffineExpr]) -> IndexFunction:
        """Build the result that at each index equals `form` at the index given by `values`."""
        return self.build(
            (substitute(formula, values), each.substitute(values) if isinstance(each, AffineExpr) else each)
            for formula, each in form.cases
        )

    def combine(self, combine: Callable[..., Number], *operands: tuple[ValueCase, ...]) -> IndexFunction:
        """Build the result of a function of numbers, for every combination of the operands' cases."""
        return self.build(
            (conjunction(formula for formula, _ in chosen), combine(*(each for _, each in chosen)))
            for chosen in combinations(*operands)
        )


def to_number(value: Any) -> Number:
    """Return a constant or a symbolic size as a number."""
    value = meta_value(value)
    if isinstance(value, torch.SymInt):
        return _to_affine(value)
    if isinstance(value, (bool, int)):
        return AffineExpr((), int(value))
    if isinstance(value, float) and not math.isnan(value):
        return AffineExpr((), int(value)) if math.isfinite(value) and value == int(value) else value
    raise UnknownIndexFunctionError(f"{value} is not a constant or a size")


def to_integer(value: Any) -> AffineExpr:
    """Return a constant or a symbolic size as an integer expression; raise if it is not one."""
    made = to_number(value)
    if not isinstance(made, AffineExpr):
        raise UnknownIndexFunctionError(f"{made} is not an integer")
    return made


def meta_value(value: Any) -> Any:
    """Return an argument; for a node, its value."""
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _to_affine(size: Any) -> AffineExpr:
    return _expand_size(size.node.expr) if isinstance(size, torch.SymInt) else AffineExpr((), int(size))


@lru_cache(maxsize=4096)
def _expand_size(expression: Any) -> AffineExpr:
    """Return a size as a sum. A term that is not a symbol times an integer becomes an unconstrained symbol."""
    terms: dict[Variable, int] = {}
    constant = 0
    for term, factor in expression.expand().as_coefficients_dict().items():
        if term.is_number and (term * factor).is_Integer:
            constant += int(term * factor)
        elif factor.is_Integer:
            terms[str(term)] = int(factor)
        else:
            terms[str(term * factor)] = 1
    return AffineExpr.from_terms(terms, constant)


def _shape(value: torch.Tensor) -> tuple[AffineExpr, ...]:
    return tuple(_to_affine(size) for size in value.shape)


def _exact_range(dtype: torch.dtype) -> tuple[float, float]:
    """Return the range in which a dtype represents all integers exactly."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point:
        whole = 2 / torch.finfo(dtype).eps
        return -whole, whole
    if dtype.is_complex:
        return 1, 0
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _is_representable(constant: int, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and abs(constant) < 2**1024 and _round_to_dtype(float(constant), dtype) == constant


def _round_to_dtype(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype).item())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scalar_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a tensor created from a Python number."""
    if isinstance(value, bool):
        return torch.bool
    return torch.float64 if isinstance(value, float) else torch.int64


def not_zero(each: Number) -> Formula:
    """Return the formula of the indices where a number is not 0."""
    if not isinstance(each, AffineExpr):
        return TRUE
    return disjunction((at_least_zero(each - 1), at_least_zero(-each - 1)))


def combinations(*operands: tuple[ValueCase, ...]) -> Iterable[tuple[ValueCase, ...]]:
    """Return every combination of one case of each operand."""
    if math.prod(len(cases) for cases in operands) > _MAX_CASES**2:  # shortcut
        raise UndecidedError
    return product(*operands)


def type_of(value: Any) -> tuple[torch.dtype, int | None]:
    """Return the dtype and the rank of an operand; the rank of a number is None."""
    value = meta_value(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return scalar_dtype(value), None


@lru_cache
def common_dtype(*types: tuple[torch.dtype, int | None]) -> torch.dtype:
    """Return the dtype that operands are converted to before they are compared."""
    values: list[Any] = [
        {torch.bool: True, torch.int64: 1}.get(dtype, 1.0) if rank is None else torch.ones((1,) * rank, dtype=dtype)
        for dtype, rank in types
    ]
    return torch.result_type(*values)
