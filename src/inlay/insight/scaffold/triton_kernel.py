"""Generate a Triton kernel from a region: each output element is computed from its index, back to the inputs.

Views become index arithmetic; a depthwise convolution becomes a sum over its taps. A region with reductions becomes a
kernel with one program per row (row_kernel.py). Nothing is timed.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.errors import UsageError
from inlay.insight.candidates.op_kinds import OpKind, op_kind, op_name
from inlay.program.call_arguments import normalize_args
from inlay.program.graphs import operands

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.insight.candidates import Candidate
    from inlay.insight.scaffold.region_source import RegionSource

_POINTWISE: dict[str, Callable[..., str]] = {
    "add": lambda a, b: f"{a} + {b}",
    "sub": lambda a, b: f"{a} - {b}",
    "mul": lambda a, b: f"{a} * {b}",
    "div": lambda a, b: f"{a} / {b}",
    "neg": lambda a: f"-{a}",
    "exp": lambda a: f"tl.exp({a})",
    "sqrt": lambda a: f"tl.sqrt({a})",
    "rsqrt": lambda a: f"tl.rsqrt({a})",
    "sigmoid": lambda a: f"tl.sigmoid({a})",
    "silu": lambda a: f"{a} * tl.sigmoid({a})",
    "tanh": lambda a: f"tanh({a})",
    "relu": lambda a: f"tl.where({a} < 0.0, 0.0, {a})",
    "square": lambda a: f"{a} * {a}",
    "to_copy": lambda a: f"{a}",
}
_POWERS: dict[Any, str] = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}
_IDENTITY_OPS = {"clone", "contiguous", "alias"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generate_kernel(candidate: Candidate, calls: RegionSource) -> dict[str, str]:
    """Return the template fields for a kernel of this candidate."""
    if len(candidate.regions[0].outputs) != 1:
        raise unsupported_error(f"{candidate.name} has several results")
    writer, names = KernelWriter, ", ".join(calls.inputs.values())
    if any(op_kind(node) is OpKind.REDUCTION for node in calls.region.nodes):
        from inlay.insight.scaffold.row_kernel import RowKernelWriter

        writer = RowKernelWriter
    return {
        "triton_source": writer(calls).module(candidate.name),
        "numerics": "ROUNDING",
        "more": ", register_kernel",
        "device": (
            f'\n@register_kernel("{candidate.name}", "CUDA")\n'
            f"def _({', '.join(f'{name}: Tensor' for name in calls.inputs.values())}) -> Tensor:\n"
            f'    """On a GPU, the Triton kernel if it fits. Not timed."""\n'
            f"    from {candidate.name}_triton import launch, mismatch\n\n"
            f"    return {candidate.name}({names}) if mismatch({names}) else launch({names})\n\n"
        ),
    }


def unsupported_error(problem: str) -> UsageError:
    """Return the refusal to generate a kernel."""
    return UsageError(
        f"{problem}; kernel generation does not support this.",
        "Write the kernel by hand: docs/candidate_to_transform.md.",
    )


def _affine_index(index: str, step: int, start: int) -> str:
    """
    >>> _affine_index("i", 1, 0), _affine_index("i", 2, 0), _affine_index("i", 1, -2)
    ('i', 'i * 2', '(i - 2)')
    """
    text = index if step == 1 else f"{index} * {step}"
    return text if not start else f"({text} {'+' if start > 0 else '-'} {abs(start)})"


class KernelWriter:
    """Writes the kernel of a region without reductions: one lane per element of the result."""

    constants: tuple[dict[str, Any], ...] = ({"BLOCK": 256},)
    extent = "numel"
    """The kernel argument with the number of elements."""

    def __init__(self, calls: RegionSource) -> None:
        self.calls, self.output = calls, calls.region.outputs[0]
        self.lines: list[str] = []
        self.sizes: dict[str, str] = {}
        """Dynamic size → kernel argument."""
        self.value_names: dict[Any, str] = {}
        kinds = {node.meta["val"].dtype for node in calls.inputs}
        if len(kinds) != 1 or not kinds <= set(_DTYPES):
            raise unsupported_error(f"{calls.region.name} has inputs of {', '.join(sorted(map(str, kinds)))}")
        self.dtype: torch.dtype = kinds.pop()
        self.dtypes: dict[Any, str] = dict.fromkeys(calls.inputs, "dtype")

    def module(self, name: str) -> str:
        """Return the source of the module: kernel, launcher and signature."""
        shape = list(self.output.meta["val"].shape)
        body = "\n".join(f"    {line}" for line in self._body(shape))
        held = {name: node.meta["val"] for node, name in self.calls.inputs.items()}
        names, arguments = ", ".join(held), ", ".join(f"{each}: torch.Tensor" for each in held)
        pointers = [f"{each}_ptr" for each in held]
        strides = [f"{each}_s{axis}" for each, value in held.items() for axis in range(value.dim())]
        numbers = [self.extent, *self.sizes.values(), *strides]
        given = ["out", self.extent, *map(self._size_expression, self.sizes), *(f"*{each}.stride()" for each in held)]
        casts = {dict(normalize_args(node)).get("dtype") for node in self.calls.region.nodes}
        shapes = [tuple(size if isinstance(size, int) else str(size) for size in each.shape) for each in held.values()]
        dtype = "torch.float32" if self._dtype(self.output) == "tl.float32" else f"{next(iter(held))}.dtype"
        launch = "\n        ".join(self._launch(", ".join([names, *given])))
        return f'''"""{name} as one Triton kernel.

