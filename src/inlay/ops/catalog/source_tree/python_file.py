"""Operator registrations, Triton kernels and patterns in Python files, read from the syntax tree."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from inlay.ops.catalog.source_tree.entry import TreeEntry, TreeEntryKind

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_TORCH = ("torch.library.custom_op", "torch.library.triton_op", "torch.library.define")
_OF_INDUCTOR = ("register_replacement", "register_graph_pattern", "register_lowering_pattern")
_OF_PROJECTS = ("direct_register_custom_op", "register_custom_op", "register_ad_pattern", "TransformRegistry")
_PATTERN_CLASS = "VllmPatternReplacement"
_WORDS = [
    each.encode() for each in ("custom_op", "triton_op", ".define(", *_OF_INDUCTOR, *_OF_PROJECTS, _PATTERN_CLASS)
]
_SCHEMA = re.compile(r"\s*((?:\w+::)?[\w{}]+)(?:\.\w+)?\s*\(")


def read(data: bytes, path: str) -> Iterator[TreeEntry]:
    """Yield what a file registers. It is parsed, not executed; errors of the parser are raised."""
    if any(word in data for word in _WORDS) or (b"triton" in data and b"jit" in data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(data)
        yield from _ModuleEntries(module, path).entries(module)


class _ModuleEntries:
    """Reads one module. Names are resolved through its imports and the module-level constants that are bound once."""

    def __init__(self, module: ast.Module, path: str) -> None:
        self.path = path
        self.imports: dict[str, str] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.constants: dict[str, str] = {}
        self.libraries: dict[str, str] = {}
        bound: Counter[str] = Counter()
        assigned: list[ast.Assign] = []
        for node in ast.walk(module):
            if isinstance(node, ast.Import | ast.ImportFrom):
                prefix = "." * node.level + (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
                names = {each.asname or each.name: prefix + each.name for each in node.names}
                self.imports |= names
                bound.update(names.keys())
            elif isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, node)
            elif isinstance(node, ast.Assign):
                assigned.append(node)
            elif isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
                bound[node.arg if isinstance(node, ast.arg) else node.id] += 1
        at_top = set(module.body)
        for node in assigned:
            target, value = node.targets[0], node.value
            if isinstance(value, ast.Call) and self._dotted(value.func) == "torch.library.Library" and value.args:
                name, library = ast.unparse(target), self._text(value.args[0])
                self.libraries[name] = library if self.libraries.get(name, library) == library else f"{{{name}}}"
            elif node in at_top and isinstance(target, ast.Name) and bound[target.id] == 1:
                text = self._text(value)
                self.constants |= {target.id: text} if "{" not in text else {}

    def entries(self, module: ast.Module) -> Iterator[TreeEntry]:
        """Yield everything that the module registers."""
        classes = {_PATTERN_CLASS}
        todo: list[tuple[ast.AST, str]] = [(module, "")]
        while todo:
            node, scope = todo.pop()
            children: Any = ast.iter_child_nodes(node)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for each in node.decorator_list:
                    yield from self._entry(each, scope, node)
                bases = node.bases if isinstance(node, ast.ClassDef) else []
                if classes & {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in bases}:
                    classes.add(node.name)
                    name = scope + node.name
                    yield TreeEntry(TreeEntryKind.PATTERN, name, _PATTERN_CLASS, "", self.path, node.lineno)
                children, scope = node.body, f"{scope}{node.name}."
            elif isinstance(node, ast.Call):
                yield from self._entry(node, scope)
            todo.extend((each, scope) for each in reversed(list(children)))

    def _entry(self, node: ast.expr, scope: str, decorated: Any = None) -> Iterator[TreeEntry]:
        """Yield the entry of a decorator or call, if it registers something."""
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if found := self._registration(call, scope, decorated):
            yield TreeEntry(*found, self.path, node.lineno)

    def _registration(self, call: ast.Call, scope: str, decorated: Any) -> tuple[TreeEntryKind, str, str, str] | None:
        """Return what a call registers: kind, name, by what, and signature."""
        by = self._dotted(call.func)
        last, operator, pattern = by.rpartition(".")[2], TreeEntryKind.OPERATOR, TreeEntryKind.PATTERN
        given = {each.arg: each.value for each in call.keywords}
        args = [*call.args, *given.values()]
        if f".{by}".endswith(".triton.jit") and isinstance(decorated, ast.FunctionDef):
            is_helper = any(isinstance(each, ast.Return) and each.value for each in ast.walk(decorated))
            kernel = TreeEntryKind.TRITON, scope + decorated.name, "triton.jit", _signature(decorated)
            return None if is_helper else kernel
        if not args:
            return None
        if by in _OF_TORCH or (last == "register_custom_op" and "mutates_args" in given):
            name = self._text(given.get("name", args[0]))
            return operator, name, by.strip("."), self._schema(call.args, given, decorated)
        if last == "direct_register_custom_op":
            library = self._library(given["target_lib"]) if "target_lib" in given else "vllm"
            name = f"{library}::{self._text(given.get('op_name', args[0]))}"
            return operator, name, last, self._schema(call.args, given, decorated)
        if last == "define" and isinstance(call.func, ast.Attribute):
            text = self._text(args[0])
            if schema := _SCHEMA.match(text):
                library = "" if "::" in schema[1] else f"{self._library(call.func.value)}::"
                return operator, library + schema[1], "Library.define", text
        elif (last in _OF_INDUCTOR and by.startswith("torch._inductor.")) or last == "register_ad_pattern":
            name = decorated.name if decorated else ast.unparse(given.get("search_fn", args[0]))
            return pattern, scope + name, last, ast.unparse(call)
        elif by.endswith("TransformRegistry.register") and decorated:
            return pattern, self._text(args[0]), "TransformRegistry.register", decorated.name
        return None

    def _schema(self, args: list[ast.expr], given: dict[str | None, ast.expr], decorated: Any) -> str:
        """Return the schema that a registration states, or the signature of its function."""
        second = given.get("schema") or given.get("op_func") or next(iter(args[1:]), None)
        stated = self._text(second) if second else "{}"
        function = decorated or self.functions.get(stated.strip("{}"))
        return _signature(function) if isinstance(function, ast.FunctionDef) and "{" in stated else stated.strip("{}")

    def _library(self, node: ast.expr) -> str:
        text = ast.unparse(node)
        return self.libraries.get(text, f"{{{text}}}")

    def _dotted(self, node: ast.expr) -> str:
        """Return the full name of a function; the root is resolved through the imports."""
        if isinstance(node, ast.Attribute):
            return f"{self._dotted(node.value)}.{node.attr}"
        return self.imports.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def _text(self, node: ast.expr) -> str:
        """Return the value of a string expression; a part that is not a constant is its expression in braces."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self._text(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        text = ast.unparse(node)
        return self.constants.get(text, f"{{{text}}}")


def _signature(function: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({ast.unparse(function.args)}){returns}"
