"""What a rule puts in the place of a match: traced once for each combination of types, then inserted."""

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
    """The replacement of a rule as a graph, traced once for all matches whose inputs are of the same types."""

    def __init__(self, program: Program, rule: Rule) -> None:
        self.program, self.rule = program, rule
        self._has_subgraphs = any(subgraphs(program.graph))
        self._traces: dict[Any, fx.Graph] = {}

    def trace(self, match: Match, alternative: Alternative) -> fx.Graph:
        """The replacement over the match's own inputs: a placeholder for each that is a tensor, in order."""
        given = {**arguments(match, alternative.example), **alternative.replacement_args}
        key = tuple((name, _key(value)) for name, value in given.items())
        if key not in self._traces:
            self._traces[key] = _trace(self.rule, given)
        return self._traces[key]

    def check(self, match: Match, alternative: Alternative) -> None:
        """What replaces a value must be of its dtype and shape, and lie in memory as it did where that is visible."""
        made = _results(self.trace(match, alternative))
        found, wanted = len(made), len(match.outputs)
        match.require(found == wanted, Reason.REPLACEMENT, f"it gives {found} values, and the pattern {wanted}")
        for old, new in zip(match.outputs, made, strict=True):
            value = new.meta["val"] if isinstance(new, fx.Node) else new
            gives, was = type_mismatch(value, old.meta["val"], self.program.types)
            kept = has_same_shape(value, old.meta["val"]) and (
                not self._is_layout_observable(old)
                or is_same_when_contiguous(self.program.types, value, old.meta["val"])
            )
            match.require(gives == was or kept, Reason.REPLACEMENT, f"it gives {gives}, and {old} is {was}", old)

    def insert(self, match: Match, rewriter: Rewriter) -> None:
        """Put the replacement in the place of a match."""
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
        """Whether strides matter elsewhere: the value is returned, a nested graph may read what is computed from it, or
        a view says where in memory each of its elements lies."""
        return is_returned(value) or self._has_subgraphs or has_strided_reader(value)


def arguments(match: Match, names: Iterable[str]) -> dict[str, Any]:
    """What a pattern or a replacement is called with at a match."""
    return {name: match.value(name) for name in names}


def insertion_point(match: Match, inputs: Iterable[fx.Node]) -> fx.Node:
    """The node before which a replacement may stand: after all that it reads, before all that read it."""
    inside = set(match.nodes)
    readers = [user for output in match.outputs for user in output.users if user not in inside]
    place = min([match.nodes[-1], *readers])
    for node in inputs:
        late = f"{place} reads a result before {node}, which the pattern needs, is computed"
        match.require(node < place, Reason.ANOTHER_CONSUMER, late, place)
    return place


def _key(value: Any) -> Any:
    """1, 1.0 and True are equal and not the same, as 0.0 and -0.0."""
    return (type_text(value), str(value.stride())) if isinstance(value, torch.Tensor) else (type(value), repr(value))


def _results(trace: fx.Graph) -> list[Any]:
    return tree_leaves(trace.output_node().args[0])


def _trace(rule: Rule, arguments: dict[str, Any]) -> fx.Graph:
    """The replacement as a graph over the site's own inputs."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in arguments.items() if name not in tensors}

    def run(*values: torch.Tensor) -> Any:
        return rule.replacement(**dict(zip(tensors, values, strict=True)), **numbers)

    try:
        with symbolic_sizes():
            # Two arguments that are one value here may be two at the next site: each gets a tensor of its own.
            return trace_function(run, [value.detach() for value in tensors.values()]).graph
    except Exception as error:
        raise ProgramError(f"The replacement of {rule.name} cannot be traced: {one_line(error)}.") from error
