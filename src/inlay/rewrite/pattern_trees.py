"""Adapter: pattern trees from Inductor's `fx_to_pattern`. The only file that imports its private matcher.

A pattern function is exported exactly like a model (torch.export, `run_decompositions({})`), so that both give the same
operators, and converted to Inductor's pattern tree. That tree is then converted to the classes below for the matcher.

Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._guards import CompileContext, tracing
from torch.utils import _pytree as pytree

from inlay.errors import ProgramError, one_line
from inlay.program.call_arguments import normalize_args
from inlay.program.decomposition import decompose
from inlay.program.graphs import ancestors
from inlay.program.tracing_lock import tracing_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def inductor() -> Any:
    """Return Inductor's pattern matcher, which takes a second to import and is not needed for stored patterns."""
    from torch._inductor import pattern_matcher

    return pattern_matcher


def custom_pass_classes() -> list[Any]:
    """Return the classes derived from Inductor's interfaces for passes of graphs and of their modules."""
    from torch._inductor import custom_graph_pass

    found = [custom_graph_pass.CustomGraphPass, custom_graph_pass.CustomGraphModulePass]
    for each in found:
        found += [derived for derived in each.__subclasses__() if derived not in found]
    return found[2:]


@dataclass(frozen=True, eq=False)
class PatternCall:
    """A call of one operator; `args` are (name, value). A value is a pattern, a constant or a list of them."""

    target: Any
    args: tuple[tuple[str, Any], ...]
    others: frozenset[Any] = frozenset()
    """Other operators that may be called instead."""

    def accepts(self, target: Any) -> bool:
        """Return whether this operator may be called."""
        return target is self.target or target in self.others


@dataclass(frozen=True)
class PatternVariable:
    """An argument of the pattern function: any value, the same at each use."""

    name: str


@dataclass(frozen=True, eq=False)
class PatternTree:
    """A pattern: the calls that are its outputs, the number of calls, and the variables."""

    outputs: tuple[PatternCall, ...]
    num_calls: int
    variables: tuple[str, ...]


@lru_cache(maxsize=4096)
def children(call: PatternCall) -> tuple[PatternCall | PatternVariable, ...]:
    """Return the values that a call of a pattern reads, in order."""
    return tuple(_values([value for _, value in call.args]))


def _values(values: Any) -> Iterator[PatternCall | PatternVariable]:
    for value in values:
        if isinstance(value, (PatternCall, PatternVariable)):
            yield value
        elif isinstance(value, list):
            yield from _values(value)


def subtree_calls(pattern: Any) -> frozenset[PatternCall]:
    """Return a call and every call that it depends on."""
    return _subtree_of_call(pattern) if isinstance(pattern, PatternCall) else frozenset()


@lru_cache(maxsize=4096)
def _subtree_of_call(call: PatternCall) -> frozenset[PatternCall]:
    return frozenset({call}).union(*map(subtree_calls, children(call)))


@dataclass(frozen=True, eq=False)
class PatternSource:
    """A pattern function and the arguments to trace it with; a number among them is a variable too."""

    function: Callable[..., Any]
    example: Mapping[str, Any]

    def __post_init__(self) -> None:
        if set(self.variables) != set(self.example):
            raise ProgramError(
                f"The examples of a pattern are {sorted(self.example)}, but its arguments are {self.variables}."
            )

    @property
    def variables(self) -> list[str]:
        return list(inspect.signature(self.function).parameters)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: held for name in self.variables if isinstance(held := self.example[name], torch.Tensor)}

    @property
    def scalars(self) -> dict[str, Any]:
        return {name: self.example[name] for name in self.variables if name not in self.tensors}


class _PatternModule(torch.nn.Module):
    """Several pattern functions, each with its own arguments, so that export runs once for all of them."""

    def __init__(self, patterns: Sequence[PatternSource]) -> None:
        super().__init__()
        self.patterns = patterns

    def forward(self, *values: torch.Tensor) -> list[Any]:
        given = iter(values)
        return [each.function(**dict(zip(each.tensors, given, strict=False)), **each.scalars) for each in self.patterns]


def trace_pattern(function: Callable[..., Any], example: Mapping[str, Any]) -> PatternTree:
    """Return the tree of a pattern function, traced with example arguments.

    A number among the example arguments is a variable too. Its value must occur nowhere else in the pattern.
    """
    return trace_patterns([PatternSource(function, example)])[0]


