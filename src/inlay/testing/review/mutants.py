"""Mutants: transforms with one part broken on purpose, which tests must detect.

    for mutant in make_mutants(MatchSwiGLU):
        with mutant():
            ...  # a test that still passes here does not kill the mutant

The mutants of a transform do nothing, compute something else, fire everywhere, or omit one condition: a
`match.require(…)`, or an `if` that returns a `Refusal` or raises `Refused`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from inlay.transforms.base import Transform, TransformResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from inlay.program.program import Program

NOTHING, WRONG, EVERYWHERE = "does nothing", "computes something else", "fires everywhere"


@dataclass(frozen=True)
class Mutant:
    """A context in which one part of a transform is broken."""

    name: str
    start: Callable[[], AbstractContextManager[None]]

    def __call__(self) -> AbstractContextManager[None]:
        return self.start()


@dataclass(frozen=True)
class Condition:
    """A statement that prevents a rule from matching."""

    file: Path
    line: int
    text: str

    @property
    def location(self) -> str:
        """File and line, for tables."""
        return f"{self.file.stem}:{self.line}"


def find_conditions(file: Path) -> list[Condition]:
    """Return the conditions in a file, in order."""
    return [
        Condition(file, each.lineno, condition_text(each)) for each in condition_statements(ast.parse(file.read_text()))
    ]


def condition_statements(tree: ast.AST) -> list[ast.stmt]:
    """Return the statements that are conditions of a rule, in order."""
    found: list[ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr == "require":
                found.append(node)
        elif isinstance(node, ast.If) and is_refusal(node.body[-1]):
            found.append(node)
    return sorted(found, key=lambda each: each.lineno)


def is_refusal(statement: ast.stmt) -> bool:
    """Return whether a statement refuses a match: `return Refusal(…)`, `raise Refused(…)`, or a helper for one."""
    match statement:
        case ast.Return(value=ast.Call(func=ast.Name(id=name))) | ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
            return name in ("Refusal", "Refused", "MixingCall") or name.endswith("_refusal")
    return False


def condition_text(statement: ast.stmt) -> str:
    """Return the reason that a condition gives."""
    texts = [
        each.value for each in ast.walk(statement) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return next((text.strip() for text in texts if " " in text), "")


def make_mutants(cls: type[Transform]) -> list[Mutant]:
    """Return the mutants of a transform that its tests must kill.

    >>> from inlay.transforms.library.match_swiglu import MatchSwiGLU
    >>> [each.name for each in make_mutants(MatchSwiGLU)][:3]
    ['does nothing', 'computes something else', 'fires everywhere']
    """
    made = [Mutant(NOTHING, partial(_patch_attribute, cls, "apply", lambda self, program: TransformResult(program, 0)))]
    if not cls.adds_inputs:
        made.append(Mutant(WRONG, partial(_patch_attribute, cls, "apply", _wrap_apply(cls.apply, fired=True))))
    made.append(Mutant(EVERYWHERE, partial(_patch_attribute, cls, "apply", _wrap_apply(cls.apply, fired=False))))
    return made + [
        Mutant(f"omits “{each.text or each.location}” ({each.location})", partial(_delete_from_class, cls, each))
        for each in find_conditions(Path(inspect.getfile(cls)))
    ]


@contextmanager
def _patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _wrap_apply(
    apply: Callable[[Any, Program], TransformResult], *, fired: bool
) -> Callable[[Any, Program], TransformResult]:
    """Return `apply` with scaled results where it matched (`fired`), or where it did not."""

    def broken(self: Any, program: Program) -> TransformResult:
        applied = apply(self, program)
        if bool(applied.sites) is not fired:
            return applied
        _scale_results(applied.program.graph)
        return TransformResult(applied.program, applied.sites or 1, applied.matched_roots, applied.misses)

    return broken


def _scale_results(graph: fx.Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    for node in list(output.all_input_nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        with graph.inserting_before(output):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.5))
        scaled.meta = dict(node.meta)
        output.replace_input_with(node, scaled)


@contextmanager
def _delete_from_class(cls: type[Transform], condition: Condition) -> Iterator[None]:
    """Replace the function that contains a condition by one without it: in its module, in another class of the module,
    or as a method of `cls` only."""
    tree = ast.parse(condition.file.read_text())
    for base in (each for each in cls.__mro__ if _source(each) == condition.file):
        module = sys.modules[base.__module__]
        helpers = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name != base.__name__]
        owners = [(getattr(module, each.name), each.body) for each in helpers]
        for owner, functions in ((module, tree.body), (cls, _methods(tree, base)), *owners):
            for function in functions:
                if isinstance(function, ast.FunctionDef) and function.lineno <= condition.line <= (
                    function.end_lineno or 0
                ):
                    StatementDeleter(condition.line).visit(function)
                    code = compile(ast.fix_missing_locations(ast.Module([function], [])), str(condition.file), "exec")
                    made: dict[str, Any] = {}
                    exec(code, vars(module), made)
                    with _patch_attribute(owner, function.name, made[function.name]):
                        yield
                    return
    raise LookupError(f"{condition.location} is not in a function of {cls.__name__}, its bases or its module")


def _source(cls: type) -> Path | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file) if file else None


def _methods(tree: ast.Module, cls: type) -> list[ast.stmt]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return [each for node in classes for each in node.body]


class StatementDeleter(ast.NodeTransformer):
    """Replaces the statement in a line with `pass`."""

    def __init__(self, line: int) -> None:
        self.line = line

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Expr, ast.If)) and node.lineno == self.line:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)
