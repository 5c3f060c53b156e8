"""Conversion of Dynamo's graphs to programs, where this is sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import CaptureError, one_line
from inlay.program.functionalization import functionalize
from inlay.program.graphs import all_nodes, target_text, written_operands
from inlay.program.symbols import FakeValues
from inlay.program.tracer import trace_function

if TYPE_CHECKING:
    from inlay.program.program import Program


@dataclass(frozen=True)
class DynamoGraph:
    """A program, and the outputs of Dynamo's graph that are inputs it wrote to, which a program cannot express."""

    program: Program
    output_aliases: tuple[int | None, ...]
    """For every output of the graph: the position of the input that it is, or None if the program computes it."""


def capture_dynamo_graph(module: fx.GraphModule) -> DynamoGraph:
    """Convert a graph of Dynamo to a program in which every parameter is an input.

    It is traced in Dynamo's shape environment, so assumptions of tracing or of a transform about sizes become Dynamo
    guards. A CaptureError states why a graph cannot be converted.
    """
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise CaptureError("autocast is on.", "Convert the model instead: model.to(torch.bfloat16).")
    values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
    if any(value is None for value in values):
        raise CaptureError("Dynamo gave no type for an input.")
    fakes = FakeValues.from_values(values)
    gradients = torch.is_grad_enabled()
    try:
        # Tracing a call that switches gradients also executes it.
        with torch.set_grad_enabled(gradients), fakes.activate(), fx.traceback.preserve_node_meta():
            trace = trace_function(_EagerInterpreter(module).run, values)
        _drop_modes(trace.graph, gradients)
        changed = _find_mutated_inputs(trace.graph)
        _refuse_shared_outputs(trace.graph)
        same = _remove_aliased_outputs(trace.graph, changed)
        return DynamoGraph(functionalize(trace, fakes, "piece"), same)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"it cannot be traced to ATen: {type(error).__name__}: {one_line(error)}.") from error


class _EagerInterpreter(fx.Interpreter):
    """An interpreter that runs a Dynamo graph as eager mode does.

    Python floats that Dynamo passes as tensors, such as the epsilon of a norm, become numbers again. Reading one adds a
    guard on its value, as for any number that Dynamo treats as constant. Disabled dropout returns its operand, while
    torch's decomposition copies it.
    """

    def run_node(self, n: fx.Node) -> Any:
        held = n.meta.get("example_value")
        if n.target == "item" and isinstance(held, torch.SymFloat) and _is_input(n.args[0]):
            return float(held)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (torch.nn.functional.dropout, torch.dropout):
            given = {"p": 0.5, "training": True} | dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            if given["p"] == 0 or not given.get("train", given["training"]):
                return given["input"]
        return super().call_function(target, args, kwargs)


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _drop_modes(graph: fx.Graph, gradients: bool) -> None:
    """Erase calls that switch gradients or autocast without effect. Those that switch one on are refused."""
    for node in list(graph.nodes):
        name = target_text(node.target)
        if name.endswith("_enter_autocast") and True in node.args[2:3]:
            raise CaptureError("the model switches autocast on.", "Convert it instead: model.to(torch.bfloat16).")
        if name.endswith("_set_grad_enabled") and node.args == (True,) and not gradients:
            raise CaptureError("the model switches gradients on, but transforms are for inference.")
    for node in reversed(list(graph.nodes)):
        name = target_text(node.target)
        if name.endswith(("_set_grad_enabled", "_enter_autocast", "_exit_autocast")):
            graph.erase_node(node)


def _find_mutated_inputs(graph: fx.Graph) -> dict[Any, int]:
    """Return the storage of each input that is written to, and its position. Functional form loses which values share
    memory, so graphs where this could be observed are refused."""
    inputs: dict[Any, list[int]] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        if isinstance(node.meta["val"], torch.Tensor):
            inputs.setdefault(_storage(node), []).append(position)
    changed: dict[Any, int] = {}
    for node in all_nodes(graph):
        for storage in {_storage(each) for each in written_operands(node)} & set(inputs):
            if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
                raise CaptureError(f"{target_text(node.target)} changes the shape of an input in place.")
            if len(inputs[storage]) > 1:
                names = " and ".join(placeholders[position].name for position in inputs[storage])
                raise CaptureError(f"{names} share memory that is written to.")
            changed[storage] = inputs[storage][0]
    return changed


def _refuse_shared_outputs(graph: fx.Graph) -> None:
    """Refuse outputs that share memory that was written to, because functional form may separate them."""
    changed = {_storage(each) for node in all_nodes(graph) for each in written_operands(node)}
    values = [each for each in tree_leaves(next(iter(reversed(graph.nodes))).args[0]) if isinstance(each, fx.Node)]
    held: dict[Any, fx.Node] = {}
    for value in dict.fromkeys(values):
        storage = _storage(value)
        if storage in held and storage in changed:
            raise CaptureError(f"{held[storage].name} and {value.name} are returned and share memory written to.")
        if storage is not None:
            held[storage] = value


def _remove_aliased_outputs(graph: fx.Graph, changed: dict[Any, int]) -> tuple[int | None, ...]:
    """Remove outputs that are whole inputs which were written to. The caller of the program returns them instead."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(iter(reversed(graph.nodes)))
    values, same = tree_leaves(output.args[0]), list[int | None]()
    for value in values:
        is_tensor = isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)
        position = changed.get(_storage(value)) if is_tensor else None
        if position is not None and _mutation_source(value) is not placeholders[position]:
            raise CaptureError(f"{value.name} is returned and is a view of an input that is written to.")
        same.append(position)
    output.args = (tuple(value for value, position in zip(values, same, strict=True) if position is None),)
    return tuple(same)


def _storage(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _mutation_source(node: fx.Node) -> fx.Node:
    """Return the first operand of a chain of calls that write to an operand and return it."""
    while operands := written_operands(node):
        node = operands[0]
    return node
