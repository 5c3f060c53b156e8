"""Adapter: pattern trees from Inductor's `fx_to_pattern`. The only file that imports its private matcher.

A pattern function is exported exactly like a model (torch.export, `run_decompositions({})`), so that it means what it
says, and turned into Inductor's pattern tree. The tree is then put into our own four shapes, which the walker reads.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._guards import tracing
from torch._inductor import pattern_matcher as inductor

from inlay.errors import ProgramError, one_line
from inlay.rewrite.schema import normalised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, eq=False)
class Call:
    """A call of one operator; `args` are (name, value) with values that are patterns, constants or lists of them."""

    target: Any
    args: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Variable:
    """An argument of the pattern function: any value, the same at each place it is used."""

    name: str


@dataclass(frozen=True, eq=False)
class Tree:
    """A pattern: what each of its outputs is, and how many calls it has."""

    outputs: tuple[Call, ...]
    calls: int
    variables: tuple[str, ...]


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], scalars: Mapping[str, Any], tensors: Sequence[str]) -> None:
        super().__init__()
        self.function, self.scalars, self.tensors = function, scalars, tensors

    def forward(self, *values: torch.Tensor) -> Any:
        return self.function(**dict(zip(self.tensors, values, strict=True)), **self.scalars)


def trace_pattern(function: Callable[..., Any], example: Mapping[str, Any]) -> Tree:
    """The tree of a pattern function, traced with example arguments.

    A number among the example arguments is a variable too: it must be a value that occurs nowhere else.
    """
    variables = list(inspect.signature(function).parameters)
    if set(variables) != set(example):
        raise ProgramError(f"The examples of a pattern name {sorted(example)}, its arguments are {variables}.")
    tensors = [name for name in variables if isinstance(example[name], torch.Tensor)]
    scalars = {name: example[name] for name in variables if name not in tensors}
    names: dict[Any, tuple[str, ...]] = {}
    module = _Module(function, scalars, tensors)
    try:
        # A backend is called while Dynamo traces: export would take its sizes and guards for those of the pattern.
        with warnings.catch_warnings(), tracing(None):
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, tuple(example[name] for name in tensors), strict=False)
            graph = exported.run_decompositions({}).graph
    except Exception as error:
        raise ProgramError(f"The pattern cannot be traced: {one_line(error)}.") from error
    from inlay.program.exported import strip_metadata_asserts

    strip_metadata_asserts(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            names[node.target] = tuple(name for name, _ in normalised(node))
            node.args, node.kwargs = tuple(value for _, value in normalised(node)), {}
    workaround = {name: value for name, value in scalars.items() if type(value) in (int, float)}
    tree = inductor.fx_to_pattern(
        fx.GraphModule(torch.nn.Module(), graph), argnames=tensors, scalar_workaround=workaround
    )
    return _Converter(names).tree(tree, variables)


class _Converter:
    """Inductor's tree in our shapes; nodes used twice stay one object."""

    def __init__(self, names: Mapping[Any, tuple[str, ...]]) -> None:
        self.names = names
        self.calls: dict[int, Call] = {}

    def tree(self, tree: Any, variables: Sequence[str]) -> Tree:
        outputs = tree.outputs if isinstance(tree, inductor.MultiOutputPattern) else [tree]
        converted = tuple(self.value(each) for each in outputs)
        if not all(isinstance(each, Call) for each in converted):
            raise ProgramError("A pattern must compute each of its outputs.")
        return Tree(converted, len(self.calls), tuple(variables))

    def value(self, value: Any) -> Any:
        if isinstance(value, inductor.KeywordArg):
            return Variable(value.name)
        if isinstance(value, inductor.CallFunction):
            if id(value) not in self.calls:
                target = value.fns[0]
                values = (self.value(each) for each in value.args)
                self.calls[id(value)] = Call(target, tuple(zip(self.names[target], values, strict=True)))
            return self.calls[id(value)]
        if isinstance(value, (list, tuple)):
            return [self.value(each) for each in value]
        return value


def called_by(pattern: Any) -> list[set[Any]]:
    """The operators that one of Inductor's own patterns calls; alternatives of one call are together."""
    found: list[set[Any]] = []
    seen: set[int] = set()
    todo = [pattern]
    while todo:
        each = todo.pop()
        if isinstance(each, (list, tuple)):
            todo += each
        elif isinstance(each, inductor.PatternExpr) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, (inductor.CallFunction, inductor.CallFunctionVarArgs)):
                found.append(set(each.fns))
            todo += [getattr(each, name, ()) for name in ("args", "outputs", "pattern", "inner_pattern")]
            todo += getattr(each, "kwargs", {}).values()
    return found


@dataclass
class PatternCache:
    """Traced patterns, by function and example types: a trace takes about half a second."""

    trees: dict[Any, Tree] = field(default_factory=dict)

    def get(self, function: Callable[..., Any], example: Mapping[str, Any]) -> Tree:
        """The tree of a pattern, traced once."""
        key = (getattr(function, "__func__", function), *((name, _kind(value)) for name, value in example.items()))
        if key not in self.trees:
            self.trees[key] = trace_pattern(function, example)
        return self.trees[key]


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


PATTERNS = PatternCache()
