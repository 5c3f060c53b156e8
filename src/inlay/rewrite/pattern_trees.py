"""Adapter: pattern trees from Inductor's `fx_to_pattern`. The only file that imports its private matcher.

A pattern function is exported exactly like a model (torch.export, `run_decompositions({})`), so that both give the same
operators, and converted to Inductor's pattern tree. That tree is then converted to the classes below for the matcher.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._guards import tracing
from torch.utils import _pytree as pytree

from inlay import derived_cache
from inlay.errors import ProgramError, one_line
from inlay.program.call_arguments import normalize_args
from inlay.program.decomposition import decompose
from inlay.program.graphs import ancestors, target_text
from inlay.program.text.literals import find_target, literal, parse_literal
from inlay.program.tracing_lock import tracing_lock
from inlay.rewrite.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


def _inductor() -> Any:
    """Return Inductor's pattern matcher, which takes a second to import and is not needed for stored patterns."""
    from torch._inductor import pattern_matcher

    return pattern_matcher


@dataclass(frozen=True, eq=False)
class PatternCall:
    """A call of one operator; `args` are (name, value). A value is a pattern, a constant or a list of them."""

    target: Any
    args: tuple[tuple[str, Any], ...]


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
class _PatternSource:
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

    def __init__(self, patterns: Sequence[_PatternSource]) -> None:
        super().__init__()
        self.patterns = patterns

    def forward(self, *values: torch.Tensor) -> list[Any]:
        given = iter(values)
        return [each.function(**dict(zip(each.tensors, given, strict=False)), **each.scalars) for each in self.patterns]


def trace_pattern(function: Callable[..., Any], example: Mapping[str, Any]) -> PatternTree:
    """Return the tree of a pattern function, traced with example arguments.

    A number among the example arguments is a variable too. Its value must occur nowhere else in the pattern.
    """
    return _trace([_PatternSource(function, example)])[0]


def _trace(patterns: Sequence[_PatternSource]) -> list[PatternTree]:
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


def _tree(pattern: _PatternSource, inputs: list[fx.Node], results: Any) -> PatternTree:
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
    tree = _inductor().fx_to_pattern(
        fx.GraphModule(torch.nn.Module(), graph), argnames=list(pattern.tensors), scalar_workaround=workaround
    )
    return _Converter(names).tree(tree, pattern.variables)


class _Converter:
    """Converts Inductor's tree to ours; a node that is used twice stays one object."""

    def __init__(self, names: Mapping[Any, tuple[str, ...]]) -> None:
        self.names = names
        self.calls: dict[int, PatternCall] = {}

    def tree(self, tree: Any, variables: Sequence[str]) -> PatternTree:
        outputs = tree.outputs if isinstance(tree, _inductor().MultiOutputPattern) else [tree]
        converted = tuple(self.value(each) for each in outputs)
        if not all(isinstance(each, PatternCall) for each in converted):
            raise ProgramError("A pattern must compute each of its outputs.")
        return PatternTree(converted, len(self.calls), tuple(variables))

    def value(self, value: Any) -> Any:
        inductor = _inductor()
        if isinstance(value, inductor.KeywordArg):
            return PatternVariable(value.name)
        if isinstance(value, inductor.CallFunction):
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
    inductor = _inductor()
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
    """Traced patterns, by function, rule and example types. Tracing several together takes half the time.

    The patterns of Inlay's own rules are also kept on disk.
    """

    trees: dict[Any, PatternTree] = field(default_factory=dict)

    def get(self, function: Callable[..., Any], example: Mapping[str, Any]) -> PatternTree:
        """Return the tree of a pattern, traced once."""
        key = _key(function, example)
        if key not in self.trees:
            self._restore({key: (function, example)})
        if key not in self.trees:
            self._add({key: (function, example)}, [trace_pattern(function, example)])
        return self.trees[key]

    def trace(self, patterns: Iterable[tuple[Callable[..., Any], Mapping[str, Any]]]) -> None:
        """Trace patterns that are not cached, together. If this fails, `get` traces each alone and raises the error."""
        fresh = {_key(*each): each for each in patterns}
        self._restore({key: each for key, each in fresh.items() if key not in self.trees})
        fresh = {key: each for key, each in fresh.items() if key not in self.trees}
        if len(fresh) > 1:
            with suppress(ProgramError):
                self._add(fresh, _trace([_PatternSource(*each) for each in fresh.values()]))

    def _restore(self, wanted: Mapping[Any, _Untraced]) -> None:
        """Read patterns that an earlier run has traced."""
        names = {key: name for key, each in wanted.items() if (name := _stored_name(*each))}
        held = (derived_cache.read(_STORED) if names else None) or {}
        for key, name in names.items():
            if name in held:
                with suppress(ProgramError, SyntaxError, ValueError, KeyError, TypeError):
                    self.trees[key] = parse_tree(held[name], _PatternSource(*wanted[key]).variables)

    def _add(self, patterns: Mapping[Any, _Untraced], trees: Sequence[PatternTree]) -> None:
        self.trees.update(zip(patterns, trees, strict=True))
        made = {}
        for each, tree in zip(patterns.values(), trees, strict=True):
            with suppress(ProgramError):
                if name := _stored_name(*each):
                    made[name] = tree_lines(tree)
        if made:
            derived_cache.write(_STORED, {**(derived_cache.read(_STORED) or {}), **made})


