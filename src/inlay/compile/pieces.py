"""What Dynamo hands to a backend → Program, where that can be done soundly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import CaptureError, one_line
from inlay.program.functional import functional_program
from inlay.program.graphs import all_nodes, target_text, written
from inlay.program.symbols import FakeValues
from inlay.program.trace import traced

if TYPE_CHECKING:
    from inlay.program.program import Program


def program_of_piece(module: fx.GraphModule) -> Program:
    """A piece of a model as a program; every parameter is an input.

    It is traced in Dynamo's own shape environment: what tracing or a transform assumes of a size becomes one of
    Dynamo's guards. A CaptureError says why a piece cannot be represented.
    """
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise CaptureError("autocast is on.", "Convert the model instead: model.to(torch.bfloat16).")
    values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
    if any(value is None for value in values):
        raise CaptureError("Dynamo gave no type for an input.")
    fakes = FakeValues.with_values(values)
    try:
        with fakes.computing(), fx.traceback.preserve_node_meta():
            trace = traced(_Constants(module).run, values)
        _drop_modes(trace.graph)
        _refuse_shared_memory(trace.graph)
        return functional_program(trace, fakes, "piece")
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"it cannot be traced to ATen: {type(error).__name__}: {one_line(error)}.") from error


class _Constants(fx.Interpreter):
    """Python floats that Dynamo passes as tensors, such as the epsilon of a norm, are numbers again.

    Reading one of them adds a guard on its value, as for any number that Dynamo takes for constant.
    """

    def run_node(self, n: fx.Node) -> Any:
        held = n.meta.get("example_value")
        if n.target == "item" and isinstance(held, torch.SymFloat) and _is_input(n.args[0]):
            return float(held)
        return super().run_node(n)


def _is_input(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _drop_modes(graph: fx.Graph) -> None:
    """Switching gradients or autocast off changes nothing where both are off."""
    for node in list(graph.nodes):
        name = target_text(node.target)
        if name.endswith("_enter_autocast") and True in node.args[2:3]:
            raise CaptureError("the model switches autocast on.", "Convert it instead: model.to(torch.bfloat16).")
    for node in reversed(list(graph.nodes)):
        name = target_text(node.target)
        if name.endswith(("_set_grad_enabled", "_enter_autocast", "_exit_autocast")):
            graph.erase_node(node)


def _refuse_shared_memory(graph: fx.Graph) -> None:
    """Functional form loses who shares memory with whom: that is only right where nobody can tell."""
    inputs: dict[Any, list[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            inputs.setdefault(_storage(node), []).append(node.name)
    changed = set()
    for node in all_nodes(graph):
        touched = {_storage(each) for each in written(node)} & set(inputs)
        if touched and torch.Tag.inplace_view in node.target.tags:
            raise CaptureError(f"{target_text(node.target)} changes the shape of an input in place.")
        changed |= touched
    for storage in changed:
        if len(inputs[storage]) > 1:
            raise CaptureError(f"{' and '.join(inputs[storage])} share memory that is written to.")
    for value in tree_leaves(next(iter(reversed(graph.nodes))).args[0]):
        if isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor) and _storage(value) in changed:
            raise CaptureError(f"{value.name} is returned and shares memory with an input that is written to.")


def _storage(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
