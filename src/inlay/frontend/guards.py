"""Adapter: the shape guards of tracing, and whether they hold for every size in the range of a program.

Python code that loops or branches on a size is traced for the sizes of the example. torch records a guard for each such
decision: `(length + 63) // 64 == 1` for a loop over chunks of 64 that was unrolled once. The program is equivalent to
the model only where all guards hold. Guards are evaluated at every size of the program's range. This detects a loop, a
branch or a baked-in number for any chunk or window size, without tracing the model at a second length.

Size 1 is a special case. torch traces as if no size were 1, because the strides of an axis of size 1 do not matter. A
guard from torch's code that fails only at 1 is not an assumption of the model. A guard from a module's code raises the
lower bound to 2. transformers checks whether the batch is 1 before it expands tensors of one row, which does not change
results; its models are compared with eager at a batch and a length of 1 (docs/architectures.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch

from inlay.errors import CaptureError
from inlay.program.graphs import all_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import fx

    from inlay.frontend.source_model import SourceModel
    from inlay.program.program import Program, Symbol

_EXHAUSTIVE_LIMIT = 1 << 20
"""Every size up to this one is checked."""
_SAMPLE_SIZES = (2, 3, 7, 64, 1000)
"""Values of the other symbols while all sizes of one symbol are checked."""
_MAX_SUBSTITUTIONS = 4096
"""Number of sizes to check if a guard contains a function that only torch can evaluate."""
_TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
_RELATIONS: dict[Any, Any] = {
    **{sympy.Eq: np.equal, sympy.Ne: np.not_equal, sympy.Lt: np.less, sympy.Le: np.less_equal},
    **{sympy.Gt: np.greater, sympy.Ge: np.greater_equal, sympy.Not: np.logical_not},
}
_REDUCTIONS: dict[Any, Any] = {
    **{sympy.Add: np.add, sympy.Mul: np.multiply, sympy.And: np.logical_and, sympy.Or: np.logical_or},
    **{"Max": np.maximum, "Min": np.minimum},
}
_FUNCTIONS: dict[str, Any] = {
    **{"FloorDiv": np.floor_divide, "CleanDiv": np.floor_divide, "Mod": np.mod, "PythonMod": np.mod},
    **{"IntTrueDiv": np.true_divide, "FloatTrueDiv": np.true_divide, "ToFloat": np.float64},
    **{"CeilToInt": np.ceil, "FloorToInt": np.floor, "TruncToInt": np.trunc, "RoundToInt": np.rint},
}


class _UnsupportedFunction(Exception):  # noqa: N818 - not an error
    """A function that `_evaluate` does not support."""


@dataclass(frozen=True)
class ShapeGuard:
    """A guard: its condition, and the source line that caused it if the line is outside torch."""

    expression: Any
    source: str


def collect_guards(graph: fx.Graph) -> list[ShapeGuard]:
    """Return the guards on the sizes of a traced graph."""
    found: dict[Any, str] = {}
    for env in {id(each): each for each in _shape_envs(graph)}.values():
        for guard in env.guards:
            source = _source_line(guard)
            found[guard.expr] = found.get(guard.expr) or source
    compared = _comparisons_of_min(found)
    return [ShapeGuard(each, source) for each, source in found.items() if source or each not in compared]


def _comparisons_of_min(guards: Iterable[Any]) -> set[Any]:
    """Return the comparisons that `min` makes when torch checks a guard such as `length == min(512, length)` in Python.

    torch records them as guards, `length < 512`, when it traces its own check. They assume nothing.
    """
    pairs = [set(each.args) for each in guards if each.func is sympy.Eq]
    found = set()
    for limit, size in (permuted for pair in pairs for each in pair for permuted in _min_operands(each)):
        equal = {size}.union(*(pair for pair in pairs if size in pair))
        found |= {sympy.Lt(each, limit) for each in equal if each.is_Symbol}
    return found


def _min_operands(expression: Any) -> Iterable[Any]:
    return permutations(expression.args, 2) if expression.func.__name__ == "Min" else ()


def narrow_ranges(program: Program, guards: Iterable[ShapeGuard], model: SourceModel) -> Program:
    """Return the program with its ranges narrowed to sizes for which all guards hold.

    A module without maximum sizes gets the largest valid range around its example. A model with a maximum size is
    rejected if a guard fails below it. A model is also rejected if the valid sizes are not a range.
    """
    symbols = dict(program.symbols)
    # Guards from the model's code come first, so that an error names a line of the model.
    for each in sorted(guards, key=lambda each: not each.source):
        free = {str(symbol): symbol for symbol in each.expression.free_symbols}
        if not free or not free.keys() <= symbols.keys():
            continue  # data-dependent sizes are checked at run time
        if _is_divisibility_guard(each, symbols) and _is_checked_by_view(program, free.values()):
            continue
        for raw in free:
            claimed = symbols[raw]
            limit = model.max_sizes.get(claimed.name)
            kept, broken = _valid_range(each, raw, free, symbols, limit)
            if broken is not None and (limit is not None or kept is None):
                raise _guard_error(program, each, broken)
            if kept is not None:
                symbols[raw] = replace(claimed, low=kept[0], high=kept[1])
            if model.kind == "module" and each.source and claimed.low == 1 and not _holds_at(each, free, raw, 1):
                symbols[raw] = replace(symbols[raw], low=max(symbols[raw].low, 2))
    return replace(program, symbols=symbols)


def _valid_range(
    each: ShapeGuard, raw: str, free: Mapping[str, Any], symbols: Mapping[str, Symbol], limit: int | None
) -> tuple[tuple[int, int | None] | None, dict[str, int] | None]:
    """Return the range around the example in which a guard holds, if any, and sizes for which the guard fails."""
    symbol = symbols[raw]
    sizes = _sizes_to_check(each.expression, symbol if limit is None else replace(symbol, high=limit))
    for other in _SAMPLE_SIZES if len(free) > 1 else (0,):
        given = {name: min(max(other, symbols[name].low), symbols[name].high or other) for name in free}
        held = _evaluate_guard(each.expression, {free[name]: given[name] for name in free} | {free[raw]: sizes})
        if not held.all():
            broken = {**given, raw: int(sizes[int(np.argmin(held))])}
            return _contiguous_range(symbol, sizes, held) if len(free) == 1 else None, broken
    return None, None


def _contiguous_range(symbol: Symbol, sizes: Any, held: Any) -> tuple[int, int | None] | None:
    """Return the contiguous range around the example, or None."""
    example = int(np.searchsorted(sizes[:-1], symbol.example))
    if example >= len(sizes) or sizes[example] != symbol.example or not held[example]:
        return None
    wrong = np.flatnonzero(~held)
    below, above = wrong[wrong < example], wrong[wrong > example]
    low = int(sizes[below[-1] + 1]) if len(below) else symbol.low
    return low, int(sizes[above[0] - 1]) if len(above) else symbol.high


def _is_divisibility_guard(each: ShapeGuard, symbols: Mapping[str, Symbol]) -> bool:
    """Whether torch's code requires multiples of a number. Code of the model may support other sizes differently."""
    if each.source:
        return False
    free = list(each.expression.free_symbols)
    numbers = {abs(int(number)) for number in each.expression.atoms(sympy.Integer)} - {0, 1}

    def is_multiple(chosen: Any, number: int) -> bool:
        sizes = _sizes_to_check(each.expression, symbols[str(chosen)])
        others: list[dict[Any, Any]] = [dict.fromkeys(free, other) for other in _SAMPLE_SIZES]
        return all(
            np.array_equal(_evaluate_guard(each.expression, given | {chosen: sizes}), sizes % number == 0)
            for given in others
        )

    return any(is_multiple(chosen, number) for chosen in free for number in numbers)


