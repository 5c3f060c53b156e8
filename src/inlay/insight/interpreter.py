"""Run a program call by call; every intermediate value can be observed, in its own precision or in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from inlay.errors import ProgramError
from inlay.program.bindings import Role
from inlay.program.graphs import subgraphs, target_text, written_operands
from inlay.program.type_checks import RunTypeChecker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.program.program import Program

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class ProgramInterpreter:
    """Runs programs that share weights; each weight is read once."""

    weight_cache: dict[tuple[str, str, torch.dtype | None], torch.Tensor] = field(default_factory=dict)
    """By name and origin, because a transform may replace a weight and keep its name."""

    def __call__(
        self,
        program: Program,
        inputs: Mapping[str, Any],
        *,
        compute_dtype: torch.dtype | None = None,
        on_value: Callable[[fx.Node, Any], None] = lambda node, value: None,
    ) -> list[Any]:
        """Return the results of a program for inputs by name. `compute_dtype` replaces every floating-point dtype.

        `on_value` is called with every input and every intermediate value, including those of nested graphs.
        """
        weights = {row.name for row in program.bindings.ins if row.role is not Role.INPUT}
        names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
        given = [self._weight(program, name, compute_dtype) if name in weights else inputs[name] for name in names]
        with torch.no_grad():
            return list(_GraphInterpreter(program.graph, compute_dtype, on_value)(*given))

    def _weight(self, program: Program, name: str, precise: torch.dtype | None) -> torch.Tensor:
        ref = program.tensors[name]
        key = name, ref.origin, precise
        if key not in self.weight_cache:
            self.weight_cache[key] = _cast(ref.read(), precise)
        return self.weight_cache[key]


class _GraphInterpreter(torch.nn.Module):
    """Runs a graph and its nested graphs call by call."""

    def __init__(self, graph: fx.Graph, precise: torch.dtype | None, on_value: Callable[[fx.Node, Any], None]) -> None:
        super().__init__()
        self.graph, self.compute_dtype, self.on_value = graph, precise, on_value
        self.nested = {name: _GraphInterpreter(inner.graph, precise, on_value) for name, inner in subgraphs(graph)}

    def forward(self, *inputs: Any) -> Any:
        given = iter(inputs)
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                values[node] = self.nested[node.target]
                continue
            if node.op == "placeholder":
                values[node] = _cast(next(given), self.compute_dtype)
            else:
                values[node] = _call(node, values, self.compute_dtype)
            self.on_value(node, values[node])
            for operand in node.all_input_nodes:
                if _is_last_use(operand, node):
                    del values[operand]
        raise ProgramError("The graph returns nothing.")


def _is_last_use(operand: fx.Node, at: fx.Node) -> bool:
    return all(user <= at for user in operand.users)


def _call(node: fx.Node, values: dict[fx.Node, Any], precise: torch.dtype | None) -> Any:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if precise is not None:
        args, kwargs = tree_map(lambda each: precise if _is_float_type(each) else each, (args, kwargs))
    target: Any = node.target
    versions = _versions(node, values)
    try:
        result = target(*args, **kwargs)
        _check_undeclared_writes(node, versions, _versions(node, values))
        return result
    except RuntimeError:
        if precise is not torch.float64:
            raise
    # Some operators, such as grouped matrix products of experts, do not support float64: compute them in float32.
    narrow = tree_map(lambda each: _cast(torch.float32 if each is precise else each, torch.float32), (args, kwargs))
    return tree_map(lambda each: _cast(each, precise), target(*narrow[0], **narrow[1]))


def _versions(node: fx.Node, values: Mapping[fx.Node, Any]) -> dict[fx.Node, int]:
    """Return the version counter of each operand, where torch keeps one."""
    held = {operand: values[operand] for operand in node.all_input_nodes}
    return {
        operand: value._version
        for operand, value in held.items()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def _check_undeclared_writes(node: fx.Node, before: Mapping[fx.Node, int], after: Mapping[fx.Node, int]) -> None:
    """Raise if a kernel writes to an operand that its schema does not declare as mutated.

    If one operand is declared as mutated, the others may be views of it and are not checked.
    """
    unsaid = [] if written_operands(node) else [operand for operand in before if after[operand] != before[operand]]
    if unsaid and isinstance(node.target, torch._ops.OpOverload):
        name = target_text(node.target)
        raise ProgramError(f"{node} writes to its operand {unsaid[0]}, but the schema of {name} does not declare it.")


def _is_float_type(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _FLOATS


def _cast(value: Any, precise: torch.dtype | None) -> Any:
    if precise is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.to(precise)


def find_type_mismatches(program: Program, inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return nodes whose value has another dtype, shape or strides than declared, and a text with both.

    This compares fake kernels with real kernels.
    """
    seen = RunTypeChecker(program.types)
    try:
        ProgramInterpreter()(program, inputs, on_value=seen.check)
    except Exception:
        if not seen.mismatches:  # otherwise a mismatch explains the failure
            raise
    return seen.mismatches


