"""What a tensor made of positions is at every index, for every length: derived from its graph, not computed.

`arange(length)[:, None] - 3` is the form `row - 3`; `where(row >= column, 0, -inf)` has two cases. An operator that is
not in the table, a value from outside, a number that its dtype does not hold exactly: each is a reason to give up.
Arithmetic is followed as arithmetic of integers, so every number on the way must be one that its dtype holds exactly.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx

from inlay.program.graphs import mutates, subgraphs, target_text
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

aten = torch.ops.aten

LONGEST = 2**22
"""No size is larger: a mask of that many rows and columns takes 16 TiB. So float32 holds sums of positions exactly."""
_MOST_CASES, _MOST_PARTS = 64, 4096

Number: TypeAlias = Linear | float
"""What a tensor holds in one case: a sum of indexes and sizes; or a constant that is infinite or no integer."""
Case: TypeAlias = tuple[Formula, Number]
ONE, ZERO = Linear((), 1), Linear()
_SCALARS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


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
        return some_of(all_of((where, _not_zero(number))) for where, number in self.cases)


def domain(shape: Sequence[Linear]) -> list[Linear]:
    """What is known of the index of a tensor of this shape."""
    known = []
    for axis, size in enumerate(shape, -len(shape)):
        if size != ONE:  # the only index is 0, and stands nowhere
            known += [Linear.of(axis), size - Linear.of(axis) - 1]
    return known


class Forms:
    """The forms of the tensors of a graph, each derived once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._known: dict[fx.Node, Form | str] = {}
        self._writes = _writes(graph)
        self._sizes = _size_names(graph)

    def of(self, node: fx.Node, reader: fx.Node) -> Form:
        """What `node` is when `reader` reads it; raises UnknownFormError.

        >>> graph = fx.Graph()
        >>> node = graph.call_function(aten.arange.default, (5,))
        >>> node.meta["val"] = torch.arange(5)
        >>> print(Forms(graph).of(node, graph.output(node)).cases[0][1])
        column
        """
        form = self._derived(node)
        if isinstance(form, str):
            raise UnknownFormError(form)
        first = min(_tensors_behind(node)) if self._writes else node
        write = next((each for each in self._writes if first < each < reader), None)
        if write is not None:
            raise UnknownFormError(f"{write} writes in place after {first} and before {reader}, perhaps to the mask")
        return form

    def _derived(self, node: fx.Node) -> Form | str:
        todo = [node]
        while todo:
            at = todo[-1]
            missing = [] if at.target not in _OPERATORS else [each for each in _tensors(at) if each not in self._known]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if at not in self._known:
                self._known[at] = self._call(at)
        return self._known[node]

    def _call(self, node: fx.Node) -> Form | str:
        if node.op != "call_function":
            return f"it depends on the values of {node}"
        if node.target not in _OPERATORS:
            return f"it is computed with {target_text(node.target)}, which is not known to be about positions"
        refused = next((known for each in _tensors(node) if isinstance(known := self._known[each], str)), None)
        if refused is not None:
            return refused
        try:
            return _OPERATORS[node.target](_Call(self, node))
        except UnknownFormError as reason:
            return f"{node}: {reason}"
        except (UndecidedError, RecursionError):
            return f"{node}: it has too many cases"

    def known(self, node: fx.Node) -> Form:
        """The form of an operand that was derived already."""
        form = self._known[node]
        assert isinstance(form, Form)
        return form

    def bounds(self, total: Linear, shape: Sequence[Linear]) -> tuple[float, float]:
        """The smallest and the largest value of a sum of indexes and sizes, at any length."""
        low = high = Linear((), total.constant)
        for variable, factor in total.terms:
            if isinstance(variable, int):
                most = (shape[variable] - 1) * factor
                low, high = (low, high + most) if factor > 0 else (low + most, high)
            else:
                low, high = low + Linear.of(variable) * factor, high + Linear.of(variable) * factor
        return self._extreme(low, -1), self._extreme(high, 1)

    def _extreme(self, total: Linear, sign: int) -> float:
        value: float = total.constant
        for variable, factor in total.terms:
            if variable not in self._sizes:
                return sign * math.inf
            value += factor * LONGEST if factor * sign > 0 else 0
        return value


