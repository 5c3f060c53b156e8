"""Linear inequalities over integers: sums of variables, formulas made of them, proofs that a formula never holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Variable: TypeAlias = int | str
"""An axis of a tensor, counted from the end (-1 is the last), or the name of a size."""

_STEPS = 4096
"""How many systems of inequalities a proof may look at."""


class UndecidedError(Exception):
    """A proof would take too many steps."""


@dataclass(frozen=True)
class Linear:
    """A sum of variables times integers, and a constant; as a formula: the sum is at least 0.

    >>> row, column = Linear.of(-2), Linear.of(-1)
    >>> print(row - column + 3)
    row - column + 3
    """

    terms: tuple[tuple[Variable, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, variable: Variable) -> Linear:
        """One variable."""
        return cls(((variable, 1),))

    @classmethod
    def total(cls, terms: Mapping[Variable, int], constant: int) -> Linear:
        """The sum of these; those times 0 are left out."""
        kept = [(variable, factor) for variable, factor in terms.items() if factor]
        return cls(tuple(sorted(kept, key=_order)) if len(kept) > 1 else tuple(kept), constant)

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for variable, factor in other.terms:
            terms[variable] = terms.get(variable, 0) + factor
        return Linear.total(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Linear:
        terms = tuple((variable, factor * each) for variable, each in self.terms) if factor else ()
        return Linear(terms, factor * self.constant)

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear | int) -> Linear:
        return self + (-other)

    def at(self, values: Mapping[Variable, Linear]) -> Linear:
        """The sum with other sums in the place of variables."""
        if not any(variable in values for variable, _ in self.terms):
            return self
        made = Linear((), self.constant)
        for variable, factor in self.terms:
            made += values.get(variable, Linear.of(variable)) * factor
        return made

    def value(self, point: Mapping[Variable, int]) -> int:
        """The number it is when the variables are these numbers."""
        return self.constant + sum(factor * point[variable] for variable, factor in self.terms)

    def __str__(self) -> str:
        text = ""
        for name, factor in [(_NAMES.get(each, each), factor) for each, factor in self.terms] + [("", self.constant)]:
            size = str(abs(factor)) if not name else name if abs(factor) == 1 else f"{abs(factor)}*{name}"
            if factor or not text:
                text += f" {'-' if factor < 0 else '+'} {size}" if text else f"{'-' if factor < 0 else ''}{size}"
        return text


_NAMES: dict[Variable, str] = {-1: "column", -2: "row", -3: "head", -4: "sequence"}


def _order(term: tuple[Variable, int]) -> tuple[int, str]:
    variable = term[0]
    return (variable, "") if isinstance(variable, int) else (1, variable)


@dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple[Formula, ...] = ()


@dataclass(frozen=True)
class Some:
    """At least one part holds."""

    parts: tuple[Formula, ...] = ()


Formula: TypeAlias = Linear | All | Some
ALWAYS, NEVER = All(), Some()


def at_least_zero(total: Linear) -> Formula:
    """`total >= 0`, as tight as it can be said with integers.

    >>> print(at_least_zero(Linear.of(-1) * 2 - 1))
    column - 1
    """
    if not total.terms:
        return ALWAYS if total.constant >= 0 else NEVER
    common = gcd(*(factor for _, factor in total.terms))
    if common == 1:
        return total
    return Linear(tuple((variable, factor // common) for variable, factor in total.terms), total.constant // common)


def all_of(parts: Iterable[Formula]) -> Formula:
    """Every one of these."""
    kept: dict[Formula, None] = {}
    for part in parts:
        if part == NEVER:
            return NEVER
        kept.update(dict.fromkeys(part.parts if isinstance(part, All) else (part,)))
    return next(iter(kept)) if len(kept) == 1 else All(tuple(kept))


def some_of(parts: Iterable[Formula]) -> Formula:
    """At least one of these."""
    kept: dict[Formula, None] = {}
    for part in parts:
        if part == ALWAYS:
            return ALWAYS
        kept.update(dict.fromkeys(part.parts if isinstance(part, Some) else (part,)))
    return next(iter(kept)) if len(kept) == 1 else Some(tuple(kept))


def negated(formula: Formula) -> Formula:
    """What holds where `formula` does not.

    >>> print(negated(Linear.of(-1) - 3))
    -column + 2
    """
    if isinstance(formula, Linear):
        return -formula - 1
    parts = tuple(negated(part) for part in formula.parts)
    return Some(parts) if isinstance(formula, All) else All(parts)


def replaced(formula: Formula, values: Mapping[Variable, Linear]) -> Formula:
    """The formula with sums in the place of variables."""
    if isinstance(formula, Linear):
        return at_least_zero(formula.at(values))
    parts = (replaced(part, values) for part in formula.parts)
    return all_of(parts) if isinstance(formula, All) else some_of(parts)


def holds(formula: Formula, point: Mapping[Variable, int]) -> bool:
    """Whether the formula holds when the variables are these numbers."""
    if isinstance(formula, Linear):
        return formula.value(point) >= 0
    parts = (holds(part, point) for part in formula.parts)
    return all(parts) if isinstance(formula, All) else any(parts)


def inequalities(formula: Formula) -> Iterator[Linear]:
    """Every inequality in a formula."""
    if isinstance(formula, Linear):
        yield formula
    else:
        for part in formula.parts:
            yield from inequalities(part)


def impossible(known: Iterable[Linear], *formulas: Formula) -> bool:
    """Whether it is proven that no integers satisfy the `known` inequalities and all of these formulas.

    >>> row, column = Linear.of(-2), Linear.of(-1)
    >>> impossible([], row - column, Some((column - row - 1, column - row - 4)))
    True
    >>> impossible([], row - column - 2, column - 1)
    False
    """
    return _refuted(formulas, list(known), Counter())


def settled(formula: Formula, known: list[Linear]) -> Formula:
    """The formula without the inequalities that always or never hold where the `known` ones do.

    >>> print(settled(All((Linear.of(-1), Linear.of(-1) - 3)), [Linear.of(-1)]))
    column - 3
    """
    if isinstance(formula, Linear):
        always, never = impossible(known, negated(formula)), impossible(known, formula)
        return ALWAYS if always else NEVER if never else formula
    parts = (settled(part, known) for part in formula.parts)
    return all_of(parts) if isinstance(formula, All) else some_of(parts)


def _refuted(formulas: Iterable[Formula], rows: list[Linear], steps: Counter[str]) -> bool:
    todo, choices, rows = list(formulas), [], list(rows)
    while todo:
        formula = todo.pop()
        if isinstance(formula, Linear):
            rows.append(formula)
        elif isinstance(formula, All):
            todo.extend(formula.parts)
        else:
            choices.append(formula)
    steps["systems"] += 1
    if steps["systems"] > _STEPS:
        raise UndecidedError
    if _contradictory(rows):
        return True
    if not choices:
        return False
    choice = min(choices, key=lambda each: len(each.parts))
    rest = [each for each in choices if each is not choice]
    return all(_refuted([part, *rest], rows, steps) for part in choice.parts)


def _contradictory(rows: Iterable[Linear]) -> bool:
    """Whether no integers satisfy the inequalities: variables are eliminated one after the other (Fourier, Motzkin).

    Rounding each to what integers can reach makes it exact where factors are 1 and -1. Elsewhere it proves less.
    """
    left: dict[tuple[tuple[Variable, int], ...], int] = {}
    todo = list(rows)
    while True:
        for row in todo:
            tight = at_least_zero(row)
            if tight == NEVER:
                return True
            if isinstance(tight, Linear):
                left[tight.terms] = min(tight.constant, left.get(tight.terms, tight.constant))
        if not left:
            return False
        above: Counter[Variable] = Counter()
        below: Counter[Variable] = Counter()
        for terms in left:
            for variable, factor in terms:
                (above if factor > 0 else below)[variable] += 1
        gone = min(above | below, key=lambda each: (above[each] * below[each], str(each)))
        rising: list[tuple[int, Linear]] = []
        falling: list[tuple[int, Linear]] = []
        for terms, constant in list(left.items()):
            factor = dict(terms).get(gone, 0)
            if factor:
                (rising if factor > 0 else falling).append((abs(factor), Linear(terms, constant)))
                del left[terms]
        todo = [up * two + down * one for one, up in rising for two, down in falling]