def trace_patterns(patterns: Sequence[PatternSource]) -> list[PatternTree]:
    """Trace several pattern functions together."""
    values = tuple(value for each in patterns for value in each.tensors.values())
    try:
        # A backend is called while Dynamo traces: export would mix the sizes and guards of that trace into the pattern.
        with tracing_lock(), tracing(None):
            exported = torch.export.export(_PatternModule(patterns), values, strict=False)
            graph = decompose(exported).graph
    except Exception as error:
        raise ProgramError(f"The pattern cannot be traced: {one_line(error)}.") from error
    from inlay.program.exported_program import strip_metadata_asserts

    strip_metadata_asserts(graph)
    given = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    inputs = iter([given[name] for name in exported.graph_signature.user_inputs])
    output: Any = graph.output_node().args[0]
    results = iter(pytree.tree_unflatten(output, exported.call_spec.out_spec))
    return [_tree(each, [next(inputs) for _ in each.tensors], next(results)) for each in patterns]


def _tree(pattern: PatternSource, inputs: list[fx.Node], results: Any) -> PatternTree:
    """Return the tree of one pattern, from a graph that also contains other patterns."""
    graph = fx.Graph()
    own = {node: graph.node_copy(node) for node in inputs}
    names: dict[Any, tuple[str, ...]] = {}
    outputs = pytree.tree_leaves(results)
    for node in sorted({each for output in outputs for each in ancestors(output)} - own.keys()):
        made = own[node] = graph.node_copy(node, own.__getitem__)
        names[made.target] = tuple(name for name, _ in normalize_args(made))
        made.args, made.kwargs = tuple(value for _, value in normalize_args(made)), {}
    graph.output(tuple(own[node] for node in outputs))
    workaround = {name: value for name, value in pattern.scalars.items() if type(value) in (int, float)}
    tree = inductor().fx_to_pattern(
        fx.GraphModule(torch.nn.Module(), graph), argnames=list(pattern.tensors), scalar_workaround=workaround
    )
    return _Converter(names).tree(tree, pattern.variables)


class _Converter:
    """Converts Inductor's tree to ours; a node that is used twice stays one object."""

    def __init__(self, names: Mapping[Any, tuple[str, ...]]) -> None:
        self.names = names
        self.calls: dict[int, PatternCall] = {}

    def tree(self, tree: Any, variables: Sequence[str]) -> PatternTree:
        outputs = tree.outputs if isinstance(tree, inductor().MultiOutputPattern) else [tree]
        converted = tuple(self.value(each) for each in outputs)
        if not all(isinstance(each, PatternCall) for each in converted):
            raise ProgramError("A pattern must compute each of its outputs.")
        return PatternTree(converted, len(self.calls), tuple(variables))

    def value(self, value: Any) -> Any:
        matcher = inductor()
        if isinstance(value, matcher.KeywordArg):
            return PatternVariable(value.name)
        if isinstance(value, matcher.CallFunction):
            if id(value) not in self.calls:
                target = value.fns[0]
                values = (self.value(each) for each in value.args)
                self.calls[id(value)] = PatternCall(target, tuple(zip(self.names[target], values, strict=True)))
            return self.calls[id(value)]
        if isinstance(value, (list, tuple)):
            return [self.value(each) for each in value]
        return value


def called_operators(pattern: Any) -> list[set[Any]]:
    """Return the operators that one of Inductor's own patterns calls; the alternatives of one call are one set."""
    matcher = inductor()
    found: list[set[Any]] = []
    seen: set[int] = set()
    todo = [pattern]
    while todo:
        each = todo.pop()
        if isinstance(each, (list, tuple)):
            todo += each
        elif isinstance(each, matcher.PatternExpr) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, (matcher.CallFunction, matcher.CallFunctionVarArgs)):
                found.append(set(each.fns))
            todo += [getattr(each, name, ()) for name in ("args", "outputs", "pattern", "inner_pattern")]
            todo += getattr(each, "kwargs", {}).values()
    return found


def make_replacement_pass(search: Any, replace: Any, example_inputs: Sequence[Any], name: str, **options: Any) -> Any:
    """Return an Inductor `PatternMatcherPass` with one replacement; `options` are those of `register_replacement`."""
    matcher = inductor()
    made = matcher.PatternMatcherPass(pass_name=name)
    with torch.no_grad():
        matcher.register_replacement(
            search, replace, list(example_inputs), options.pop("trace_fn", matcher.fwd_only), [made], **options
        )
    return made


def apply_registered(register: Callable[[Any], object], module: fx.GraphModule) -> int:
    """Apply the patterns that `register` adds to an Inductor `PatternMatcherPass`; return the number of matches."""
    patterns = inductor().PatternMatcherPass()
    register(patterns)
    return int(patterns.apply(module.graph))


def compile_id() -> str:
    """Return torch's number of the compilation that is running, such as `0/0`; empty if there is none."""
    found = CompileContext.current_compile_id()
    return str(found) if found is not None else ""
