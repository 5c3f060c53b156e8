"""Functionalization of an exported program that traces each distinct call only once.

`ExportedProgram.run_decompositions({})` traces the whole program again, in time proportional to its layers. In a
program without mutations, the decomposition of a call depends only on the operator, its constants and the types of its
operands. Layers repeat the same calls. So torch decomposes one graph with one call of each kind, and the result is
inlined at every such call. Programs that do not qualify fall back to `run_decompositions` on the whole program.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, OutputSpec

from inlay.frontend.call_kinds import (
    PROVENANCE_KEYS,
    SYM_ARITHMETIC,
    SYM_SIZE,
    WRAP_GRAD_MODE,
    CallKinds,
    Decomposition,
    NotDeduplicable,
    has_multiple_results,
    is_symint,
    result_values,
    symbolic_axes,
)
from inlay.program.decomposition import decompose
from inlay.program.exported_program import argument_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_SUPPORTED_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)


def make_functional(
    exported: ExportedProgram, *, on_fallback: Callable[[str], None] = lambda reason: None
) -> ExportedProgram:
    """Return the result of `exported.run_decompositions({})`, up to node names; repeated layers add little time.

    `on_fallback` is called with the reason when torch has to decompose the whole program.
    """
    try:
        return _functionalize_by_kind(exported)
    except NotDeduplicable as reason:
        on_fallback(str(reason))
        return decompose(exported)


def _functionalize_by_kind(exported: ExportedProgram) -> ExportedProgram:
    _refuse_signature(exported.graph_signature)
    calls = CallKinds(exported)
    became, ranges = calls.decompose()
    graph = _GraphBuilder(exported, calls, became).graph
    graph.eliminate_dead_code()
    old = exported.range_constraints
    return ExportedProgram(
        root=exported.graph_module,
        graph=graph,
        graph_signature=_build_signature(exported.graph_signature, graph),
        state_dict=exported.state_dict,
        range_constraints={symbol: old.get(symbol, bounds) for symbol, bounds in ranges.items()},
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants=exported.constants,
    )


class _GraphBuilder:
    """Builds the functional graph."""

    def __init__(self, exported: ExportedProgram, calls: CallKinds, became: dict[Hashable, Decomposition]) -> None:
        self.calls, self.decompositions = calls, became
        self.graph = fx.Graph()
        self.new_nodes: dict[fx.Node, Any] = {}
        """Node of the exported program → its node in the new graph, or a list with one node for each result."""
        self.size_nodes: dict[Any, fx.Node] = {}
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                made = self.new_nodes[node] = self.graph.node_copy(node)
                made.name = node.name  # fx renames nodes whose names shadow a builtin
        self._add_symbols()
        self.graph.output(self._add_calls(exported.graph_module))

    def _add_symbols(self) -> None:
        for node in [each for each in self.graph.nodes if each.op == "placeholder"]:
            value = node.meta.get("val")
            for axis, size in symbolic_axes(value) if isinstance(value, torch.Tensor) else ():
                if size.node.expr not in self.size_nodes:
                    made = self.graph.call_function(SYM_SIZE, (node, axis))
                    made.meta = {**self.calls.size_provenance, "val": size}
                    self.size_nodes[size.node.expr] = made

    def _add_calls(self, module: fx.GraphModule, kept: tuple[str, ...] = PROVENANCE_KEYS) -> Any:
        """Add the calls of a graph whose placeholders were added before; return its mapped output."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], self._single_node)
            if node in self.calls.by_node:
                self._splice(node, kept)
            elif node.target is operator.getitem:
                self.new_nodes[node] = self.new_nodes[node.args[0]][node.args[1]]
            elif node.target is WRAP_GRAD_MODE:
                self._inline(node, module)
        raise NotDeduplicable("a graph has no output node")

    def _inline(self, node: fx.Node, module: fx.GraphModule) -> None:
        _, nested, *operands = node.args
        assert isinstance(nested, fx.Node)
        inner = getattr(module, str(nested.target))
        placeholders = [each for each in inner.graph.nodes if each.op == "placeholder"]
        for placeholder, operand in zip(placeholders, operands, strict=True):
            if isinstance(operand, fx.Node) and not is_symint(operand):
                self.new_nodes[placeholder] = self._single_node(operand)
        # torch records no source line for calls in these graphs.
        self.new_nodes[node] = self._add_calls(inner, ("nn_module_stack",))

    def _single_node(self, node: fx.Node) -> fx.Node:
        made = self.new_nodes.get(node)
        if not isinstance(made, fx.Node):
            raise NotDeduplicable(f"{node.name} is not a single tensor")
        return made

    def _splice(self, node: fx.Node, kept: tuple[str, ...]) -> None:
        call = self.calls.by_node[node]
        became = self.decompositions[call.key]
        here = {
            inner: self._single_node(operand) for inner, operand in zip(became.operands, call.operands, strict=True)
        }
        told = {key: node.meta[key] for key in kept if key in node.meta}
        values = dict(zip(became.results, result_values(node), strict=True))
        for inner in became.nodes:
            if is_symint(inner):
                here[inner] = self._size_node(inner, here, told)
                continue
            made = here[inner] = self.graph.node_copy(inner, here.__getitem__)
            made.meta = dict(told)
            made.meta["val"] = (
                values[inner] if inner in values else self._intermediate_value(inner, values, became, here)
            )
        results = [here[result] for result in became.results]
        self.new_nodes[node] = results if has_multiple_results(node) else results[0]

    def _intermediate_value(
        self, inner: fx.Node, values: dict[fx.Node, Any], became: Decomposition, here: dict[fx.Node, fx.Node]
    ) -> Any:
        """Return a fake value for an intermediate node; it shares the storage that the decomposed value shared."""
        near = [(each.meta["val"], value) for each, value in values.items() if each not in became.operands]
        near += [(operand.meta["val"], here[operand].meta["val"]) for operand in became.operands]

        def one(seen: torch.Tensor) -> torch.Tensor:
            bases = (
                value for base, value in near if _storage_id(base) == _storage_id(seen) and value.dtype is seen.dtype
            )
            base = next(bases, None)
            with self.calls.fakes.mode:
                if base is not None:
                    return torch.as_strided(base, seen.shape, seen.stride(), seen.storage_offset())
                return torch.empty_strided(seen.shape, seen.stride(), dtype=seen.dtype, device=seen.device)

        value = inner.meta["val"]
        return type(value)(one(each) for each in value) if isinstance(value, (tuple, list)) else one(value)

    def _size_node(self, inner: fx.Node, here: dict[fx.Node, fx.Node], told: dict[str, Any]) -> fx.Node:
        value = inner.meta["val"]
        known = self.size_nodes.get(value.node.expr)
        if known is None and inner.target not in SYM_ARITHMETIC:
            raise NotDeduplicable(f"{value} is not the size of an input")
        if known is None:
            known = self.size_nodes[value.node.expr] = self.graph.node_copy(inner, here.__getitem__)
            known.meta = {**told, "val": value}
        return known


def _refuse_signature(signature: ExportGraphSignature) -> None:
    if any(spec.kind not in _SUPPORTED_INPUTS for spec in signature.input_specs):
        raise NotDeduplicable("the program has inputs that are not tensors")
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise NotDeduplicable("the program mutates its state")


def _build_signature(old: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    output: Any = next(iter(reversed(graph.nodes)))
    outs = [
        OutputSpec(
            spec.kind, argument_spec(value, spec.arg.name) if isinstance(value, fx.Node) else spec.arg, spec.target
        )
        for spec, value in zip(old.output_specs, output.args[0], strict=True)
    ]
    return ExportGraphSignature(list(old.input_specs), outs)


def _storage_id(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)
