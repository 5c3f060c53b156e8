"""Linear inequalities over integers: affine expressions, formulas of them, proofs that a formula never holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Variable: TypeAlias = int | str
"""An axis of a tensor, counted from the end (-1 is the last), or the name of a size."""

_MAX_SYSTEMS = 4096
"""The maximum number of systems of inequalities in one proof."""


class UndecidedError(Exception):
    """Raised when a proof would take too many steps."""


@dataclass(frozen=True)
class AffineExpr:
    """A sum of variables times integers, plus a constant. As a formula it means: the sum is at least 0.

    >>> row, column = AffineExpr.from_variable(-2), AffineExpr.from_variable(-1)
    >>> print(row - column + 3)
    row - column + 3
    """

    terms: tuple[tuple[Variable, int], ...] = ()
    constant: int = 0

    @classmethod
    def from_variable(cls, variable: Variable) -> AffineExpr:
        """Return the expression of one variable."""
        return cls(((variable, 1),))

    @classmethod
    def from_terms(cls, terms: Mapping[Variable, int], constant: int) -> AffineExpr:
        """Return the sum of these terms, without those whose factor is 0."""
        kept = [(variable, factor) for variable, factor in terms.items() if factor]
        return cls(tuple(sorted(kept, key=_order)) if len(kept) > 1 else tuple(kept), constant)

    def __add__(self, other: AffineExpr | int) -> AffineExpr:
        if isinstance(other, int):
            return AffineExpr(self.terms, self.constant + other)
        terms = dict(self.terms)
        for variable, factor in other.terms:
            terms[variable] = terms.get(variable, 0) + factor
        return AffineExpr.from_terms(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> AffineExpr:
        terms = tuple((variable, factor * each) for variable, each in self.terms) if factor else ()
        return AffineExpr(terms, factor * self.constant)

    def __neg__(self) -> AffineExpr:
        return self * -1

    def __sub__(self, other: AffineExpr | int) -> AffineExpr:
        return self + (-other)

    def substitute(self, values: Mapping[Variable, AffineExpr]) -> AffineExpr:
        """Return the sum with variables replaced by other sums."""
        if not any(variable in values for variable, _ in self.terms):  # shortcut
            return self
        made = AffineExpr((), self.constant)
        for variable, factor in self.terms:
            made += values.get(variable, AffineExpr.from_variable(variable)) * factor
        return made

    def evaluate(self, point: Mapping[Variable, int]) -> int:
        """Return the value of the sum at a point."""
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
class And:
    """Every part holds."""

    parts: tuple[Formula, ...] = ()


@dataclass(frozen=True)
class Or:
    """At least one part holds."""

    parts: tuple[Formula, ...] = ()


Formula: TypeAlias = AffineExpr | And | Or
TRUE, FALSE = And(), Or()


def at_least_zero(total: AffineExpr) -> Formula:
    """Return `total >= 0`, tightened to integers.

    >>> print(at_least_zero(AffineExpr.from_variable(-1) * 2 - 1))
    column - 1
    """
    if not total.terms:
        return TRUE if total.constant >= 0 else FALSE
    common = gcd(*(factor for _, factor in total.terms))
    if common == 1:  # shortcut
        return total
    return AffineExpr(tuple((variable, factor // common) for variable, factor in total.terms), total.constant // common)


def conjunction(parts: Iterable[Formula]) -> Formula:
    """Return the formula that holds where all of these hold."""
    return _join(And, parts, FALSE)


def disjunction(parts: Iterable[Formula]) -> Formula:
    """Return the formula that holds where at least one of these holds."""
    return _join(Or, parts, TRUE)


def _join(kind: type[And | Or], parts: Iterable[Formula], decisive: Formula) -> Formula:
    """Join formulas; each part once. One part that is `decisive` decides the result."""
    kept: dict[Formula, None] = {}
    for part in parts:
        if part == decisive:
            return decisive
        kept.update(dict.fromkeys(part.parts if isinstance(part, kind) else (part,)))
    return next(iter(kept)) if len(kept) == 1 else kind(tuple(kept))


def negate(formula: Formula) -> Formula:
    """Return the formula that holds exactly where `formula` does not.

    >>> print(negate(AffineExpr.from_variable(-1) - 3))
    -column + 2
    """
    if isinstance(formula, AffineExpr):
        return -formula - 1
    parts = tuple(negate(part) for part in formula.parts)
    return Or(parts) if isinstance(formula, And) else And(parts)


def substitute(formula: Formula, values: Mapping[Variable, AffineExpr]) -> Formula:
    """Return the formula with variables replaced by sums."""
    if isinstance(formula, AffineExpr):
        return at_least_zero(formula.substitute(values))
    parts = (substitute(part, values) for part in formula.parts)
    return conjunction(parts) if isinstance(formula, And) else disjunction(parts)


def is_satisfied(formula: Formula, point: Mapping[Variable, int]) -> bool:
    """Whether the formula holds at a point."""
    if isinstance(formula, AffineExpr):
        return formula.evaluate(point) >= 0
    parts = (is_satisfied(part, point) for part in formula.parts)
    return all(parts) if isinstance(formula, And) else any(parts)


def iter_inequalities(formula: Formula) -> Iterator[AffineExpr]:
    """Yield every inequality in a formula."""
    if isinstance(formula, AffineExpr):
        yield formula
    else:
        for part in formula.parts:
            yield from iter_inequalities(part)


def is_unsatisfiable(known: Iterable[AffineExpr], *formulas: Formula) -> bool:
    """Whether it is proven that no integers satisfy the `known` inequalities and all of these formulas.

    >>> row, column = AffineExpr.from_variable(-2), AffineExpr.from_variable(-1)
    >>> is_unsatisfiable([], row - column, Or((column - row - 1, column - row - 4)))
    True
    >>> is_unsatisfiable([], row - column - 2, column - 1)
    False
    """
    return _is_unsatisfiable_case(formulas, list(known), Counter())


def simplify(formula: Formula, known: list[AffineExpr]) -> Formula:
    """Return the formula without the inequalities that always or never hold where the `known` ones do.

    >>> negative = AffineExpr.from_variable(-1)
    >>> print(simplify(And((negative, negative - 3)), [negative]))
    column - 3
    """
    if isinstance(formula, AffineExpr):
        always, never = is_unsatisfiable(known, negate(formula)), is_unsatisfiable(known, formula)
        return TRUE if always else FALSE if never else formula
    parts = (simplify(part, known) for part in formula.parts)
    return conjunction(parts) if isinstance(formula, And) else disjunction(parts)


def _is_unsatisfiable_case(formulas: Iterable[Formula], rows: list[AffineExpr], steps: Counter[str]) -> bool:
    todo, choices, rows = list(formulas), [], list(rows)
    while todo:
        formula = todo.pop()
        if isinstance(formula, AffineExpr):
            rows.append(formula)
        elif isinstance(formula, And):
            todo.extend(formula.parts)
        else:
            choices.append(formula)
    steps["systems"] += 1
    if steps["systems"] > _MAX_SYSTEMS:
        raise UndecidedError
    if _is_infeasible(rows):
        return True
    if not choices:
        return False
    choice = min(choices, key=lambda each: len(each.parts))
    rest = [each for each in choices if each is not choice]
    return all(_is_unsatisfiable_case([part, *rest], rows, steps) for part in choice.parts)


def _is_infeasible(rows: Iterable[AffineExpr]) -> bool:
    """Whether no integers satisfy the inequalities, by Fourier-Motzkin elimination.

    Each inequality is tightened to integers, which is exact where factors are 1 and -1. With other factors the result
    may be False although no integers satisfy the inequalities.
    """
    left: dict[tuple[tuple[Variable, int], ...], int] = {}
    todo = list(rows)
    while True:
        for row in todo:
            tight = at_least_zero(row)
            if tight == FALSE:
                return True
            if isinstance(tight, AffineExpr):
                left[tight.terms] = min(tight.constant, left.get(tight.terms, tight.constant))
        if not left:
            return False
        above: Counter[Variable] = Counter()
        below: Counter[Variable] = Counter()
        for terms in left:
            for variable, factor in terms:
                (above if factor > 0 else below)[variable] += 1
        gone = min(above | below, key=lambda each: (above[each] * below[each], str(each)))
        rising: list[tuple[int, AffineExpr]] = []
        falling: list[tuple[int, AffineExpr]] = []
        for terms, constant in list(left.items()):
            factor = dict(terms).get(gone, 0)
            if factor:
                (rising if factor > 0 else falling).append((abs(factor), AffineExpr(terms, constant)))
                del left[terms]
        todo = [up * two + down * one for one, up in rising for two, down in falling]
