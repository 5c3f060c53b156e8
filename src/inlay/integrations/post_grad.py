"""Adapter: Inductor's hook for graph passes after autograd and functionalization.

Inductor functionalizes again after export, which would undo earlier decisions. `fix_functionalization` therefore runs
as `post_grad_custom_post_pass`. It runs after the pattern matcher, which removes clones and so decides which values
share storage. It runs before `reinplace_inplaceable_ops` and `decompose_auto_functionalized`, which would decide about
the wrappers. They find none, because remaining wrappers are expanded to a copy and a call. Inductor's decision ignores
the other arguments of a call (pytorch#198031) and lets an output become the input that it was a copy of.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx, config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes, get_hash_for_files

from inlay.analysis import aliasing, auto_functionalized, liveness
from inlay.analysis.liveness import CopyReason
from inlay.errors import CaptureError, one_line
from inlay.lowering.state import defunctionalization
from inlay.lowering.state.defunctionalization import (
    FixReport,
    expand_auto_functionalized,
    fix_functionalization,
    report_all_copied,
)
from inlay.program import graphs
from inlay.program.bindings import Bindings
from inlay.program.graph_import import import_graph
from inlay.program.graphs import MODULE, SOURCE, all_nodes, copy_graph
from inlay.program.program import CallSpec
from inlay.program.tracing_lock import tracing_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program

_SOURCES = tuple(
    str(Path(str(each.__file__))) for each in (aliasing, defunctionalization, liveness, auto_functionalized, graphs)
)


class FixFunctionalization(CustomGraphPass):
    """`fix_functionalization` as a pass of Inductor, for any model.

    Pass it to one compilation as `post_grad_custom_post_pass`, in the `options` of `torch.compile` or in the
    `inductor_configs` of `torch._inductor.aoti_compile_and_package`; `in_place_writes` sets it within a context.
    """

    def __init__(self) -> None:
        self.reports: list[FixReport] = []
        """One entry per compiled graph; a graph from Inductor's cache is not compiled and has none."""

    def __call__(self, graph: fx.Graph) -> None:
        """Decide about every wrapper, and expand the remaining ones."""
        if _has_collective_reordering():
            self.reports.append(report_all_copied(graph, CopyReason.REORDERED_CALLS))
            return
        fixed = fix_functionalization(graph)
        expand_auto_functionalized(graph)
        for node in graph.nodes:
            # Inductor numbers the regions between writes only once, and the new writes add regions.
            node.meta.pop("mutation_region_id", None)
        self.reports.append(fixed)

    def __deepcopy__(self, memo: object) -> FixFunctionalization:
        """Return itself. Inductor copies its configuration, but the reports must go to the original object."""
        return self

    def uuid(self) -> bytes:
        """Return a hash of the pass's source, which is part of the key of Inductor's cache."""
        return get_hash_for_files((__file__, *_SOURCES))


def _has_collective_reordering() -> bool:
    """Return whether passes that bucket or reorder collectives follow. They assume a graph without writes."""
    buckets = (config.bucket_all_gathers_fx, config.bucket_all_reduces_fx, config.bucket_reduce_scatters_fx)
    overlap = config.aten_distributed_optimizations.enable_overlap_scheduling
    return bool(overlap) or any(each != "none" for each in buckets)


@contextmanager
def in_place_writes() -> Iterator[list[FixReport]]:
    """Apply `fix_functionalization` to all graphs that Inductor compiles in this context; yields the reports.

    `torch.compile` compiles when the function is first called, so the first call must be in the context.
    """
    added = FixFunctionalization()
    passes = (*get_custom_graph_passes(config.post_grad_custom_post_pass), added)
    with config.patch(post_grad_custom_post_pass=passes):
        yield added.reports


class _Stop(Exception):  # noqa: N818 - a result, not an error
    """Raised after the last post-grad pass: nothing is generated."""


@contextmanager
def record_post_grad_graphs(made: list[fx.Graph], *, stop: bool = False) -> Iterator[None]:
    """Add the graphs that Inductor lowers to a list, after the last post-grad pass; `stop` ends the compilation."""
    passes = compile_fx._recursive_post_grad_passes
    depth = 0

    def noted(module: fx.GraphModule, is_inference: bool = False) -> None:
        nonlocal depth
        depth += 1
        try:
            passes(module, is_inference)
        finally:
            depth -= 1
        if depth == 0:  # subgraphs of control flow are part of the graph that calls them
            made.append(copy_graph(module.graph))
            if stop:
                raise _Stop

    with mock.patch.object(compile_fx, "_recursive_post_grad_passes", noted):
        yield


def post_grad_program(program: Program) -> Program:
    """Return the post-grad graph that Inductor makes of a program: functional ATen, decomposed, before code generation.

    Weights are inputs, and only their types are used. Passes in `torch._inductor.config` run.
    """
    made: list[fx.Graph] = []
    graph = copy_graph(program.graph)
    for node in all_nodes(graph):
        node.meta = _inductor_meta(node)
    module = fx.GraphModule(graph.owning_module or torch.nn.Module(), graph)
    values = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    try:
        with (
            tracing_lock(),
            record_post_grad_graphs(made, stop=True),
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch.no_grad(),
        ):
            compile_fx.compile_fx(module, values)
    except Exception as error:
        if not made:
            problem = f"{program.name} does not reach Inductor's post-grad passes: {one_line(error)}."
            raise CaptureError(problem, "`--debug` shows the full error; use --at captured.") from error
    return _with_inputs(import_graph(made[0], program.name, program.symbols), program)


def _with_inputs(made: Program, program: Program) -> Program:
    """Return a program with the names, roles and weights of the inputs of another one, which are in the same order."""
    placeholders = [node for node in made.graph.nodes if node.op == "placeholder"]
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    if len(names) != len(placeholders):
        return replace(made, facts=program.facts)
    for node, name in zip(placeholders, names, strict=True):
        node.name = node.target = name
    rows = Bindings((*program.bindings.ins, *made.bindings.outs))
    spec = CallSpec(made.call_spec.in_spec, made.call_spec.out_spec, tuple(names))
    return replace(made, bindings=rows, tensors=program.tensors, call_spec=spec, facts=program.facts)


def _inductor_meta(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node with its source in the form that torch propagates."""
    meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    if source := node.meta.get(SOURCE):
        file, _, line = str(source).rpartition(":")
        meta["stack_trace"] = f'File "{file}", line {line}, in forward'
    if module := node.meta.get(MODULE):
        meta["nn_module_stack"] = {str(module): (str(module), torch.nn.Module)}
    return meta
