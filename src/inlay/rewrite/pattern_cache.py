"""Traced patterns, kept in the process; those of Inlay's own rules also on disk."""

from __future__ import annotations

import ast
import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from inlay import derived_cache
from inlay.errors import ProgramError
from inlay.program.graphs import target_text
from inlay.program.text.literals import find_target, literal, parse_literal
from inlay.rewrite.pattern_trees import (
    PatternCall,
    PatternSource,
    PatternTree,
    PatternVariable,
    trace_pattern,
    trace_patterns,
)
from inlay.rewrite.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_Untraced = tuple["Callable[..., Any]", "Mapping[str, Any]"]
_STORED = "patterns"
_SOURCE_FOLDER = derived_cache.__file__.removesuffix("derived_cache.py")
_TRUSTED = {"torch", *sys.stdlib_module_names}


@dataclass
class PatternCache:
    """Traced patterns, by function, rule and example types. Tracing several together takes half the time.

    The patterns of Inlay's own rules are also kept on disk.
    """

    trees: dict[Any, PatternTree] = field(default_factory=dict)

    def get(self, function: Callable[..., Any], example: Mapping[str, Any]) -> PatternTree:
        """Return the tree of a pattern, traced once."""
        key = _key(function, example)
        if key not in self.trees and (fresh := self._restore([(function, example)])):
            self._add(fresh, [trace_pattern(function, example)])
        return self.trees[key]

    def trace(self, patterns: Iterable[_Untraced]) -> None:
        """Trace patterns that are not cached, together. If this fails, `get` traces each alone and raises the error."""
        fresh = self._restore(patterns)
        if len(fresh) > 1:
            with suppress(ProgramError):
                self._add(fresh, trace_patterns([PatternSource(*each) for each in fresh.values()]))

    def _restore(self, patterns: Iterable[_Untraced]) -> dict[Any, _Untraced]:
        """Read patterns that an earlier run has traced; return those that must be traced."""
        fresh = {key: each for each in patterns if (key := _key(*each)) not in self.trees}
        names = {key: name for key, each in fresh.items() if (name := _stored_name(*each))}
        held = (derived_cache.read(_STORED) if names else None) or {}
        for key, name in names.items():
            if name in held:
                with suppress(ProgramError, SyntaxError, ValueError, KeyError, TypeError):
                    self.trees[key] = parse_tree(held[name], PatternSource(*fresh[key]).variables)
        return {key: each for key, each in fresh.items() if key not in self.trees}

    def _add(self, patterns: Mapping[Any, _Untraced], trees: Sequence[PatternTree]) -> None:
        self.trees.update(zip(patterns, trees, strict=True))
        made = {}
        for each, tree in zip(patterns.values(), trees, strict=True):
            with suppress(ProgramError):
                if name := _stored_name(*each):
                    made[name] = tree_lines(tree)
        if made:
            derived_cache.write(_STORED, {**(derived_cache.read(_STORED) or {}), **made})


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
