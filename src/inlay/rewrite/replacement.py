"""Replacements of matches: traced once for each combination of types, then inserted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from inlay.errors import ProgramError, one_line
from inlay.program.graphs import has_strided_reader, is_returned, subgraphs
from inlay.program.symbols import symbolic_sizes
from inlay.program.tracer import trace_function
from inlay.program.type_checks import type_mismatch
from inlay.rewrite.reasons import Reason
from inlay.rewrite.rewriter import has_same_shape, is_same_when_contiguous, type_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.program.program import Program
    from inlay.rewrite.rewriter import Rewriter
    from inlay.rewrite.rule import Alternative, Match, Rule


class ReplacementCache:
    """The replacement of a rule as graphs, each traced once for all matches with the same input types."""

    def __init__(self, program: Program, rule: Rule) -> None:
        self.program, self.rule = program, rule
        self._has_subgraphs = any(subgraphs(program.graph))
        self._traces: dict[Any, fx.Graph] = {}

    def trace(self, match: Match, alternative: Alternative) -> fx.Graph:
        """Return the replacement traced on the inputs of the match, with a placeholder for each tensor, in order."""
        given = {**arguments(match, alternative.example), **alternative.replacement_args}
        key = tuple((name, _key(value)) for name, value in given.items())
        if key not in self._traces:
            self._traces[key] = _trace(self.rule, given)
        return self._traces[key]

    def check(self, match: Match, alternative: Alternative) -> None:
        """Check that the replacement has the dtypes and shapes of the outputs, and their layout where observable."""
        made = _results(self.trace(match, alternative))
        found, wanted = len(made), len(match.outputs)
        match.require(
            found == wanted, Reason.REPLACEMENT, f"the replacement gives {found} values, but the pattern {wanted}"
        )
        for old, new in zip(match.outputs, made, strict=True):
            value = new.meta["val"] if isinstance(new, fx.Node) else new
            gives, was = type_mismatch(value, old.meta["val"], self.program.types)
            kept = has_same_shape(value, old.meta["val"]) and (
                not self._is_layout_observable(old)
                or is_same_when_contiguous(self.program.types, value, old.meta["val"])
            )
            match.require(
                gives == was or kept, Reason.REPLACEMENT, f"the replacement is {gives}, but {old} is {was}", old
            )

    def insert(self, match: Match, rewriter: Rewriter) -> None:
        """Replace a match."""
        alternative = match.alternative
        assert alternative is not None
        trace = self.trace(match, alternative)
        placeholders = [node for node in trace.nodes if node.op == "placeholder"]
        read = [match.values[name] for name in alternative.example if isinstance(match.value(name), torch.Tensor)]
        mapping: dict[fx.Node, Any] = dict(zip(placeholders, map(rewriter.current, read), strict=True))
        with rewriter.inserting_before(insertion_point(match, mapping.values()), match.root):
            for node in trace.nodes:
                if node.op == "call_function":
                    mapping[node] = rewriter.copy(node, mapping)
        pairs = {}
        for old, new in zip(match.outputs, _results(trace), strict=True):
            pairs[old] = mapping[new]
            same = type_mismatch(new.meta["val"], old.meta["val"], self.program.types) == ("", "")
            if not same and self._is_layout_observable(old):
                pairs[old] = rewriter.insert_contiguous_copy(mapping[new], old)
        rewriter.replace_all(pairs)
        rewriter.erase(*reversed(match.nodes))

    def _is_layout_observable(self, value: fx.Node) -> bool:
        """Whether strides matter elsewhere: the value is returned, a nested graph may read a value computed from it, or
        an `as_strided` view reads it."""
        return is_returned(value) or self._has_subgraphs or has_strided_reader(value)


def arguments(match: Match, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a pattern or a replacement at a match."""
    return {name: match.value(name) for name in names}


def insertion_point(match: Match, inputs: Iterable[fx.Node]) -> fx.Node:
    """Return the node to insert a replacement before: after all its inputs, before all its users."""
    inside = set(match.nodes)
    readers = [user for output in match.outputs for user in output.users if user not in inside]
    place = min([match.nodes[-1], *readers])
    for node in inputs:
        late = f"{place} reads a result before {node}, an input of the pattern, is computed"
        match.require(node < place, Reason.ANOTHER_CONSUMER, late, place)
    return place


def _key(value: Any) -> Any:
    """Return a cache key that distinguishes 1, 1.0 and True, and 0.0 and -0.0."""
    return (type_text(value), str(value.stride())) if isinstance(value, torch.Tensor) else (type(value), repr(value))


def _results(trace: fx.Graph) -> list[Any]:
    return tree_leaves(trace.output_node().args[0])


def _trace(rule: Rule, arguments: dict[str, Any]) -> fx.Graph:
    """Trace the replacement on the inputs of a site."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in arguments.items() if name not in tensors}

    def run(*values: torch.Tensor) -> Any:
        return rule.replacement(**dict(zip(tensors, values, strict=True)), **numbers)

    try:
        with symbolic_sizes():
            # Two arguments that are the same tensor here may differ at the next site: each gets its own tensor.
            return trace_function(run, [value.detach() for value in tensors.values()]).graph
    except Exception as error:
        raise ProgramError(f"The replacement of {rule.name} cannot be traced: {one_line(error)}.") from error