def _is_checked_by_view(program: Program, symbols: Iterable[Any]) -> bool:
    """Whether a view divides one of these sizes. The view then fails at run time for sizes that are not multiples."""
    shapes = [node.meta["val"].shape for node in all_nodes(program.graph) if node.target in _VIEWS]
    divided = [size.node.expr for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    return any(expr.has(symbol) and not expr.is_polynomial(symbol) for expr in divided for symbol in symbols)


def _holds_at(each: ShapeGuard, free: Mapping[str, Any], raw: str, size: int) -> bool:
    given = {symbol: np.array([size if name == raw else _SAMPLE_SIZES[-1]]) for name, symbol in free.items()}
    return bool(_evaluate_guard(each.expression, given).all())


def _shape_envs(graph: fx.Graph) -> Iterable[Any]:
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if node.op == "placeholder" and mode is not None and mode.shape_env is not None:
            yield mode.shape_env


def _source_line(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    file = getattr(frame, "filename", "")
    return "" if not file or file.startswith(_TORCH_FOLDER) else f"{Path(file).name}:{frame.lineno}"


def _sizes_to_check(expression: Any, symbol: Symbol) -> Any:
    """Return every size of a range from 2 on; an open range ends at twice the sum of the constants, 1024 to 2**20."""
    constants = sum(abs(int(each)) for each in expression.atoms(sympy.Integer))
    high = symbol.high if symbol.high is not None else min(max(1024, 2 * constants), _EXHAUSTIVE_LIMIT)
    low = max(symbol.low, 2)
    return np.append(np.arange(low, min(high, _EXHAUSTIVE_LIMIT) + 1), max(low, high))


def _evaluate_guard(expression: Any, given: Mapping[Any, Any]) -> Any:
    sizes: Any = next(value for value in given.values() if isinstance(value, np.ndarray))
    try:
        return np.broadcast_to(_evaluate(expression, given), sizes.shape)
    except _UnsupportedFunction:
        # torch evaluates its own functions, one size at a time. Sizes that are not tried count as failures.
        held = np.zeros(sizes.shape, bool)
        for place in range(min(_MAX_SUBSTITUTIONS, len(sizes))):
            chosen = {symbol: int(np.atleast_1d(value)[-1]) for symbol, value in given.items()}
            chosen |= {symbol: int(value[place]) for symbol, value in given.items() if isinstance(value, np.ndarray)}
            held[place] = expression.subs(chosen) == sympy.true
        return held


def _evaluate(expression: Any, given: Mapping[Any, Any]) -> Any:
    """Evaluate an expression for many sizes at once."""
    if expression in given:
        return given[expression]
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float:
        return float(expression)
    if expression in (sympy.true, sympy.false):
        return expression == sympy.true
    args = [_evaluate(each, given) for each in expression.args]
    kind, name = expression.func, expression.func.__name__
    if kind in _RELATIONS or name in _FUNCTIONS:
        return (_RELATIONS.get(kind) or _FUNCTIONS[name])(*args)
    if kind in _REDUCTIONS or name in _REDUCTIONS:
        return reduce(_REDUCTIONS.get(kind) or _REDUCTIONS[name], args)
    if kind is sympy.Pow and isinstance(args[1], int) and args[1] >= 0:
        return args[0] ** args[1]
    raise _UnsupportedFunction(name)


def _guard_error(program: Program, each: ShapeGuard, broken: Mapping[str, int]) -> CaptureError:
    names = {raw: program.symbols[raw].name for raw in broken}
    text = str(each.expression.xreplace({raw: sympy.Symbol(names[str(raw)]) for raw in each.expression.free_symbols}))
    sizes = " and ".join(f"{names[raw]} {size}" for raw, size in broken.items())
    traced = " and ".join(f"{names[raw]} {program.symbols[raw].example}" for raw in broken)
    where = f" at {each.source}" if each.source else ""
    return CaptureError(
        f"{program.name} is not the same program for all sizes: traced with {traced}, its code takes a path{where} that"
        f" requires {text}, which is false for {sizes}.",
        "Replace the loop or branch over a size by tensor operations, or narrow the range of sizes.",
    )
