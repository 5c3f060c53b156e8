"""Generate a Triton kernel from a region with reductions over the last axis: one program per row.

Each reduction is a loop over the blocks of the row, and so is the result. Sums are in float32; every value is rounded
to the dtype of its call, as in eager execution.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from inlay.insight.candidates.op_kinds import OpKind, op_kind, op_name
from inlay.insight.scaffold.triton_kernel import KernelWriter
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

    from inlay.insight.scaffold.region_source import RegionSource

_COLUMN = re.compile(r"\b(column|inside|c\d+)\b")
"""Names that differ between the columns of a row; all others are numbers."""
_ANYWHERE = "(row >= 0)"
"""The mask of a number."""
_INFINITY = 'float("inf")'
_COMBINE = {
    "sum": ("0.0", "{total} + tl.where(inside, {element}, 0.0)", "tl.sum({total}, axis=0)"),
    "amax": (
        f"-{_INFINITY}",
        f"tl.maximum({{total}}, tl.where(inside, {{element}}, -{_INFINITY}), propagate_nan=tl.PropagateNan.ALL)",
        "row_max({total})",
    ),
}
"""Reduction → its value for no elements, how a block is added to the lanes, and how the lanes are combined."""


class RowKernelWriter(KernelWriter):
    """Writes the kernel of a region with reductions: one program per row of the result."""

    constants = ({"BLOCK": 1024, "ONE": True}, {"BLOCK": 1024, "ONE": False})
    extent = "columns"

    def __init__(self, calls: RegionSource) -> None:
        super().__init__(calls)
        self.row_lines = ["row = tl.program_id(0).to(tl.int64)", "lanes = tl.arange(0, BLOCK).to(tl.int64)"]
        self.names = count(1)
        self.row_lengths: list[Any] = []
        self.is_number_per_row = False

    def _body(self, shape: list[Any]) -> list[str]:
        reduced = [node for node in self.calls.region.nodes if op_kind(node) is OpKind.REDUCTION]
        rows = [_sizes(operands(node)[0].meta["val"].shape[:-1]) for node in reduced]
        self.is_number_per_row = not shape or all(each == _sizes(shape) for each in rows)
        self.row_lines.append("rest = row")
        if self.is_number_per_row:
            result = self.value(self.output, self._unravel(shape, self.row_lines), _ANYWHERE)
            return [*self.row_lines, f"tl.store(out_ptr + row, {result})"]
        index = self._unravel(shape[:-1], self.row_lines)
        with self._loop(shape[-1]) as body:
            result = self.value(self.output, [*index, "column"], "inside")
            body.append(f"tl.store(out_ptr + row * {self._size(shape[-1])} + column, {result}, mask=inside)")
        return self.row_lines

    def _launch(self, arguments: str) -> list[str]:
        lengths = dict.fromkeys(map(self._size_expression, self.row_lengths))
        rows = "out.numel()" if self.is_number_per_row else "out.numel() // out.shape[-1]"
        launch = f"launch_rows(kernel, {rows}, columns, ({arguments}), config)"
        return [f"columns = max([{', '.join(lengths)}])", launch]

    def value(self, node: Any, index: list[str], mask: str) -> str:
        """Return the name of a value at an index."""
        if mask == "inside" and not any(map(_COLUMN.search, index)):
            mask = _ANYWHERE
        return super().value(node, index, mask)

    def _assign(self, text: str) -> str:
        """Name a value: in the loop if it depends on the column, otherwise before it."""
        is_column = bool(_COLUMN.search(text))
        name = f"{'c' if is_column else 'r'}{next(self.names)}"
        (self.lines if is_column else self.row_lines).append(f"{name} = {text}")
        return name

    def _load(self, place: str, mask: str) -> str:
        if mask == _ANYWHERE:
            return f"tl.load({place}).to(tl.float32)"
        return super()._load(self._spread(place, mask), mask)

    def _spread(self, text: str, mask: str) -> str:
        return f"{text} + 0 * column" if _COLUMN.search(mask) and not _COLUMN.search(text) else text

    def _compute(self, node: fx.Node, index: list[str], mask: str) -> str:
        compute = self._reduction if op_kind(node) is OpKind.REDUCTION else super()._compute
        return compute(node, index, mask)

    def _reduction(self, node: fx.Node, index: list[str], mask: str) -> str:
        """Return the value of a call that reduces rows, or of a norm or softmax of rows."""
        name, given = op_name(node), dict(normalize_args(node))
        source: Any = node.args[0]
        is_norm = name in ("layer_norm", "rms_norm")
        row = index[:-1] if is_norm or name == "softmax" or given.get("keepdim") else index
        axes = [-1] * len(given.get("normalized_shape", [0])) if is_norm else given.get("dim")
        if axes not in (-1, [-1]):
            raise self._refusal(node, "reduces over other axes than the last")
        if mask not in ("inside", _ANYWHERE):
            raise self._refusal(node, "convolves the result of a reduction")
        if any(map(_COLUMN.search, row)):
            raise self._refusal(node, "reduces over several axes")
        length, steps = source.meta["val"].shape[-1], count()
        if length == 0:
            raise self._refusal(node, "has rows of length 0")

        def read(column: str = "column") -> str:
            text = self.value(source, [*row, column], "inside" if column == "column" else mask)
            lowered = self._dtype(node) == "dtype" and self._dtype(source) != "dtype"
            return f"round_to({text}, dtype)" if lowered else text

        def reduce(kind: str, element: Callable[[], str] = read) -> str:
            key = (node, tuple(row), next(steps))
            if key not in self.value_names:
                self.value_names[key] = self._reduce(kind, length, element)
            return self.value_names[key]

        size = self._size(length)
        if name in ("sum", "amax"):
            return reduce(name)
        if name == "amin":
            return f"-{reduce('amax', lambda: f'-{read()}')}"
        if name == "mean":
            return f"{reduce('sum')} / {size}"
        if name == "softmax":
            most = reduce("amax")
            total = reduce("sum", lambda: f"tl.exp({read()} - {most})")
            return f"tl.exp({read(index[-1])} - {most}) / {total}"
        if name in ("var", "layer_norm"):
            mean = self._assign(f"{reduce('sum')} / {size}")
            squares = reduce("sum", lambda: f"({read()} - {mean}) * ({read()} - {mean})")
            if name == "layer_norm":
                normed = f"({read(index[-1])} - {mean}) * tl.rsqrt({squares} / {size} + {given['eps']})"
                return self._scaled(node, normed, given, index, mask)
            correction = given.get("correction", given.get("unbiased"))
            if correction not in (None, 0, 1):
                raise self._refusal(node, f"has the correction {correction}")
            return f"{squares} / ({size} - {1 if correction is None else int(correction)})"
        if name == "rms_norm" and given["eps"] is not None:
            mean = f"{reduce('sum', lambda: f'{read()} * {read()}')} / {size}"
            normed = f"{read(index[-1])} * tl.rsqrt({mean} + {given['eps']})"
            if given.get("cast_first") and self._dtype(source) == "dtype":
                normed = f"round_to({normed}, dtype)"
            return self._scaled(node, normed, given, index, mask)
        raise self._refusal(node)

    def _scaled(self, node: fx.Node, normed: str, given: dict[str, Any], index: list[str], mask: str) -> str:
        """Return a normalized value with weight and bias."""
        text = self._assign(normed)
        if any(each is not None and each.meta["val"].dim() != 1 for each in (given.get("weight"), given.get("bias"))):
            raise self._refusal(node, "has a weight of several axes")
        if given.get("weight") is not None:
            weight = self.value(given["weight"], index[-1:], mask)
            if given.get("offset"):
                weight = f"({weight} + {given['offset']})"
                weight = f"round_to({weight}, dtype)" if given["cast_first"] else weight
            text = f"{text} * {weight}"
        if given.get("bias") is not None:
            text = f"{text} + {self.value(given['bias'], index[-1:], mask)}"
        return text

    def _reduce(self, kind: str, length: Any, element: Callable[[], str]) -> str:
        """Write the loop that reduces a row before the current loop; return the name of the result."""
        first, combine, last = _COMBINE[kind]
        total = f"total{next(self.names)}"
        with self._loop(length, f"{total} = tl.full((BLOCK,), {first}, tl.float32)") as body:
            body.append(f"{total} = {combine.format(total=total, element=element())}")
        return self._assign(last.format(total=total))

    @contextmanager
    def _loop(self, length: Any, before: str = "") -> Iterator[list[str]]:
        """Write a loop over the blocks of a row; values that depend on the column are known only inside."""
        self.row_lengths.append(length)
        outer, known = self.lines, self.value_names
        self.lines, self.value_names = [], self._row_values()
        yield self.lines
        size = self._size(length)
        start = ["column = start + lanes", f"inside = column < {size}"]
        self.row_lines += [before] if before else []
        self.row_lines.append(f"for start in range(0, 1 if ONE else {size}, BLOCK):")
        self.row_lines += [f"    {line}" for line in (*start, *self.lines)]
        self.lines, self.value_names = outer, known | self._row_values()

    def _row_values(self) -> dict[Any, str]:
        return {key: name for key, name in self.value_names.items() if not _COLUMN.search(name)}


def _sizes(shape: Any) -> list[str]:
    """Return the sizes that are not 1, sorted."""
    return sorted(str(size) for size in shape if str(size) != "1")
