"""The operators that mask analysis supports: for each a function that derives its index function."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from inlay.analysis.masks.index_function import (
    ONE,
    ZERO,
    IndexFunction,
    Number,
    OperatorCall,
    UnknownIndexFunctionError,
    ValueCase,
    combinations,
    common_dtype,
    domain,
    not_zero,
    to_integer,
    to_number,
    type_of,
)
from inlay.analysis.masks.inequalities import (
    FALSE,
    TRUE,
    AffineExpr,
    Formula,
    Variable,
    at_least_zero,
    conjunction,
    disjunction,
    is_unsatisfiable,
    negate,
    substitute,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten


def _arange(call: OperatorCall) -> IndexFunction:
    start, step = to_integer(call.args.get("start", 0)), to_integer(call.args.get("step", 1))
    if step.terms:
        raise UnknownIndexFunctionError("its step is not a constant")
    to_integer(call.args["end"])
    return call.build([(TRUE, start + AffineExpr.from_variable(-1) * step.constant)])


def _fill(value: Any) -> Callable[[OperatorCall], IndexFunction]:
    def fill(call: OperatorCall) -> IndexFunction:
        each = to_number(call.args["fill_value"] if value is None else value)
        scalar = IndexFunction(torch.float64, (), ((TRUE, each),))
        return call.build(call.cast(scalar, call.dtype))

    return fill


def _identity(call: OperatorCall) -> IndexFunction:
    form = call.tensor("self")
    call.check_broadcast(form)
    return call.build(call.cast(form, call.dtype))


def _unsqueeze(call: OperatorCall) -> IndexFunction:
    form, new = call.tensor("self"), call.args["dim"]
    axes: dict[Variable, AffineExpr] = {}
    for axis in _axes(form):
        axes[axis] = AffineExpr.from_variable(axis if axis > new else axis - 1)
    return call.reindex(form, axes)


def _reshape(call: OperatorCall) -> IndexFunction:
    """Support reshapes that only add or remove axes of size 1."""
    form = call.tensor("self")
    old, new = ([axis for axis in range(-len(shape), 0) if shape[axis] != ONE] for shape in (form.shape, call.shape))
    if [form.shape[axis] for axis in old] != [call.shape[axis] for axis in new]:
        raise UnknownIndexFunctionError("it merges or splits axes")
    return call.reindex(form, {one: AffineExpr.from_variable(two) for one, two in zip(old, new, strict=True)})


def _permute(call: OperatorCall) -> IndexFunction:
    form = call.tensor("self")
    order: list[int] = list(_axes(form))
    if "dims" in call.args:
        order = call.args["dims"]
    else:
        one, two = (call.args["dim0"], call.args["dim1"]) if "dim0" in call.args else (-2, -1)
        if len(order) > 1:
            order[one], order[two] = order[two], order[one]
    return call.reindex(form, {old: AffineExpr.from_variable(new) for new, old in enumerate(order, -len(order))})


def _slice(call: OperatorCall) -> IndexFunction:
    form, axis = call.tensor("self"), call.args["dim"]
    start, step, size = to_integer(call.args["start"]), to_integer(call.args["step"]), form.shape[axis]
    if step.terms or start.terms or (start.constant < 0 and size.terms):
        raise UnknownIndexFunctionError("its start or step depends on a size")
    first = start.constant if start.constant >= 0 else max(0, size.constant + start.constant)
    return call.reindex(form, {axis: AffineExpr.from_variable(axis) * step.constant + first})


def _select(call: OperatorCall) -> IndexFunction:
    form, axis = call.tensor("self"), call.args["dim"]
    index = to_integer(call.args["index"])
    if index.terms:
        raise UnknownIndexFunctionError("its index depends on a size")
    axes: dict[Variable, AffineExpr] = {axis: index if index.constant >= 0 else form.shape[axis] + index}
    for each in range(-len(form.shape), axis):
        axes[each] = AffineExpr.from_variable(each + 1)
    return call.reindex(form, axes)


def _index(call: OperatorCall) -> IndexFunction:
    form, given = call.tensor("self"), list(call.args["indices"])
    given += [None] * (len(form.shape) - len(given))
    places = [place for place, each in enumerate(given) if each is not None]
    indexes = {place: call.analysis.lookup(given[place]) for place in places}
    if any(each.dtype in (torch.bool, torch.uint8) for each in indexes.values()):
        raise UnknownIndexFunctionError("it indexes with a mask")
    rank, inner = len(call.shape), max(len(each.shape) for each in indexes.values())
    together = places == list(range(places[0], places[-1] + 1))
    # The axes of the indices replace the indexed axes, or come first if the indexed axes are not adjacent.
    first = places[0] if together else 0
    kept = [place for place, each in enumerate(given) if each is None]
    spots = [spot for spot in range(rank) if not first <= spot < first + inner]
    axes: dict[Variable, AffineExpr] = {}
    for place, spot in zip(kept, spots, strict=True):
        axes[place - len(given)] = AffineExpr.from_variable(spot - rank)
    moved: dict[Variable, AffineExpr] = {
        axis: AffineExpr.from_variable(first + inner + axis - rank) for axis in range(-inner, 0)
    }
    cases: list[ValueCase] = []
    for chosen in combinations(*(each.cases for each in indexes.values())):
        for place, (_, at) in zip(places, chosen, strict=True):
            axes[place - len(given)] = _position(call, indexes[place], at).substitute(moved)
        reached = conjunction(substitute(formula, moved) for formula, _ in chosen)
        cases += [
            (
                conjunction((reached, substitute(formula, axes))),
                each.substitute(axes) if isinstance(each, AffineExpr) else each,
            )
            for formula, each in form.cases
        ]
    return call.build(cases)


def _position(call: OperatorCall, index: IndexFunction, at: Number) -> AffineExpr:
    assert isinstance(at, AffineExpr), "indices are integers"
    if call.analysis.bounds(at, index.shape)[0] < 0:
        raise UnknownIndexFunctionError(f"its index {at} may be negative")
    return at


def _concatenate(call: OperatorCall, forms: Sequence[IndexFunction], axis: int) -> IndexFunction:
    """Concatenate tensors along an axis."""
    cases: list[ValueCase] = []
    index, begin = AffineExpr.from_variable(axis), ZERO
    for form in forms:
        if len(form.shape) != len(forms[0].shape):
            raise UnknownIndexFunctionError("it concatenates tensors of different ranks")
        end = begin + form.shape[axis]
        here = conjunction((at_least_zero(index - begin), at_least_zero(end - index - 1)))
        values: dict[Variable, AffineExpr] = {axis: index - begin}
        for formula, each in call.cast(form, call.dtype):
            number = each.substitute(values) if isinstance(each, AffineExpr) else each
            cases.append((conjunction((here, substitute(formula, values))), number))
        begin = end
    shape = list(forms[0].shape)
    shape[axis] = begin
    return call.build(cases, shape)


def _cat(call: OperatorCall) -> IndexFunction:
    return _concatenate(call, [call.analysis.lookup(each) for each in call.args["tensors"]], call.args["dim"])


def _diff(call: OperatorCall) -> IndexFunction:
    if call.args["n"] != 1:
        raise UnknownIndexFunctionError("it computes differences of higher order")
    axis = call.args["dim"]
    names = [name for name in ("prepend", "self", "append") if call.args.get(name) is not None]
    whole = _concatenate(call, [call.tensor(name) for name in names], axis)
    if whole.dtype == torch.bool:
        raise UnknownIndexFunctionError("it computes differences of booleans")
    after: dict[Variable, AffineExpr] = {axis: AffineExpr.from_variable(axis) + 1}
    next_ones = [
        (substitute(where, after), each.substitute(after) if isinstance(each, AffineExpr) else each)
        for where, each in whole.cases
    ]
    return call.combine(lambda one, two: _sum(one, two, -1), tuple(next_ones), whole.cases)


def _cumsum(call: OperatorCall) -> IndexFunction:
    """Support cumulative sums of a constant."""
    form, axis = call.tensor("self"), call.args["dim"]
    if not form.shape:
        raise UnknownIndexFunctionError("it is a cumulative sum of a scalar")
    known = domain(form.shape)
    reached = [each for where, each in form.cases if not is_unsatisfiable(known, where)]
    if len(reached) != 1 or not isinstance(reached[0], AffineExpr) or reached[0].terms:
        raise UnknownIndexFunctionError("it is a cumulative sum of values that differ between positions")
    return call.build([(TRUE, (AffineExpr.from_variable(axis) + 1) * reached[0].constant)])


def _extreme(sign: int) -> Callable[[OperatorCall], IndexFunction]:
    """Support the largest (`sign` 1) or smallest value of a whole tensor that is one sum of indices."""

    def extreme(call: OperatorCall) -> IndexFunction:
        form = call.tensor("self")
        numbers = [number for _, number in form.cases if isinstance(number, AffineExpr)]
        if len(numbers) != 1 or len(form.cases) != 1:
            raise UnknownIndexFunctionError("it is the largest or smallest of values that are not one sum")
        if call.shape:
            raise UnknownIndexFunctionError("it is the largest or smallest value along an axis")
        (number,) = numbers
        factors = dict(number.terms)
        last = {axis: form.shape[axis] - 1 for axis in _axes(form)}
        ends: dict[Variable, AffineExpr] = {
            axis: last[axis] if factors.get(axis, 0) * sign > 0 else ZERO for axis in last
        }
        return call.build([(TRUE, number.substitute(ends))])

    return extreme


def _axes(form: IndexFunction) -> range:
    return range(-len(form.shape), 0)


def _sum(one: Number, two: Number, factor: int = 1) -> Number:
    if isinstance(one, AffineExpr) and isinstance(two, AffineExpr):
        return one + two * factor
    infinite = {each * sign for each, sign in ((one, 1), (two, factor)) if isinstance(each, float)}
    if len(infinite) == 1 and math.isinf(*infinite):
        return infinite.pop()
    raise UnknownIndexFunctionError("a constant in it is not an integer")


def _product(one: Number, two: Number) -> Number:
    if isinstance(one, AffineExpr) and isinstance(two, AffineExpr) and not (one.terms and two.terms):
        return one * two.constant if not two.terms else two * one.constant
    for each, other in ((one, two), (two, one)):
        infinite = isinstance(each, float) and math.isinf(each)
        if infinite and isinstance(other, AffineExpr) and not other.terms and other.constant:
            return each * other.constant
    raise UnknownIndexFunctionError("it is a product of positions, or has a factor that is not an integer")


def _add(sign: int, *names: str) -> Callable[[OperatorCall], IndexFunction]:
    def add(call: OperatorCall) -> IndexFunction:
        one, two = (call.operand(name) for name in names)
        call.check_broadcast(one, two)
        alpha = to_integer(call.args.get("alpha", 1))
        cases = [call.cast(each, call.dtype) for each in (one, two)]
        if call.dtype == torch.bool:  # a sum of booleans is their disjunction
            return call.build_boolean(disjunction((one.nonzero, two.nonzero)))
        if alpha != ONE:
            cases[1] = call.combine(lambda each: _product(each, alpha), cases[1]).cases
        return call.combine(lambda left, right: _sum(left, right, sign), *cases)

    return add


def _mul(call: OperatorCall) -> IndexFunction:
    one, two = call.operand("self"), call.operand("other")
    call.check_broadcast(one, two)
    return call.combine(_product, call.cast(one, call.dtype), call.cast(two, call.dtype))


def _neg(call: OperatorCall) -> IndexFunction:
    return call.combine(lambda each: _product(each, -ONE), call.cast(call.tensor("self"), call.dtype))


def _floor_divide(call: OperatorCall) -> IndexFunction:
    """Support quotients that are the same number at every index and size."""
    one, divisor = call.operand("self"), to_integer(call.args["other"])
    if call.args.get("rounding_mode", "floor") != "floor" or divisor.terms or divisor.constant <= 0:
        raise UnknownIndexFunctionError("it is not a floor division by a positive constant")
    call.check_exact(divisor, call.dtype, ())
    cases: list[ValueCase] = []
    for where, number in call.cast(one, call.dtype):
        if not isinstance(number, AffineExpr):
            raise UnknownIndexFunctionError(f"{number} is divided")
        low, high = (each // divisor.constant for each in call.analysis.bounds(number, one.shape))
        if low != high:
            limit = f", and sizes may be larger than {divisor}"
            raise UnknownIndexFunctionError(f"{number} // {divisor} differs between positions{limit}")
        cases.append((where, AffineExpr((), int(low))))
    return call.build(cases)


_COMPARISONS: dict[str, Callable[[AffineExpr], Formula]] = {
    "ge": at_least_zero,
    "gt": lambda gap: at_least_zero(gap - 1),
    "le": lambda gap: at_least_zero(-gap),
    "lt": lambda gap: at_least_zero(-gap - 1),
    "eq": lambda gap: conjunction((at_least_zero(gap), at_least_zero(-gap))),
    "ne": not_zero,
}


def _compare(name: str) -> Callable[[OperatorCall], IndexFunction]:
    def compare(call: OperatorCall) -> IndexFunction:
        one, two = call.operand("self"), call.operand("other")
        call.check_broadcast(one, two)
        dtype = common_dtype(type_of(call.args["self"]), type_of(call.args["other"]))
        return call.build_boolean(
            disjunction(
                conjunction((here, there, _relation(name, left, right)))
                for (here, left), (there, right) in combinations(call.cast(one, dtype), call.cast(two, dtype))
            )
        )

    return compare


def _relation(name: str, left: Number, right: Number) -> Formula:
    if isinstance(left, AffineExpr) and isinstance(right, AffineExpr):
        return _COMPARISONS[name](left - right)
    sides = [0.0 if isinstance(each, AffineExpr) else each for each in (left, right)]
    if any(side and not math.isinf(side) for side in sides):
        raise UnknownIndexFunctionError(f"{next(side for side in sides if side)} is not an integer")
    return TRUE if getattr(operator, name)(*sides) else FALSE


def _logical(
    combine: Callable[[Formula, Formula], Formula], *, any_dtype: bool
) -> Callable[[OperatorCall], IndexFunction]:
    def logic(call: OperatorCall) -> IndexFunction:
        one, two = call.operand("self"), call.operand("other")
        call.check_broadcast(one, two)
        if not any_dtype and {one.dtype, two.dtype} != {torch.bool}:
            raise UnknownIndexFunctionError("it is a bitwise operation on numbers")
        return call.build_boolean(combine(one.nonzero, two.nonzero))

    return logic


def _not(call: OperatorCall) -> IndexFunction:
    form = call.tensor("self")
    if form.dtype != torch.bool and call.node.target is aten.bitwise_not.default:
        raise UnknownIndexFunctionError("it is a bitwise operation on numbers")
    return call.build_boolean(negate(form.nonzero))


def _and(one: Formula, two: Formula) -> Formula:
    return conjunction((one, two))


def _or(one: Formula, two: Formula) -> Formula:
    return disjunction((one, two))


def _xor(one: Formula, two: Formula) -> Formula:
    return disjunction((conjunction((one, negate(two))), conjunction((negate(one), two))))


def _choose(call: OperatorCall, condition: Formula, then: IndexFunction, otherwise: IndexFunction) -> IndexFunction:
    cases = [(condition, call.cast(then, call.dtype)), (negate(condition), call.cast(otherwise, call.dtype))]
    return call.build((conjunction((where, formula)), each) for where, held in cases for formula, each in held)


def _where(call: OperatorCall) -> IndexFunction:
    condition, then, otherwise = (call.operand(name) for name in ("condition", "self", "other"))
    call.check_broadcast(condition, then, otherwise)
    return _choose(call, condition.nonzero, then, otherwise)


def _masked_fill(call: OperatorCall) -> IndexFunction:
    mask, then, otherwise = (call.operand(name) for name in ("mask", "value", "self"))
    call.check_broadcast(mask, then, otherwise)
    return _choose(call, mask.nonzero, then, otherwise)


def _triangle(sign: int) -> Callable[[OperatorCall], IndexFunction]:
    def keep(call: OperatorCall) -> IndexFunction:
        gap = AffineExpr.from_variable(-2) - AffineExpr.from_variable(-1) + to_integer(call.args["diagonal"])
        zero = IndexFunction(call.dtype, (), ((TRUE, ZERO),))
        return _choose(call, at_least_zero(gap * sign), call.tensor("self"), zero)

    return keep


SHAPE_ONLY = {aten.new_ones.default, aten.new_zeros.default, aten.new_full.default}
SHAPE_ONLY |= {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
"""Operators that read only the shape of their operand."""
OPERATORS: dict[Any, Callable[[OperatorCall], IndexFunction]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _fill(1)),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _fill(0)),
    **dict.fromkeys((aten.full.default, aten.new_full.default, aten.full_like.default), _fill(None)),
    **dict.fromkeys((aten.expand.default, aten.clone.default, aten.contiguous.default, aten.alias.default), _identity),
    **dict.fromkeys(
        (aten._to_copy.default, aten.to.dtype, aten.lift_fresh_copy.default, aten.detach.default), _identity
    ),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _reshape),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.cat.default: _cat,
    aten.diff.default: _diff,
    aten.cumsum.default: _cumsum,
    **dict.fromkeys((aten.max.default, aten.amax.default), _extreme(1)),
    **dict.fromkeys((aten.min.default, aten.amin.default), _extreme(-1)),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _add(1, "self", "other")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _add(-1, "self", "other")),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _add(-1, "other", "self")),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _mul),
    aten.neg.default: _neg,
    **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), _floor_divide),
    aten.div.Tensor_mode: _floor_divide,
    **{
        getattr(getattr(aten, name), overload): _compare(name)
        for name in _COMPARISONS
        for overload in ("Tensor", "Scalar")
    },
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor), _logical(_and, any_dtype=False)),
    **dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor), _logical(_or, any_dtype=False)),
    **dict.fromkeys((aten.__xor__.Tensor, aten.bitwise_xor.Tensor), _logical(_xor, any_dtype=False)),
    aten.logical_and.default: _logical(_and, any_dtype=True),
    aten.logical_or.default: _logical(_or, any_dtype=True),
    aten.logical_xor.default: _logical(_xor, any_dtype=True),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
}
"""Operator → the function that derives the index function of its result."""