Interpreted, and compiled for sm_80, sm_90 and sm_100. Not run on a GPU, not timed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inlay.ops.generated_triton import find_mismatch, launch_rows, round_to, row_max, tanh

CONSTANTS = {self.constants!r}
NUMBERS = {numbers!r}
SHAPES = {shapes!r}
DTYPES = {[self.dtype] if self.dtype in casts - {torch.float32} else list(_DTYPES)!r}


@triton.jit
def kernel({", ".join([*pointers, "out_ptr", *numbers, *(f"{each}: tl.constexpr" for each in self.constants[0])])}):
    dtype = {pointers[0]}.dtype.element_ty
{body}


def mismatch({arguments}) -> str:
    """Return why the kernel does not compute this; empty if it does."""
    return find_mismatch([{names}], SHAPES, DTYPES)


def launch({arguments}, out: Any = None, config: Any = None) -> torch.Tensor:
    """Run the kernel and return its result, in `out` (contiguous) if given; `config` is a `triton.Config`."""
    if reason := mismatch({names}):
        raise ValueError(reason)
    if out is None:
        shape = ({"".join(f"{self._size_expression(size)}, " for size in shape)})
        out = torch.empty(shape, dtype={dtype}, device={next(iter(held))}.device)
    if out.numel():
        {launch}
    return out


def signature(pointer: str) -> dict[str, Any]:
    """Types of the arguments, for compilation without a launch."""
    pointers = dict.fromkeys({pointers!r}, pointer) | {{"out_ptr": {'"*fp32"' if "32" in dtype else "pointer"}}}
    return pointers | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(CONSTANTS[0], "constexpr")
