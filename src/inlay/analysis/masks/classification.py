"""Classify masks: causal, causal with a window, or showing everything, for every length; otherwise the reason.

A mask is a formula over row and column (`analysis/masks/derivation.py`). Its kind is proven: no row and column exist
where the formula and the kind differ (`analysis/masks/inequalities.py`).

There is one assumption: a mask that adds the lowest number of its dtype instead of -inf hides. It does not hide where
scores exceed the magnitude of that number, which in float16 is 65504.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.analysis.masks.derivation import IndexAnalysis
from inlay.analysis.masks.index_function import IndexFunction, UnknownIndexFunctionError, domain
from inlay.analysis.masks.inequalities import (
    AffineExpr,
    Formula,
    UndecidedError,
    Variable,
    conjunction,
    disjunction,
    is_satisfied,
    is_unsatisfiable,
    iter_inequalities,
    negate,
    simplify,
)
from inlay.program.graphs import sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.program import Symbol

_ROW, _COLUMN = AffineExpr.from_variable(-2), AffineExpr.from_variable(-1)
_DISTANCE = _ROW - _COLUMN


@dataclass(frozen=True)
class MaskKind:
    """What a mask hides: later positions, and those `window` or more steps back unless it is 0; or why unknown."""

    is_causal: bool
    window: int = 0
    reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the kind is known. A known mask that is not causal hides nothing."""
        return not self.reason


class MaskAnalysis:
    """Classifies the masks of a graph, for all sizes that `symbols` allow."""

    def __init__(self, graph: fx.Graph, symbols: Mapping[str, Symbol] | None = None) -> None:
        self._index_analysis = IndexAnalysis(graph, symbols)
        self._kinds: dict[fx.Node, MaskKind] = {}

    def classify(self, mask: fx.Node, reader: fx.Node) -> MaskKind:
        """Return what `mask`, whose last axes are rows and columns, hides when `reader` reads it."""
        try:
            form = self._index_analysis.derive(mask, reader)
            if mask not in self._kinds:
                self._kinds[mask] = _classify(form)
            return self._kinds[mask]
        except UnknownIndexFunctionError as reason:
            return MaskKind(False, reason=f"the mask is not recognized: {reason}")

    def is_arange(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether a node is 0, 1, 2, … along its last axis at any length, and constant along all other axes."""
        try:
            cases = self._index_analysis.derive(node, reader).cases
        except UnknownIndexFunctionError:
            return False
        return [number for _, number in cases] == [_COLUMN]


def _classify(form: IndexFunction) -> MaskKind:
    if len(form.shape) < 2:
        return MaskKind(False, reason="the mask has no rows and columns")
    try:
        seen = _visible_region(form)
        known = domain(form.shape)
        if is_unsatisfiable(known, negate(seen)):
            return MaskKind(False)
        if form.shape[-2] != form.shape[-1]:
            return MaskKind(False, reason=f"the mask has {form.shape[-2]} rows and {form.shape[-1]} columns")
        window = _candidate_window(seen, form.shape[-1])
        shown = _DISTANCE if not window else conjunction((_DISTANCE, -_DISTANCE + window - 1))
        if is_unsatisfiable(known, seen, negate(shown)) and is_unsatisfiable(known, negate(seen), shown):
            return MaskKind(True, window)
        return MaskKind(False, reason=_describe_mask(seen, known))
    except UnknownIndexFunctionError as reason:
        return MaskKind(False, reason=f"the mask is not recognized: {reason}")
    except (UndecidedError, RecursionError):
        return MaskKind(False, reason="the mask has too many cases")


def _visible_region(form: IndexFunction) -> Formula:
    """Return the formula of positions that a mask does not hide."""
    if form.dtype == torch.bool:
        return form.nonzero
    if not form.dtype.is_floating_point:
        raise UnknownIndexFunctionError(f"its dtype is {form.dtype}")
    hidden = (AffineExpr((), int(torch.finfo(form.dtype).min)), float("-inf"))
    for _, number in form.cases:
        if number not in (AffineExpr(), *hidden):
            raise UnknownIndexFunctionError(f"it adds {number}, which is neither 0 nor a masking value")
    return disjunction(where for where, number in form.cases if number == AffineExpr())


def _candidate_window(seen: Formula, size: AffineExpr) -> int:
    """Return the only possible window, or 0 for none, from the last row of a long mask. The caller must prove it."""
    atoms = list(iter_inequalities(seen))
    length = size.constant if not size.terms else 4 + 4 * sum(abs(each.constant) + len(each.terms) for each in atoms)
    last = length - 1
    point: defaultdict[Variable, int] = defaultdict(lambda: 1, {-4: 0, -3: 0, -2: last})
    for variable, factor in size.terms:
        point[variable] = (length - size.constant) // factor
    columns = {0}
    for each in atoms:
        slope = dict(each.terms).get(-1, 0)
        if slope:
            edge = -each.evaluate(point | {-1: 0}) // slope
            columns.update(column for column in (edge, edge + 1) if 0 <= column <= last)
    first = min((column for column in columns if is_satisfied(seen, point | {-1: column})), default=0)
    return length - first if first else 0


def _describe_mask(seen: Formula, known: list[AffineExpr]) -> str:
    """Return the reason for a mask that is neither causal nor a window."""
    edges: set[int] = set()
    for each in iter_inequalities(seen):
        back = dict(each.terms).get(-2, 0)
        if back in (1, -1) and each.terms == (_DISTANCE * back).terms:
            edges.add(-each.constant if back == 1 else each.constant + 1)
        elif simplify(each, known) == each:
            return f"the mask depends on {each} >= 0, and not on row - column alone"
    seen = simplify(seen, known)
    parts: list[str] = []
    before = is_satisfied(seen, {-2: min(edges, default=0) - 1, -1: 0})
    text = "row - column"
    for edge in sorted(edges):
        visible = is_satisfied(seen, {-2: edge, -1: 0})
        if before and not visible:
            parts.append(f"{text} < {edge}")
        text = f"{edge} <= row - column" if visible and not before else text
        before = visible
    parts += [text] if before else []
    return f"the mask shows {' or '.join(parts) or 'nothing'}, which is neither causal nor a window"


aten = torch.ops.aten
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def find_alibi_slopes(bias: fx.Node, masks: MaskAnalysis, reader: fx.Node) -> fx.Node | None:
    """Return the slopes, `[heads, 1, 1]`, by which `bias`, `[batch, heads, 1, keys]`, scales key positions, or None.

    The chain is view(to(repeat(slopes * positions, [batch, 1, 1]))), the cast is optional, every shape is checked.
    """
    wanted = _shape(bias)
    if bias.target not in _RESHAPES or len(wanted) != 4 or wanted[2] != "1":
        return None
    at: Any = bias.args[0]
    if at.target is aten._to_copy.default:
        at = at.args[0]
    batch, heads, _, keys = bias.meta["val"].shape
    if at.target is not aten.repeat.default or _shape(at) != [str(batch * heads), "1", str(keys)]:
        return None
    product = at.args[0]
    if product.target is not aten.mul.Tensor:
        return None
    for factor, positions in (product.args, tuple(reversed(product.args))):
        if isinstance(factor, fx.Node) and isinstance(positions, fx.Node):
            one_a_head = _shape(factor) == [str(heads), "1", "1"]
            one_a_key = _shape(positions)[-1:] == [str(keys)] and set(_shape(positions)[:-1]) <= {"1"}
            if one_a_head and one_a_key and masks.is_arange(positions, reader):
                return factor
    return None


def _shape(node: fx.Node) -> list[str]:
    return sizes(node.meta["val"])