_Untraced = tuple["Callable[..., Any]", "Mapping[str, Any]"]
_STORED = "patterns"


def _key(function: Callable[..., Any], example: Mapping[str, Any]) -> Any:
    rule: Any = getattr(function, "__self__", None)
    kinds = tuple((name, _kind(value)) for name, value in example.items()), _torch_modes()
    if not isinstance(rule, Rule):
        return function, kinds
    return getattr(function, "__func__", function), type(rule), rule.trace_key(), kinds


def _torch_modes() -> tuple[Any, ...]:
    """Return the modes of torch that change what a function traces to."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    return torch.get_default_dtype(), torch.get_default_device(), *modes


def _stored_name(function: Any, example: Mapping[str, Any]) -> str:
    """Return the name of a pattern on disk; empty unless its rule and all that it calls are defined in files of Inlay.

    It contains a hash of the loaded code, which a stale file of bytecode or a replaced function changes.
    """
    rule = getattr(function, "__self__", None)
    if not isinstance(rule, Rule):
        return ""
    _, cls, options, kinds = _key(function, example)
    code = _loaded_code(cls)
    return repr((cls.__module__, cls.__qualname__, function.__name__, code, options, kinds)) if code else ""


_SOURCE_FOLDER = derived_cache.__file__.removesuffix("derived_cache.py")


_TRUSTED = {"torch", *sys.stdlib_module_names}


def _loaded_code(cls: type) -> str:
    """Return a hash of the methods of a class and of the functions they call; empty if one is not from Inlay."""
    bases = [base for base in cls.__mro__ if _top(base) not in _TRUSTED]
    if any("<locals>" in base.__qualname__ or _top(base) != "inlay" for base in bases):
        return ""
    todo: list[Any] = [value for base in bases for value in vars(base).values()]
    texts, seen = [], set()
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "__wrapped__", value)
        if not isinstance(value, FunctionType) or value in seen or _top(value) in _TRUSTED:
            continue
        seen.add(value)
        if not value.__code__.co_filename.startswith(_SOURCE_FOLDER):
            return ""
        for code in _nested_code(value.__code__):
            texts.append(f"{code.co_code.hex()} {code.co_names} {[each for each in code.co_consts if _is_plain(each)]}")
            todo += [value.__globals__.get(name) for name in code.co_names]
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def _top(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _nested_code(each)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes, type(None), tuple))


def tree_lines(tree: PatternTree) -> list[Any]:
    """Return a tree as JSON: each call with operator and arguments, then the outputs; `parse_tree` reads it."""
    names: dict[PatternCall, str] = {}
    lines: list[Any] = []

    def text(value: Any) -> str:
        match value:
            case PatternVariable(name=name):
                return f"v_{name}"
            case PatternCall():
                if value not in names:
                    args = [[name, text(each)] for name, each in value.args]
                    names[value] = f"c_{len(lines)}"
                    lines.append([target_text(value.target), args])
                return names[value]
            case list():
                return f"[{', '.join(map(text, value))}]"
        return literal(value)

    outputs = [text(each) for each in tree.outputs]
    return [lines, outputs]


def parse_tree(stored: Any, variables: Sequence[str]) -> PatternTree:
    """Return the tree that `tree_lines` wrote. Nothing is executed."""
    calls: list[PatternCall] = []

    def find(name: str) -> Any:
        kind, _, rest = name.partition("_")
        return PatternVariable(rest) if kind == "v" else calls[int(rest)]

    def value(text: str) -> Any:
        return parse_literal(ast.parse(text, mode="eval").body, find)

    lines, outputs = stored
    for target, args in lines:
        calls.append(PatternCall(find_target(target), tuple((name, value(text)) for name, text in args)))
    return PatternTree(tuple(map(value, outputs)), len(calls), tuple(variables))


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


PATTERNS = PatternCache()


def apply_registered(register: Callable[[Any], object], module: fx.GraphModule) -> int:
    """Apply the patterns that `register` adds to an Inductor `PatternMatcherPass`; return the number of matches."""
    patterns = _inductor().PatternMatcherPass()
    register(patterns)
    return int(patterns.apply(module.graph))