class _Call:
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
        return Form(_scalar_dtype(_held(value)), (), ((ALWAYS, number(value)),))

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
            for chosen in _combinations(*operands)
        )


def number(value: Any) -> Number:
    """A constant or a symbolic size as a number."""
    value = _held(value)
    if isinstance(value, torch.SymInt):
        return _linear(value)
    if isinstance(value, (bool, int)):
        return Linear((), int(value))
    if isinstance(value, float) and not math.isnan(value):
        return Linear((), int(value)) if math.isfinite(value) and value == int(value) else value
    raise UnknownFormError(f"{value} is not a constant or a size")


def _integer(value: Any) -> Linear:
    made = number(value)
    if not isinstance(made, Linear):
        raise UnknownFormError(f"{made} is no integer")
    return made


def _held(value: Any) -> Any:
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


def _size_names(graph: fx.Graph) -> set[str]:
    """The symbols that are the size of an axis of an input: at least 0, unlike a number that is an input."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    found: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return {str(size) for size in found if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol}


def _writes(graph: fx.Graph) -> list[fx.Node]:
    """The calls that write in place, themselves or in a nested graph."""
    nested = {name for name, module in subgraphs(graph) if _writes(module.graph)}
    return [
        node
        for node in graph.nodes
        if mutates(node) or any(each.op == "get_attr" and each.target in nested for each in node.all_input_nodes)
    ]


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors whose values a call reads."""
    if node.target in _NEW:
        return []
    return [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), _SCALARS)]


