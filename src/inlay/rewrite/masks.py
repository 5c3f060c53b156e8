"""What a mask means: derived from how it is made of positions, for every length, or not known, with the reason.

A mask is a formula over row and column (`rewrite/forms.py`). That it is causal, causal with a window or shows
everything is proven: no row and column exist where the formula and the claim differ (`rewrite/inequalities.py`).

One thing is assumed: a mask that adds the lowest number of its dtype instead of -inf hides. It does not where scores
are larger than that number, which in float16 is 65504.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inlay.rewrite.form import Form, UnknownFormError, domain
from inlay.rewrite.forms import Forms
from inlay.rewrite.inequalities import (
    Formula,
    Linear,
    UndecidedError,
    Variable,
    all_of,
    holds,
    impossible,
    inequalities,
    negated,
    settled,
    some_of,
)

if TYPE_CHECKING:
    from torch import fx

_ROW, _COLUMN = Linear.of(-2), Linear.of(-1)
_BACK = _ROW - _COLUMN


@dataclass(frozen=True)
class Meaning:
    """What a mask hides: later positions, and those `window` steps back or more when it is not 0; or why not known."""

    causal: bool
    window: int = 0
    reason: str = ""

    @property
    def known(self) -> bool:
        """Whether it is; what is known and not causal hides nothing."""
        return not self.reason


class Masks:
    """The meanings of the masks of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._forms = Forms(graph)
        self._meanings: dict[fx.Node, Meaning] = {}

    def meaning(self, mask: fx.Node, reader: fx.Node) -> Meaning:
        """What `mask`, whose last axes are rows and columns, hides when `reader` reads it."""
        try:
            form = self._forms.of(mask, reader)
            if mask not in self._meanings:
                self._meanings[mask] = _meaning(form)
            return self._meanings[mask]
        except UnknownFormError as reason:
            return Meaning(False, reason=f"the mask is not understood: {reason}")

    def counts_up(self, node: fx.Node, reader: fx.Node) -> bool:
        """Is this 0, 1, 2, … along its last axis, whatever its length, and the same along all others?"""
        try:
            cases = self._forms.of(node, reader).cases
        except UnknownFormError:
            return False
        return [number for _, number in cases] == [_COLUMN]


def _meaning(form: Form) -> Meaning:
    if len(form.shape) < 2:
        return Meaning(False, reason="the mask has no rows and columns")
    try:
        seen = _seen(form)
        known = domain(form.shape)
        if impossible(known, negated(seen)):
            return Meaning(False)
        if form.shape[-2] != form.shape[-1]:
            return Meaning(False, reason=f"the mask has {form.shape[-2]} rows and {form.shape[-1]} columns")
        window = _window(seen, form.shape[-1])
        shown = _BACK if not window else all_of((_BACK, -_BACK + window - 1))
        if impossible(known, seen, negated(shown)) and impossible(known, negated(seen), shown):
            return Meaning(True, window)
        return Meaning(False, reason=_other(seen, known))
    except UnknownFormError as reason:
        return Meaning(False, reason=f"the mask is not understood: {reason}")
    except (UndecidedError, RecursionError):
        return Meaning(False, reason="the mask has too many cases")


def _seen(form: Form) -> Formula:
    """Where a mask hides nothing."""
    if form.dtype == torch.bool:
        return form.nonzero
    if not form.dtype.is_floating_point:
        raise UnknownFormError(f"its dtype is {form.dtype}")
    hidden = (Linear((), int(torch.finfo(form.dtype).min)), float("-inf"))
    for _, number in form.cases:
        if number not in (Linear(), *hidden):
            raise UnknownFormError(f"it adds {number}, which neither shows nor hides")
    return some_of(where for where, number in form.cases if number == Linear())


def _window(seen: Formula, size: Linear) -> int:
    """The only window that this can be, or 0 for none: what the last row of a long mask shows. Nothing is proven."""
    atoms = list(inequalities(seen))
    length = size.constant if not size.terms else 4 + 4 * sum(abs(each.constant) + len(each.terms) for each in atoms)
    last = length - 1
    point: defaultdict[Variable, int] = defaultdict(lambda: 1, {-4: 0, -3: 0, -2: last})
    for variable, factor in size.terms:
        point[variable] = (length - size.constant) // factor
    columns = {0}
    for each in atoms:
        slope = dict(each.terms).get(-1, 0)
        if slope:
            edge = -each.value(point | {-1: 0}) // slope
            columns.update(column for column in (edge, edge + 1) if 0 <= column <= last)
    first = min((column for column in columns if holds(seen, point | {-1: column})), default=0)
    return length - first if first else 0


def _other(seen: Formula, known: list[Linear]) -> str:
    """What a mask shows that is neither causal nor a window."""
    edges: set[int] = set()
    for each in inequalities(seen):
        back = dict(each.terms).get(-2, 0)
        if back in (1, -1) and each.terms == (_BACK * back).terms:
            edges.add(-each.constant if back == 1 else each.constant + 1)
        elif settled(each, known) == each:
            return f"the mask depends on {each} >= 0, and not on row - column alone"
    seen = settled(seen, known)
    parts: list[str] = []
    before = holds(seen, {-2: min(edges, default=0) - 1, -1: 0})
    text = "row - column"
    for edge in sorted(edges):
        visible = holds(seen, {-2: edge, -1: 0})
        if before and not visible:
            parts.append(f"{text} < {edge}")
        text = f"{edge} <= row - column" if visible and not before else text
        before = visible
    parts += [text] if before else []
    return f"the mask shows {' or '.join(parts) or 'nothing'}: neither causal nor a window"