'''

    def _body(self, shape: list[Any]) -> list[str]:
        """Return the statements of the kernel."""
        first = "tl.program_id(0).to(tl.int64) * BLOCK"
        self.lines += [f"rest = {first} + tl.arange(0, BLOCK)", "place = rest", "inside = rest < numel"]
        result = self.value(self.output, self._unravel(shape, self.lines), "inside")
        return [*self.lines, f"tl.store(out_ptr + place, {result}, mask=inside)"]

    def _launch(self, arguments: str) -> list[str]:
        """Return the statements that launch the kernel."""
        return ["numel = out.numel()", f"kernel[(triton.cdiv(numel, 256),)]({arguments}, BLOCK=256)"]

    def _unravel(self, shape: list[Any], lines: list[str]) -> list[str]:
        """Write and return the index of each axis, from the number `rest`."""
        for axis in reversed(range(1, len(shape))):
            lines += [f"i{axis} = rest % {self._size(shape[axis])}", f"rest = rest // {self._size(shape[axis])}"]
        return ["rest", *(f"i{axis}" for axis in range(1, len(shape)))] if shape else []

    def value(self, node: Any, index: list[str], mask: str) -> str:
        """Return the name of a value at an index."""
        if not isinstance(node, fx.Node):
            return repr(node) if math.isfinite(node) else f'float("{node}")'
        if node not in self.calls.inputs:
            name = "getitem" if node.target is operator.getitem else op_name(node)
            if name in _IDENTITY_OPS:
                return self.value(node.args[0], index, mask)
            if op_kind(node) is OpKind.VIEW:
                source, moved = self._view_source(node, name, index)
                return self.value(source, moved, mask)
        key = (node, tuple(index), mask)
        if key not in self.value_names:
            if node in self.calls.inputs:
                held = self.calls.inputs[node]
                terms = [f"{each} * {held}_s{axis}" for axis, each in enumerate(index) if each != "0"]
                text = self._load(" + ".join([f"{held}_ptr", *terms]), mask)
            else:
                is_rounded, text = self._dtype(node) == "dtype", self._compute(node, index, mask)
                text = f"round_to({text}, dtype)" if is_rounded else text
            self.value_names[key] = self._assign(text)
        return self.value_names[key]

    def _assign(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _compute(self, node: fx.Node, index: list[str], mask: str) -> str:
        if op_kind(node) is OpKind.STENCIL:
            return self._convolution(node, index, mask)
        name, arguments = op_name(node), dict(normalize_args(node))
        given = [each for each in node.args if isinstance(each, (fx.Node, int, float))]
        if name == "pow" and given[1] in _POWERS:
            name, given = _POWERS[given[1]], given[:1]
        if name not in _POINTWISE or arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode"):
            raise self._refusal(node)
        if any(isinstance(each, fx.Node) and not isinstance(each.meta["val"], torch.Tensor) for each in given):
            raise self._refusal(node, "computes with a dynamic size")
        return _POINTWISE[name](*(self.value(each, self._broadcast(each, index), mask) for each in given))

    def _load(self, place: str, mask: str) -> str:
        return f"tl.load({place}, mask={mask}, other=0.0).to(tl.float32)"

    def _spread(self, text: str, mask: str) -> str:
        """Return a number as a block if the mask is a block."""
        return text

    def _broadcast(self, operand: Any, index: list[str]) -> list[str]:
        if not isinstance(operand, fx.Node):
            return index
        shape = operand.meta["val"].shape
        own = index[len(index) - len(shape) :]
        return ["0" if str(size) == "1" else each for size, each in zip(shape, own, strict=True)]

    def _view_source(self, node: fx.Node, name: str, index: list[str]) -> tuple[Any, list[str]]:
        """Return the base of a view and the index into it."""
        source: Any = node.args[0]
        given = dict(normalize_args(node))
        moved = list(index)
        if name == "getitem":
            parts = dict(normalize_args(source))
            size = parts.get("split_size")
            if not isinstance(size, int):
                raise self._refusal(source)
            part: Any = node.args[1]
            moved[parts["dim"]] = _affine_index(moved[parts["dim"]], 1, part * size)
            return source.args[0], moved
        if name == "transpose":
            one, two = given["dim0"], given["dim1"]
            moved[one], moved[two] = moved[two], moved[one]
        elif name == "permute":
            for axis, each in zip(given["dims"], index, strict=True):
                moved[axis] = each
        elif name == "unsqueeze":
            del moved[given["dim"]]
        elif name == "squeeze" and isinstance(given.get("dim"), int) and len(source.meta["val"].shape) > len(index):
            moved.insert(given["dim"] % (len(index) + 1), "0")
        elif name == "slice":
            start, step = given["start"] or 0, given["step"]
            if not isinstance(start, int) or start < 0:
                raise self._refusal(node, f"slices from {start}")
            moved[given["dim"]] = _affine_index(moved[given["dim"]], step, start)
        elif name == "expand":
            moved = self._broadcast(source, index)
        else:
            raise self._refusal(node)
        return source, moved

    def _convolution(self, node: fx.Node, index: list[str], mask: str) -> str:
        """Return the sum over the taps of one channel; elements outside the input are zero."""
        given = dict(normalize_args(node))
        weight, taps = given["weight"], given["weight"].meta["val"].shape[-1]
        if node.target is not torch.ops.aten.conv1d.default or len(index) != 3 or not isinstance(taps, int):
            raise self._refusal(node, "convolves other than rows of a batch")
        stride, padding, dilation = (given[each][0] for each in ("stride", "padding", "dilation"))
        length = self._size(given["input"].meta["val"].shape[2])
        terms = []
        for tap in range(taps):
            at = self._assign(self._spread(_affine_index(index[2], stride, tap * dilation - padding), mask))
            there = self._assign(f"{mask} & ({at} >= 0) & ({at} < {length})")
            read = self.value(given["input"], [index[0], index[1], at], there)
            factor = self.value(weight, [index[1], "0", str(tap)], mask)
            terms.append(f"tl.where({there}, {read}, 0.0) * {factor}")
        if given.get("bias") is not None:
            terms.append(self.value(given["bias"], [index[1]], mask))
        return " + ".join(terms)

    def _size(self, size: Any) -> str:
        return str(size) if isinstance(size, int) else self.sizes.setdefault(str(size), f"n{len(self.sizes)}")

    def _size_expression(self, size: Any) -> str:
        """Return a size as an expression of an argument's shape."""
        if isinstance(size, int):
            return str(size)
        for node, name in self.calls.inputs.items():
            for axis, each in enumerate(node.meta["val"].shape):
                if str(each) == str(size):
                    return f"{name}.shape[{axis}]"
        raise unsupported_error(f"{self.calls.region.name} has the size {size}, which none of its inputs has")

    def _dtype(self, node: Any) -> str:
        """Return the dtype of a value: `dtype`, which is that of the inputs, or float32."""
        if node in self.dtypes:
            return self.dtypes[node]
        explicit, actual = dict(normalize_args(node)).get("dtype"), getattr(node.meta["val"], "dtype", None)
        read = [each for each in operands(node) if not isinstance(each.meta.get("val"), torch.SymInt)]
        if explicit is None:
            kinds = {self._dtype(each) for each in read}
            found = "tl.float32" if "tl.float32" in kinds else "dtype"
            if len(kinds) > 1 and any(each.meta["val"].dim() == 0 for each in read):
                raise self._refusal(node, "mixes the dtypes of a scalar and a tensor")
        else:
            found = "dtype" if explicit == self.dtype and explicit != torch.float32 else "tl.float32"
        if actual not in (None, torch.float32 if found == "tl.float32" else self.dtype):
            raise self._refusal(node, f"computes {actual} from {self.dtype}")
        return self.dtypes.setdefault(node, found)

    def _refusal(self, node: fx.Node, problem: str = "") -> UsageError:
        what = f"{problem} ({node.target})" if problem else f"calls {node.target}"
        return unsupported_error(f"{self.calls.region.name} {what}")
