"""What each operator does to forms: a function of a call for every one that positions are computed with."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from inlay.rewrite.form import (
    ONE,
    ZERO,
    Call,
    Case,
    Form,
    Number,
    UnknownFormError,
    combinations,
    common_dtype,
    domain,
    integer,
    not_zero,
    number,
    type_of,
)
from inlay.rewrite.inequalities import (
    ALWAYS,
    NEVER,
    Formula,
    Linear,
    Variable,
    all_of,
    at_least_zero,
    impossible,
    negated,
    replaced,
    some_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten


def _arange(call: Call) -> Form:
    start, step = integer(call.given.get("start", 0)), integer(call.given.get("step", 1))
    if step.terms:
        raise UnknownFormError("its step is not a constant")
    integer(call.given["end"])
    return call.made([(ALWAYS, start + Linear.of(-1) * step.constant)])


def _filled(value: Any) -> Callable[[Call], Form]:
    def fill(call: Call) -> Form:
        each = number(call.given["fill_value"] if value is None else value)
        scalar = Form(torch.float64, (), ((ALWAYS, each),))
        return call.made(call.cast(scalar, call.dtype))

    return fill


def _same(call: Call) -> Form:
    form = call.form("self")
    call.broadcast(form)
    return call.made(call.cast(form, call.dtype))


def _unsqueeze(call: Call) -> Form:
    form, new = call.form("self"), call.given["dim"]
    axes: dict[Variable, Linear] = {}
    for axis in range(-len(form.shape), 0):
        axes[axis] = Linear.of(axis if axis > new else axis - 1)
    return call.moved(form, axes)


def _reshape(call: Call) -> Form:
    """Axes of size 1 come and go, the others stay in order; nothing else is known."""
    form = call.form("self")
    old, new = ([axis for axis in range(-len(shape), 0) if shape[axis] != ONE] for shape in (form.shape, call.shape))
    if [form.shape[axis] for axis in old] != [call.shape[axis] for axis in new]:
        raise UnknownFormError("it takes axes together or apart")
    return call.moved(form, {one: Linear.of(two) for one, two in zip(old, new, strict=True)})


def _permute(call: Call) -> Form:
    form = call.form("self")
    order: list[int] = list(range(-len(form.shape), 0))
    if "dims" in call.given:
        order = call.given["dims"]
    else:
        one, two = (call.given["dim0"], call.given["dim1"]) if "dim0" in call.given else (-2, -1)
        if len(order) > 1:
            order[one], order[two] = order[two], order[one]
    return call.moved(form, {old: Linear.of(new) for new, old in enumerate(order, -len(order))})


def _slice(call: Call) -> Form:
    form, axis = call.form("self"), call.given["dim"]
    start, step, size = integer(call.given["start"]), integer(call.given["step"]), form.shape[axis]
    if step.terms or start.terms or (start.constant < 0 and size.terms):
        raise UnknownFormError("where it begins or how far it goes depends on the length")
    first = start.constant if start.constant >= 0 else max(0, size.constant + start.constant)
    return call.moved(form, {axis: Linear.of(axis) * step.constant + first})


def _select(call: Call) -> Form:
    form, axis = call.form("self"), call.given["dim"]
    index = integer(call.given["index"])
    if index.terms:
        raise UnknownFormError("which one it takes depends on a size")
    axes: dict[Variable, Linear] = {axis: index if index.constant >= 0 else form.shape[axis] + index}
    for each in range(-len(form.shape), axis):
        axes[each] = Linear.of(each + 1)
    return call.moved(form, axes)


def _index(call: Call) -> Form:
    form, given = call.form("self"), list(call.given["indices"])
    given += [None] * (len(form.shape) - len(given))
    places = [place for place, each in enumerate(given) if each is not None]
    indexes = {place: call.forms.known(given[place]) for place in places}
    if any(each.dtype in (torch.bool, torch.uint8) for each in indexes.values()):
        raise UnknownFormError("it selects by values")
    rank, inner = len(call.shape), max(len(each.shape) for each in indexes.values())
    together = places == list(range(places[0], places[-1] + 1))
    # The axes of the indexes stand where the axes that they index stood, or before all others if those stood apart.
    first = places[0] if together else 0
    kept = [place for place, each in enumerate(given) if each is None]
    spots = [spot for spot in range(rank) if not first <= spot < first + inner]
    axes: dict[Variable, Linear] = {}
    for place, spot in zip(kept, spots, strict=True):
        axes[place - len(given)] = Linear.of(spot - rank)
    moved: dict[Variable, Linear] = {axis: Linear.of(first + inner + axis - rank) for axis in range(-inner, 0)}
    cases: list[Case] = []
    for chosen in combinations(*(each.cases for each in indexes.values())):
        for place, (_, at) in zip(places, chosen, strict=True):
            axes[place - len(given)] = _position(call, indexes[place], at).at(moved)
        reached = all_of(replaced(formula, moved) for formula, _ in chosen)
        cases += [
            (all_of((reached, replaced(formula, axes))), each.at(axes) if isinstance(each, Linear) else each)
            for formula, each in form.cases
        ]
    return call.made(cases)


def _position(call: Call, index: Form, at: Number) -> Linear:
    if not isinstance(at, Linear):
        raise UnknownFormError(f"it takes position {at}")
    if call.forms.bounds(at, index.shape)[0] < 0:
        raise UnknownFormError(f"it takes position {at}, which may be counted from the end")
    return at


def _joined(call: Call, forms: Sequence[Form], axis: int) -> Form:
    """Tensors one after the other along an axis."""
    cases: list[Case] = []
    index, begin = Linear.of(axis), ZERO
    for form in forms:
        if len(form.shape) != len(forms[0].shape):
            raise UnknownFormError("tensors of different ranks are joined")
        end = begin + form.shape[axis]
        here = all_of((at_least_zero(index - begin), at_least_zero(end - index - 1)))
        values: dict[Variable, Linear] = {axis: index - begin}
        for formula, each in call.cast(form, call.dtype):
            number = each.at(values) if isinstance(each, Linear) else each
            cases.append((all_of((here, replaced(formula, values))), number))
        begin = end
    shape = list(forms[0].shape)
    shape[axis] = begin
    return call.made(cases, shape)


def _cat(call: Call) -> Form:
    return _joined(call, [call.forms.known(each) for each in call.given["tensors"]], call.given["dim"])


def _diff(call: Call) -> Form:
    if call.given["n"] != 1:
        raise UnknownFormError("it takes differences of differences")
    axis = call.given["dim"]
    names = [name for name in ("prepend", "self", "append") if call.given.get(name) is not None]
    whole = _joined(call, [call.form(name) for name in names], axis)
    if whole.dtype == torch.bool:
        raise UnknownFormError("it takes differences of booleans")
    after: dict[Variable, Linear] = {axis: Linear.of(axis) + 1}
    next_ones = [
        (replaced(where, after), each.at(after) if isinstance(each, Linear) else each) for where, each in whole.cases
    ]
    return call.combined(lambda one, two: _sum(one, two, -1), tuple(next_ones), whole.cases)


def _cumsum(call: Call) -> Form:
    """A constant summed up grows by it at every step."""
    form, axis = call.form("self"), call.given["dim"]
    if not form.shape:
        raise UnknownFormError("it sums up a single number")
    known = domain(form.shape)
    reached = [each for where, each in form.cases if not impossible(known, where)]
    if len(reached) != 1 or not isinstance(reached[0], Linear) or reached[0].terms:
        raise UnknownFormError("it sums up what differs from position to position")
    return call.made([(ALWAYS, (Linear.of(axis) + 1) * reached[0].constant)])


def _sum(one: Number, two: Number, factor: int = 1) -> Number:
    if isinstance(one, Linear) and isinstance(two, Linear):
        return one + two * factor
    infinite = {each * sign for each, sign in ((one, 1), (two, factor)) if isinstance(each, float)}
    if len(infinite) == 1 and math.isinf(*infinite):
        return infinite.pop()
    raise UnknownFormError("a constant in it is no integer")


def _times(one: Number, two: Number) -> Number:
    if isinstance(one, Linear) and isinstance(two, Linear) and not (one.terms and two.terms):
        return one * two.constant if not two.terms else two * one.constant
    for each, other in ((one, two), (two, one)):
        infinite = isinstance(each, float) and math.isinf(each)
        if infinite and isinstance(other, Linear) and not other.terms and other.constant:
            return each * other.constant
    raise UnknownFormError("it is a product of positions, or of what is no integer")


def _added(sign: int, *names: str) -> Callable[[Call], Form]:
    def add(call: Call) -> Form:
        one, two = (call.operand(name) for name in names)
        call.broadcast(one, two)
        alpha = integer(call.given.get("alpha", 1))
        cases = [call.cast(each, call.dtype) for each in (one, two)]
        if call.dtype == torch.bool:  # a sum of booleans is their disjunction
            return call.made_true(some_of((one.nonzero, two.nonzero)))
        if alpha != ONE:
            cases[1] = call.combined(lambda each: _times(each, alpha), cases[1]).cases
        return call.combined(lambda left, right: _sum(left, right, sign), *cases)

    return add


def _mul(call: Call) -> Form:
    one, two = call.operand("self"), call.operand("other")
    call.broadcast(one, two)
    return call.combined(_times, call.cast(one, call.dtype), call.cast(two, call.dtype))


def _neg(call: Call) -> Form:
    return call.combined(lambda each: _times(each, -ONE), call.cast(call.form("self"), call.dtype))


_COMPARED: dict[str, Callable[[Linear], Formula]] = {
    "ge": at_least_zero,
    "gt": lambda gap: at_least_zero(gap - 1),
    "le": lambda gap: at_least_zero(-gap),
    "lt": lambda gap: at_least_zero(-gap - 1),
    "eq": lambda gap: all_of((at_least_zero(gap), at_least_zero(-gap))),
    "ne": not_zero,
}


def _compared(name: str) -> Callable[[Call], Form]:
    def compare(call: Call) -> Form:
        one, two = call.operand("self"), call.operand("other")
        call.broadcast(one, two)
        dtype = common_dtype(type_of(call.given["self"]), type_of(call.given["other"]))
        return call.made_true(
            some_of(
                all_of((here, there, _relation(name, left, right)))
                for (here, left), (there, right) in combinations(call.cast(one, dtype), call.cast(two, dtype))
            )
        )

    return compare


def _relation(name: str, left: Number, right: Number) -> Formula:
    if isinstance(left, Linear) and isinstance(right, Linear):
        return _COMPARED[name](left - right)
    sides = [0.0 if isinstance(each, Linear) else each for each in (left, right)]
    if any(side and not math.isinf(side) for side in sides):
        raise UnknownFormError(f"{next(side for side in sides if side)} is no integer")
    return ALWAYS if getattr(operator, name)(*sides) else NEVER


def _logical(combine: Callable[[Formula, Formula], Formula], *, any_dtype: bool) -> Callable[[Call], Form]:
    def logic(call: Call) -> Form:
        one, two = call.operand("self"), call.operand("other")
        call.broadcast(one, two)
        if not any_dtype and {one.dtype, two.dtype} != {torch.bool}:
            raise UnknownFormError("it works on the bits of numbers")
        return call.made_true(combine(one.nonzero, two.nonzero))

    return logic


def _not(call: Call) -> Form:
    form = call.form("self")
    if form.dtype != torch.bool and call.node.target is aten.bitwise_not.default:
        raise UnknownFormError("it works on the bits of numbers")
    return call.made_true(negated(form.nonzero))


def _both(one: Formula, two: Formula) -> Formula:
    return all_of((one, two))


def _either(one: Formula, two: Formula) -> Formula:
    return some_of((one, two))


def _one_only(one: Formula, two: Formula) -> Formula:
    return some_of((all_of((one, negated(two))), all_of((negated(one), two))))


def _chosen(call: Call, condition: Formula, then: Form, otherwise: Form) -> Form:
    cases = [(condition, call.cast(then, call.dtype)), (negated(condition), call.cast(otherwise, call.dtype))]
    return call.made((all_of((where, formula)), each) for where, held in cases for formula, each in held)


def _where(call: Call) -> Form:
    condition, then, otherwise = (call.operand(name) for name in ("condition", "self", "other"))
    call.broadcast(condition, then, otherwise)
    return _chosen(call, condition.nonzero, then, otherwise)


def _masked_fill(call: Call) -> Form:
    mask, then, otherwise = (call.operand(name) for name in ("mask", "value", "self"))
    call.broadcast(mask, then, otherwise)
    return _chosen(call, mask.nonzero, then, otherwise)


def _triangle(sign: int) -> Callable[[Call], Form]:
    def keep(call: Call) -> Form:
        gap = Linear.of(-2) - Linear.of(-1) + integer(call.given["diagonal"])
        zero = Form(call.dtype, (), ((ALWAYS, ZERO),))
        return _chosen(call, at_least_zero(gap * sign), call.form("self"), zero)

    return keep


MADE_LIKE = {aten.new_ones.default, aten.new_zeros.default, aten.new_full.default}
MADE_LIKE |= {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
"""Operators that read no value of their operand."""
OPERATORS: dict[Any, Callable[[Call], Form]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _filled(1)),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _filled(0)),
    **dict.fromkeys((aten.full.default, aten.new_full.default, aten.full_like.default), _filled(None)),
    **dict.fromkeys((aten.expand.default, aten.clone.default, aten.contiguous.default, aten.alias.default), _same),
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype, aten.lift_fresh_copy.default, aten.detach.default), _same),
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
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _added(1, "self", "other")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _added(-1, "self", "other")),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _added(-1, "other", "self")),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _mul),
    aten.neg.default: _neg,
    **{
        getattr(getattr(aten, name), overload): _compared(name)
        for name in _COMPARED
        for overload in ("Tensor", "Scalar")
    },
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor), _logical(_both, any_dtype=False)),
    **dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor), _logical(_either, any_dtype=False)),
    **dict.fromkeys((aten.__xor__.Tensor, aten.bitwise_xor.Tensor), _logical(_one_only, any_dtype=False)),
    aten.logical_and.default: _logical(_both, any_dtype=True),
    aten.logical_or.default: _logical(_either, any_dtype=True),
    aten.logical_xor.default: _logical(_one_only, any_dtype=True),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
}
"""What is known to be about positions."""
