"""Capture: export a model with torch.export, make it functional, and derive its facts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim, ExportedProgram

from inlay.errors import CaptureError, UsageError, one_line, suggest
from inlay.frontend.call_deduplication import make_functional
from inlay.frontend.guards import collect_guards, narrow_ranges
from inlay.frontend.model_spec import open_model
from inlay.frontend.source_model import Example, SourceModel
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE
from inlay.program.exported_program import from_exported, source_line
from inlay.program.facts import Facts, reconcile
from inlay.program.fold import fold
from inlay.program.graphs import all_nodes
from inlay.program.size_specialization import size_oblivious
from inlay.program.tracing_lock import tracing_lock
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inlay.frontend.guards import ShapeGuard
    from inlay.frontend.huggingface.checkpoint import HFOptions
    from inlay.program.program import Program
    from inlay.program.weights import TensorRef


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def find_facts(program: Program, model: SourceModel) -> Program:
    """Return the program with its facts, counted in the graph where possible and else read from the configuration."""
    graph: dict[str, int] = {}
    folds = fold(program)
    if folds.kinds:
        graph["layers"] = folds.layer_count
    attention = next((node for node in all_nodes(program.graph) if node.target is _ATTENTION), None)
    if attention is not None:
        query: Any = attention.args[0]
        shape = query.meta["val"].shape
        if len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int):
            graph["heads"], graph["head_size"] = shape[1], shape[3]
    outs = program.bindings.outs
    if (
        model.config_facts
        and len(outs) == 1
        and outs[0].name == SIGNATURE.logits
        and isinstance(outs[0].shape[-1], int)
    ):
        graph["vocabulary"] = outs[0].shape[-1]
    config = model.config_facts
    names = sorted({*config, *graph})
    numbers: Any = {name: reconcile(config.get(name), graph.get(name)) for name in names}
    return replace(program, facts=Facts(model.architecture, **numbers, left_out=_unused_modules(program, model)))


def _unused_modules(program: Program, model: SourceModel) -> tuple[str, ...]:
    """Return the largest modules with parameters, all of which the program leaves out."""
    if not program.bindings.with_role(Role.PARAMETER):
        return ()
    used = {row.target for row in program.bindings}
    parameters = model.example.module.named_parameters(remove_duplicate=False)
    reached = {id(value) for name, value in parameters if name in used}
    found: list[str] = []
    for path, module in model.example.module.named_modules():
        held = {id(each) for each in module.parameters()}
        if path and held and reached.isdisjoint(held) and not path.startswith(tuple(f"{each}." for each in found)):
            found.append(path)
    return tuple(found)


def capture(
    model: str | SourceModel | Example | ExportedProgram,
    options: HFOptions | None = None,
    *,
    on_step: Callable[[str], None] = lambda step: None,
) -> Program:
    """Capture MODEL as a Program: functional ATen, dynamic along the named axes, without loading weights.

    An ExportedProgram, or a `.pt2` file that `torch.export.save` wrote, is converted.

    >>> class Double(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * 2
    >>> program = capture(Example(Double(), (torch.ones(3, 4),), axes={"x": {0: "batch"}}))
    >>> program.op_counts()
    Counter({'aten.mul.Tensor': 1})
    >>> program.bindings["x"].type_text
    'f32[batch, 4]'

    `on_step` is called with the name of each step, for progress bars.
    """
    on_step("opening the model")
    if isinstance(model, str):
        model = open_model(model, options)
    if isinstance(model, ExportedProgram):
        model = SourceModel.from_exported(model)
    if isinstance(model, Example):
        model = SourceModel(type(model.module).__name__, "module", model, {})
    if not isinstance(model, SourceModel):
        remedy = "Use Example(module, args), or Program.from_graph for a graph."  # type: ignore[unreachable]
        raise UsageError(f"{type(model).__name__} cannot be captured.", remedy)
    exported, assumed = _export(model, on_step)
    on_step("reading the program")
    tensors = {**_held_tensors(exported), **model.tensors}
    program = from_exported(exported, name=model.name, tensors=tensors, symbols=_symbol_names(exported, model.example))
    program = narrow_ranges(program, assumed, model)

    return find_facts(program, model)


def _held_tensors(exported: ExportedProgram) -> dict[str, TensorRef]:
    """Return the weights of an exported program. State is copied, because the module may change it after capture."""
    written = set(exported.graph_signature.buffers_to_mutate.values())
    held = {name: value.clone() if name in written else value for name, value in exported.state_dict.items()}
    held |= {name: value for name, value in exported.constants.items() if isinstance(value, torch.Tensor)}
    return {name: InMemoryTensor(value) for name, value in held.items()}


def _export(
    model: SourceModel, on_step: Callable[[str], None]
) -> tuple[torch.export.ExportedProgram, list[ShapeGuard]]:
    """Return the functional program, and the shape guards of tracing."""
    try:
        with tracing_lock(), size_oblivious():
            exported = model.exported
            if exported is None:
                on_step("exporting")
                exported = _export_example(model.example, model.max_sizes)
            on_step("making it functional")
            functional = make_functional(exported)
            return functional, [*collect_guards(exported.graph), *collect_guards(functional.graph)]
    except UsageError:
        raise
    except Exception as error:
        where = _error_location(error)
        raise CaptureError(
            f"{model.name} cannot be captured: {type(error).__name__}: {one_line(error)}{where}.",
            "Make the model traceable by torch.export; `--debug` shows its full error report.",
        ) from error


def _export_example(example: Example, max_sizes: Mapping[str, int]) -> ExportedProgram:
    with suppress(NotImplementedError):  # the module of an ExportedProgram has one mode only
        example.module.eval()
    shapes = _dynamic_shapes(example, max_sizes)
    return torch.export.export(example.module, example.args, dict(example.kwargs), dynamic_shapes=shapes, strict=False)


def _error_location(error: BaseException) -> str:
    import traceback

    lines = [f'File "{frame.filename}", line {frame.lineno}' for frame in traceback.extract_tb(error.__traceback__)]
    own = [line for line in lines if "/inlay/" not in line]
    source = source_line("\n".join(own))
    return f" (at {source})" if source else ""


def _dynamic_shapes(example: Example, limits: Mapping[str, int]) -> dict[str, Any] | None:
    import inspect

    if not example.axes:
        return None
    names = list(inspect.signature(example.module.forward).parameters)
    given = dict(zip(names, example.args, strict=False)) | dict(example.kwargs)
    for name in example.axes:
        if name not in given:
            raise UsageError(f"`axes` names {name}, which is not an input of the model.", suggest(name, given))
        rank = given[name].dim() if isinstance(given[name], torch.Tensor) else 0
        for axis in example.axes[name]:
            if not 0 <= axis < rank:
                raise UsageError(f"`axes` names axis {axis} of {name}, which has {rank} axes.")

    def dims(name: str) -> Any:
        axes = example.axes.get(name, {})
        return {
            axis: Dim.DYNAMIC(min=1, max=limits[label]) if label in limits else Dim.DYNAMIC(min=1)
            for axis, label in axes.items()
        } or None

    return {name: dims(name) for name in given}


def _symbol_names(exported: torch.export.ExportedProgram, example: Example) -> dict[str, str]:
    """Map the symbols of the captured shapes to axis names."""
    values: dict[str, Any] = {
        node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"
    }
    names: dict[str, str] = {}
    for name, axes in example.axes.items():
        value = values.get(name)
        for axis, label in axes.items():
            size: Any = value.shape[axis] if isinstance(value, torch.Tensor) else None
            if isinstance(size, torch.SymInt) and label not in names.values():
                names.setdefault(str(size.node.expr), label)
    return names