def random_inputs(
    program: Program, seed: int = 0, sizes: Mapping[str, int] | None = None, scale: float = 1.0
) -> dict[str, Any]:
    """Return random inputs of the captured sizes, or of other sizes by symbol name, in the captured memory layout.

    Integers are below the vocabulary size and the rows of the embeddings they index. Floats are normal times `scale`.
    """
    generator = torch.Generator().manual_seed(seed)
    known = {symbol.name: symbol.example for symbol in program.symbols.values()} | dict(sizes or {})
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    made: dict[str, Any] = {}
    for row in program.bindings.with_role(Role.INPUT):
        if not row.is_tensor:
            made[row.name] = row.value
            continue
        shape = [size if isinstance(size, int) else known[size] for size in row.shape]
        dtype: torch.dtype = getattr(torch, row.dtype)
        if dtype.is_floating_point:
            value = (torch.randn(shape, generator=generator) * scale).to(dtype)
        else:
            value = torch.randint(0, _limit(program, nodes[row.name]), shape, generator=generator).to(dtype)
        made[row.name] = match_layout(value, nodes[row.name].meta["val"])
    return made


def other_sizes(program: Program) -> list[dict[str, int]]:
    """Return other sizes within the declared ranges of a program: the smallest, and larger than captured."""
    ranges = {symbol.name: (symbol.low, symbol.high, symbol.example) for symbol in program.symbols.values()}
    named = {size for row in program.bindings.with_role(Role.INPUT) if row.is_tensor for size in row.shape}
    if not ranges or not {size for size in named if isinstance(size, str)} <= set(ranges):
        return []
    larger = {name: 2 * example + 3 for name, (_, _, example) in ranges.items()}
    most = {name: high if high is not None else larger[name] for name, (_, high, _) in ranges.items()}
    return [
        {name: max(low, 1) for name, (low, _, _) in ranges.items()},
        {name: min(most[name], larger[name]) for name in ranges},
    ]


def match_layout(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the same values with the axis order in memory of `like`."""
    if value.dim() != like.dim():
        return value
    steps = [int(step) if isinstance(step, int) else step.node.hint for step in like.stride()]
    if None in steps or 0 in steps:
        return value
    order = sorted(range(value.dim()), key=lambda axis: -steps[axis])
    back = [order.index(axis) for axis in range(value.dim())]
    return value.permute(order).contiguous().permute(back)


def _limit(program: Program, node: fx.Node) -> int:
    """Return the exclusive upper bound of integers: rows of the embeddings that they index, or the vocabulary size."""
    tables = [user.args[0] for user in node.users if user.target is torch.ops.aten.embedding.default]
    rows = [each.meta["val"].shape[0] for each in tables if isinstance(each, fx.Node)]
    known = [each for each in rows if isinstance(each, int)]
    if program.facts.vocabulary:
        known.append(program.facts.vocabulary.value)
    return max(1, min(known, default=2))
