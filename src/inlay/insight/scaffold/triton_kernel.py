"""Generate a Triton kernel from a region: each output element is computed from its index, back to the inputs.

Views become index arithmetic; a depthwise convolution becomes a sum over its taps. Nothing is timed.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.errors import UsageError
from inlay.insight.candidates.op_kinds import OpKind, op_kind, op_name
from inlay.program.call_arguments import normalize_args

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
    "tanh": lambda a: f"2.0 * tl.sigmoid(2.0 * {a}) - 1.0",
    "relu": lambda a: f"tl.maximum({a}, 0.0)",
    "to_copy": lambda a: f"{a}",
}
_IDENTITY_OPS = {"clone", "contiguous", "alias"}


def generate_kernel(candidate: Candidate, calls: RegionSource) -> dict[str, str]:
    """Return the template fields for a kernel of this candidate."""
    if len(candidate.regions[0].outputs) != 1:
        raise _unsupported_error(f"{candidate.name} has several results")
    writer = _KernelWriter(calls)
    return {
        "triton_source": writer.module(candidate.name),
        "numerics": "ROUNDING",
        "more": ", register_kernel",
        "device": (
            f'\n@register_kernel("{candidate.name}", "CUDA")\n'
            f"def _({', '.join(f'{name}: Tensor' for name in calls.inputs.values())}) -> Tensor:\n"
            f'    """On a GPU, the Triton kernel. Not timed."""\n'
            f"    from {candidate.name}_triton import launch\n\n"
            f"    return launch({', '.join(calls.inputs.values())})\n\n"
        ),
    }


def _unsupported_error(problem: str) -> UsageError:
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


class _KernelWriter:
    def __init__(self, calls: RegionSource) -> None:
        self.calls, self.output = calls, calls.region.outputs[0]
        self.lines: list[str] = []
        self.sizes: dict[str, str] = {}
        """Dynamic size → kernel argument."""
        self.value_names: dict[Any, str] = {}

    def module(self, name: str) -> str:
        """Return the source of the module: kernel, launcher and signature."""
        shape = list(self.output.meta["val"].shape)
        index = [f"i{axis}" for axis in range(len(shape))]
        for axis in reversed(range(len(shape))):
            self.lines.append(f"i{axis} = rest % {self._size(shape[axis])}" if axis else "i0 = rest")
            if axis:
                self.lines.append(f"rest = rest // {self._size(shape[axis])}")
        result = self.value(self.output, index, "inside")
        strides = [
            f"{held}_s{axis}" for node, held in self.calls.inputs.items() for axis in range(node.meta["val"].dim())
        ]
        pointers = [f"{held}_ptr" for held in self.calls.inputs.values()]
        numbers = ["numel", *self.sizes.values(), *strides]
        names = ", ".join(self.calls.inputs.values())
        first = next(iter(self.calls.inputs.values()))
        given = ", ".join(
            [
                "out.numel()",
                *map(self._size_expression, self.sizes),
                *(f"*{each}.stride()" for each in names.split(", ")),
            ]
        )
        body = "\n".join(f"    {line}" for line in self.lines)
        result_shape = "".join(f"{self._size_expression(size)}, " for size in shape)
        return f'''"""{name} as one Triton kernel. Interpreted, and compiled for sm_80 and sm_90; not timed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 256
CONSTANTS = {{"BLOCK": BLOCK}}
NUMBERS = {numbers!r}


@triton.jit
def kernel({", ".join([*pointers, "out_ptr", *numbers])}, BLOCK: tl.constexpr):  # noqa: D103
    rest = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = rest
    inside = rest < numel
{body}
    tl.store(out_ptr + place, {result}, mask=inside)


def launch({", ".join(f"{each}: torch.Tensor" for each in names.split(", "))}) -> torch.Tensor:
    """Run the kernel and return its result."""
    out = torch.empty(({result_shape}), dtype={first}.dtype, device={first}.device)
    kernel[(triton.cdiv(out.numel(), BLOCK),)]({names}, out, {given}, BLOCK=BLOCK)
    return out


def signature(pointer: str) -> dict[str, Any]:
    """Types of the arguments, for compilation without a launch."""
    pointers = dict.fromkeys({[*pointers, "out_ptr"]!r}, pointer)
    return pointers | dict.fromkeys(NUMBERS, "i32") | {{"BLOCK": "constexpr"}}
'''

    def value(self, node: Any, index: list[str], mask: str) -> str:
        """Return the name of a value at an index."""
        if not isinstance(node, fx.Node):
            return repr(node)
        if node not in self.calls.inputs:
            name = "getitem" if node.target is operator.getitem else op_name(node)
            if name in _IDENTITY_OPS:
                return self.value(node.args[0], index, mask)
            if op_kind(node) is OpKind.VIEW:
                source, moved = self._view_source(node, name, index)
                return self.value(source, moved, mask)
        key = (node, tuple(index), mask)
        if key not in self.value_names:
            self.value_names[key] = self._assign(self._compute(node, index, mask))
        return self.value_names[key]

    def _assign(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _compute(self, node: fx.Node, index: list[str], mask: str) -> str:
        if node in self.calls.inputs:
            held = self.calls.inputs[node]
            terms = [f"{each} * {held}_s{axis}" for axis, each in enumerate(index) if each != "0"]
            return f"tl.load({' + '.join([f'{held}_ptr', *terms])}, mask={mask}, other=0.0).to(tl.float32)"
        if op_kind(node) is OpKind.STENCIL:
            return self._convolution(node, index, mask)
        name, arguments = op_name(node), dict(normalize_args(node))
        if name not in _POINTWISE or arguments.get("alpha", 1) != 1 or arguments.get("rounding_mode"):
            raise _unsupported_error(f"{self.calls.region.name} calls {node.target}")
        operands = [each for each in node.args if isinstance(each, (fx.Node, int, float))]
        return _POINTWISE[name](*(self.value(each, self._broadcast(each, index), mask) for each in operands))

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
                raise _unsupported_error(f"{self.calls.region.name} calls {source.target}")
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
        elif name == "squeeze":
            rank = source.meta["val"].dim()
            moved.insert(given["dim"] % rank, "0")
        elif name == "slice":
            start, step = given["start"] or 0, given["step"]
            if not isinstance(start, int) or start < 0:
                raise _unsupported_error(f"{self.calls.region.name} slices from {start}")
            moved[given["dim"]] = _affine_index(moved[given["dim"]], step, start)
        elif name == "expand":
            moved = self._broadcast(source, index)
        else:
            raise _unsupported_error(f"{self.calls.region.name} calls {node.target}")
        return source, moved

    def _convolution(self, node: fx.Node, index: list[str], mask: str) -> str:
        """Return the sum over the taps of one channel; elements outside the input are zero."""
        given = dict(normalize_args(node))
        weight = given["weight"]
        taps = weight.meta["val"].shape[2:]
        if len(taps) != 1 or not isinstance(taps[0], int):
            raise _unsupported_error(f"{self.calls.region.name} convolves over {len(taps)} axes")
        stride, padding, dilation = (given[each][0] for each in ("stride", "padding", "dilation"))
        length = self._size(given["input"].meta["val"].shape[2])
        terms = []
        for tap in range(taps[0]):
            at = self._assign(_affine_index(index[2], stride, tap * dilation - padding))
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
        raise _unsupported_error(f"{self.calls.region.name} has the size {size}, which none of its inputs has")