def _tensors_behind(node: fx.Node) -> set[fx.Node]:
    """A tensor and those it is computed from; not what sizes are the sizes of."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend(_tensors(at))
    return found


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


def _scalar_dtype(value: Any) -> torch.dtype:
    if isinstance(value, bool):
        return torch.bool
    return torch.float64 if isinstance(value, float) else torch.int64


def _not_zero(each: Number) -> Formula:
    if not isinstance(each, Linear):
        return ALWAYS
    return some_of((at_least_zero(each - 1), at_least_zero(-each - 1)))


def _combinations(*operands: tuple[Case, ...]) -> Iterable[tuple[Case, ...]]:
    if math.prod(len(cases) for cases in operands) > _MOST_CASES**2:
        raise UndecidedError
    return product(*operands)


# Operators, each a function of a call.


def _arange(call: _Call) -> Form:
    start, step = _integer(call.given.get("start", 0)), _integer(call.given.get("step", 1))
    if step.terms:
        raise UnknownFormError("its step is not a constant")
    _integer(call.given["end"])
    return call.made([(ALWAYS, start + Linear.of(-1) * step.constant)])


def _filled(value: Any) -> Callable[[_Call], Form]:
    def fill(call: _Call) -> Form:
        each = number(call.given["fill_value"] if value is None else value)
        scalar = Form(torch.float64, (), ((ALWAYS, each),))
        return call.made(call.cast(scalar, call.dtype))

    return fill


def _same(call: _Call) -> Form:
    form = call.form("self")
    call.broadcast(form)
    return call.made(call.cast(form, call.dtype))


def _unsqueeze(call: _Call) -> Form:
    form, new = call.form("self"), call.given["dim"]
    axes: dict[Variable, Linear] = {}
    for axis in range(-len(form.shape), 0):
        axes[axis] = Linear.of(axis if axis > new else axis - 1)
    return call.moved(form, axes)


def _reshape(call: _Call) -> Form:
    """Axes of size 1 come and go, the others stay in order; nothing else is known."""
    form = call.form("self")
    old, new = ([axis for axis in range(-len(shape), 0) if shape[axis] != ONE] for shape in (form.shape, call.shape))
    if [form.shape[axis] for axis in old] != [call.shape[axis] for axis in new]:
        raise UnknownFormError("it takes axes together or apart")
    return call.moved(form, {one: Linear.of(two) for one, two in zip(old, new, strict=True)})


def _permute(call: _Call) -> Form:
    form = call.form("self")
    order: list[int] = list(range(-len(form.shape), 0))
    if "dims" in call.given:
        order = call.given["dims"]
    else:
        one, two = (call.given["dim0"], call.given["dim1"]) if "dim0" in call.given else (-2, -1)
        if len(order) > 1:
            order[one], order[two] = order[two], order[one]
    return call.moved(form, {old: Linear.of(new) for new, old in enumerate(order, -len(order))})


def _slice(call: _Call) -> Form:
    form, axis = call.form("self"), call.given["dim"]
    start, step, size = _integer(call.given["start"]), call.given["step"], form.shape[axis]
    if start.terms or (start.constant < 0 and size.terms):
        raise UnknownFormError("where it begins depends on the length")
    first = start.constant if start.constant >= 0 else max(0, size.constant + start.constant)
    return call.moved(form, {axis: Linear.of(axis) * step + first})


def _select(call: _Call) -> Form:
    form, axis = call.form("self"), call.given["dim"]
    index = _integer(call.given["index"])
    if index.terms:
        raise UnknownFormError("which one it takes depends on a size")
    axes: dict[Variable, Linear] = {axis: index if index.constant >= 0 else form.shape[axis] + index}
    for each in range(-len(form.shape), axis):
        axes[each] = Linear.of(each + 1)
    return call.moved(form, axes)


def _index(call: _Call) -> Form:
    form, given = call.form("self"), list(call.given["indices"])
    given += [None] * (len(form.shape) - len(given))
    places = [place for place, each in enumerate(given) if each is not None]
    indexes = {place: call.forms.known(given[place]) for place in places}
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
    for chosen in _combinations(*(each.cases for each in indexes.values())):
        for place, (_, at) in zip(places, chosen, strict=True):
            axes[place - len(given)] = _position(call, indexes[place], at).at(moved)
        reached = all_of(replaced(formula, moved) for formula, _ in chosen)
        cases += [
            (all_of((reached, replaced(formula, axes))), each.at(axes) if isinstance(each, Linear) else each)
            for formula, each in form.cases
        ]
    return call.made(cases)


def _position(call: _Call, index: Form, at: Number) -> Linear:
    if index.dtype in (torch.bool, torch.uint8) or not isinstance(at, Linear):
        raise UnknownFormError("it selects by values")
    if call.forms.bounds(at, index.shape)[0] < 0:
        raise UnknownFormError(f"it takes position {at}, which may be counted from the end")
    return at


def _joined(call: _Call, forms: Sequence[Form], axis: int) -> Form:
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


def _cat(call: _Call) -> Form:
    return _joined(call, [call.forms.known(each) for each in call.given["tensors"]], call.given["dim"])


def _diff(call: _Call) -> Form:
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


def _cumsum(call: _Call) -> Form:
    """A constant summed up grows by it at every step."""
    form, axis = call.form("self"), call.given["dim"]
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


def _added(sign: int, *names: str) -> Callable[[_Call], Form]:
    def add(call: _Call) -> Form:
        one, two = (call.operand(name) for name in names)
        call.broadcast(one, two)
        alpha = _integer(call.given.get("alpha", 1))
        cases = [call.cast(each, call.dtype) for each in (one, two)]
        if call.dtype == torch.bool:  # a sum of booleans is their disjunction
            return call.made_true(some_of((one.nonzero, two.nonzero)))
        if alpha != ONE:
            cases[1] = call.combined(lambda each: _times(each, alpha), cases[1]).cases
        return call.combined(lambda left, right: _sum(left, right, sign), *cases)

    return add


def _mul(call: _Call) -> Form:
    one, two = call.operand("self"), call.operand("other")
    call.broadcast(one, two)
    return call.combined(_times, call.cast(one, call.dtype), call.cast(two, call.dtype))


def _neg(call: _Call) -> Form:
    return call.combined(lambda each: _times(each, -ONE), call.cast(call.form("self"), call.dtype))


_COMPARED: dict[str, Callable[[Linear], Formula]] = {
    "ge": at_least_zero,
    "gt": lambda gap: at_least_zero(gap - 1),
    "le": lambda gap: at_least_zero(-gap),
    "lt": lambda gap: at_least_zero(-gap - 1),
    "eq": lambda gap: all_of((at_least_zero(gap), at_least_zero(-gap))),
    "ne": _not_zero,
}


def _compared(name: str) -> Callable[[_Call], Form]:
    def compare(call: _Call) -> Form:
        one, two = call.operand("self"), call.operand("other")
        call.broadcast(one, two)
        dtype = _common_dtype(_type_of(call.given["self"]), _type_of(call.given["other"]))
        return call.made_true(
            some_of(
                all_of((here, there, _relation(name, left, right)))
                for (here, left), (there, right) in _combinations(call.cast(one, dtype), call.cast(two, dtype))
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


def _type_of(value: Any) -> tuple[torch.dtype, int | None]:
    """The dtype and the rank of an operand; no rank for what is no tensor."""
    value = _held(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return _scalar_dtype(value), None


@lru_cache
def _common_dtype(*types: tuple[torch.dtype, int | None]) -> torch.dtype:
    """What operands are converted to before they are compared."""
    values: list[Any] = [
        {torch.bool: True, torch.int64: 1}.get(dtype, 1.0) if rank is None else torch.ones((1,) * rank, dtype=dtype)
        for dtype, rank in types
    ]
    return torch.result_type(*values)


def _logical(combine: Callable[[Formula, Formula], Formula], *, any_dtype: bool) -> Callable[[_Call], Form]:
    def logic(call: _Call) -> Form:
        one, two = call.operand("self"), call.operand("other")
        call.broadcast(one, two)
        if not any_dtype and {one.dtype, two.dtype} != {torch.bool}:
            raise UnknownFormError("it works on the bits of numbers")
        return call.made_true(combine(one.nonzero, two.nonzero))

    return logic


def _not(call: _Call) -> Form:
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


def _chosen(call: _Call, condition: Formula, then: Form, otherwise: Form) -> Form:
    cases = [(condition, call.cast(then, call.dtype)), (negated(condition), call.cast(otherwise, call.dtype))]
    return call.made((all_of((where, formula)), each) for where, held in cases for formula, each in held)


def _where(call: _Call) -> Form:
    condition, then, otherwise = (call.operand(name) for name in ("condition", "self", "other"))
    call.broadcast(condition, then, otherwise)
    return _chosen(call, condition.nonzero, then, otherwise)


def _masked_fill(call: _Call) -> Form:
    mask, then, otherwise = (call.operand(name) for name in ("mask", "value", "self"))
    call.broadcast(mask, then, otherwise)
    return _chosen(call, mask.nonzero, then, otherwise)


def _triangle(sign: int) -> Callable[[_Call], Form]:
    def keep(call: _Call) -> Form:
        gap = Linear.of(-2) - Linear.of(-1) + _integer(call.given["diagonal"])
        zero = Form(call.dtype, (), ((ALWAYS, ZERO),))
        return _chosen(call, at_least_zero(gap * sign), call.form("self"), zero)

    return keep


_NEW = {aten.new_ones.default, aten.new_zeros.default, aten.new_full.default}
_NEW |= {aten.ones_like.default, aten.zeros_like.default, aten.full_like.default}
"""Operators that read no value of their operand."""
_OPERATORS: dict[Any, Callable[[_Call], Form]] = {
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
