"""Compare named values of an eager run and a compiled run, and describe the differences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}
"""Allowed error of a compiled value, relative to the largest value, in addition to twice the error of eager."""
_MAX_REFERENCE_DISTANCE = 32
"""A reference that differs from eager by more than this many tolerances computes something else and is ignored."""
_NOISE = 4


@dataclass(frozen=True)
class ValueDifference:
    """One property of one value that differs."""

    run: str
    name: str
    kind: str
    eager: str
    compiled: str


def flatten_named(prefix: str, value: Any, depth: int = 4) -> dict[str, Any]:
    """Return the leaves of a value by name. An object without `__eq__`, such as a cache, is split into its attributes.

    >>> flatten_named("output", {"x": [1, 2], "y": None})
    {"output['x'][0]": 1, "output['x'][1]": 2, "output['y']": None}
    """
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    found: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        name = prefix + keystr(path)
        if depth and hasattr(leaf, "__dict__") and getattr(type(leaf), "__eq__", None) is object.__eq__:
            for attribute, part in vars(leaf).items():
                found |= flatten_named(f"{name}.{attribute}", part, depth - 1)
        else:
            found[name] = leaf
    return found


def find_differences(
    run: str,
    eager: Mapping[str, Any],
    compiled: Mapping[str, Any],
    reference: Mapping[str, Any],
    tolerance: Mapping[torch.dtype, float],
    strides: bool,
) -> list[ValueDifference]:
    """Return all differences: names, types, shapes, dtypes, values, and strides if `strides` is set."""
    largest = _largest(eager)
    found = []
    for name in dict.fromkeys((*eager, *compiled)):
        one, two = eager.get(name, _Missing()), compiled.get(name, _Missing())
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            size, noise = largest.get(_kind(name), 0.0), _NOISE if _kind(name) == "gradient" else 0
            rows = _tensors(
                name, one, two, _ErrorLimits(reference.get(name), tolerance.get(one.dtype, 0.0), size, noise)
            )
        else:
            rows = [] if _same(one, two) else [("value", _text(one), _text(two))]
        found += [ValueDifference(run, name, *row) for row in rows if strides or row[0] != "stride"]
    return found


def format_table(found: Sequence[ValueDifference]) -> str:
    """Format the differences as a table with one row each."""
    rows = [("run", "what", "differs", "eager", "compiled")]
    rows += [(each.run, each.name, each.kind, each.eager, each.compiled) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@dataclass(frozen=True)
class _ErrorLimits:
    reference: Any
    tolerance: float
    largest: float
    """The largest value of the same kind."""
    noise: float
    """Rounding errors of `largest` that are ignored; a gradient may be zero except for them."""


def _kind(name: str) -> str:
    return re.split(r"[\[. ]", name)[0]


def _largest(values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        size = 0.0
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            size = float(value.detach().to(torch.float64).nan_to_num(0, 0, 0).abs().max())
        found[_kind(name)] = max(found.get(_kind(name), 0.0), size)
    return found


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


def _same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two or one != one)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _tensors(name: str, one: torch.Tensor, two: torch.Tensor, judge: _ErrorLimits) -> list[tuple[str, str, str]]:
    rows = []
    if one.dtype != two.dtype:
        rows.append(("dtype", str(one.dtype).removeprefix("torch."), str(two.dtype).removeprefix("torch.")))
    if one.shape != two.shape:
        return [*rows, ("shape", str(tuple(one.shape)), str(tuple(two.shape)))]
    # autograd may choose any layout for a gradient
    if not name.startswith("gradient") and _strides(one) != _strides(two):
        rows.append(("stride", str(one.stride()), str(two.stride())))
    return rows + _values(one.detach(), two.detach(), judge)


def _strides(value: torch.Tensor) -> list[int]:
    """Return the strides without those of axes of size 1, which have no meaning."""
    if value.numel() == 0:
        return []
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def _values(one: torch.Tensor, two: torch.Tensor, judge: _ErrorLimits) -> list[tuple[str, str, str]]:
    if one.numel() == 0:
        return []
    if not (one.is_floating_point() or one.is_complex()):
        wrong = one != two
        return [_worst(one, two, wrong.to(torch.float64), "must be equal")] if wrong.any() else []
    wide = torch.complex128 if one.is_complex() else torch.float64
    left, right = one.to(wide), two.to(wide)
    finite = left.isfinite()
    unlike = (finite != right.isfinite()) | ~finite & ~((left == right) | left.isnan() & right.isnan())
    if unlike.any():
        return [_worst(one, two, unlike.to(torch.float64), "not finite in one of them")]
    scale = float(left[finite].abs().max()) if finite.any() else 0.0
    base, own = left, 0.0
    if isinstance(judge.reference, torch.Tensor) and judge.reference.shape == one.shape:
        exact = judge.reference.detach().to(wide)
        away = (left - exact).where(finite, 0).abs().max()
        if away <= _MAX_REFERENCE_DISTANCE * judge.tolerance * judge.largest:  # also rejects a non-finite reference
            base, own = exact, float(away)
    error = (right - base).where(finite, 0).abs()
    allowed = judge.tolerance * scale + 2 * own + judge.noise * torch.finfo(one.dtype).eps * judge.largest
    return [_worst(one, two, error, f"allowed {allowed:.1e}")] if error.max() > allowed else []


def _worst(one: torch.Tensor, two: torch.Tensor, error: torch.Tensor, remark: str) -> tuple[str, str, str]:
    flat = int(error.flatten().argmax())
    at = [int(each) for each in torch.unravel_index(torch.tensor(flat), error.shape)]
    left, right = (each[tuple(at)].item() for each in (one, two))
    return "value", f"{left:.6g} at {at}", f"{right:.6g}, off by {float(error.max()):.1e}, {remark}"
