"""Parser of the full text form. The text is parsed, never executed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inlay.errors import ProgramError, one_line, suggest
from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.facts import Facts
from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import MODULE, SOURCE, attach_subgraphs
from inlay.program.program import CallSpec, Program, Symbol
from inlay.program.symbols import FakeValues
from inlay.program.text.literals import find_target, parse_literal
from inlay.program.text.printer import FORMAT_VERSION, HEADER
from inlay.program.weights import InMemoryTensor, MissingTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.program.weights import TensorRef


def load(path: Path | str, tensors: Mapping[str, TensorRef] | None = None) -> Program:
    """Read a dump. `tensors` contains the weights by binding name; without it the program cannot run."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ProgramError(f"{path} cannot be read: {one_line(error)}.") from error
    beside = path.with_suffix(".safetensors")
    large: dict[str, torch.Tensor] = {}
    if beside.exists():
        from safetensors.torch import load_file

        try:
            large = load_file(beside)
        except Exception as error:
            raise ProgramError(f"{beside} is damaged: {one_line(error)}.", "Create the dump again.") from error
    return parse(text, tensors, large)


@pause_gc()
def parse(
    text: str, tensors: Mapping[str, TensorRef] | None = None, large_constants: Mapping[str, torch.Tensor] | None = None
) -> Program:
    """Read the text form of a program."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith(HEADER):
        raise ProgramError("The text is not an Inlay dump.", "Create one with `inlay show MODEL --full -o FILE.py`.")
    version, _, name = lines[0].removeprefix(HEADER).strip().partition(": ")
    if version.startswith("(folded)"):
        raise ProgramError(
            "This is the folded form, which cannot be read back.",
            "Create the full form: inlay show MODEL --full -o FILE.py",
        )
    if version != str(FORMAT_VERSION):
        raise ProgramError(
            f"The dump has format {version}; this version of Inlay reads format {FORMAT_VERSION}.", "Create it again."
        )
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ProgramError(f"Line {error.lineno} of the dump is not Python: {error.msg}.") from error
    tables = {
        statement.targets[0].id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    functions = {statement.name: statement for statement in tree.body if isinstance(statement, ast.FunctionDef)}
    try:
        return _Reader(name, lines, tables, functions, tensors or {}, large_constants or {}).program()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProgramError(f"The dump is damaged: {type(error).__name__} {one_line(error)}.") from error


class _Reader:
    def __init__(
        self,
        name: str,
        lines: list[str],
        tables: Mapping[str, ast.expr],
        functions: Mapping[str, ast.FunctionDef],
        tensors: Mapping[str, TensorRef],
        large: Mapping[str, torch.Tensor],
    ) -> None:
        self.name, self.lines, self.functions = name, lines, functions
        self.tensors, self.large_constants = tensors, large
        self.tables = {
            key: parse_literal(value, self._reject_name)
            for key, value in tables.items()
            if key in ("SYMBOLS", "INPUTS", "OUTPUTS", "CALLING", "CONSTANTS")
        }

    @staticmethod
    def _reject_name(name: str) -> Any:
        raise ProgramError(f"The tables of the dump contain the unknown name {name}.")

    def program(self) -> Program:
        bindings = self._bindings()
        graph = self._graph("forward")
        symbols = self.tables["SYMBOLS"].items()
        fakes = FakeValues([Symbol(name, low, high, example) for name, (low, high, example) in symbols])
        values = [
            fakes.tensor(getattr(torch, row.dtype), row.shape) if row.is_tensor else row.value for row in bindings.ins
        ]
        fakes.propagate(graph, values)
        in_spec, out_spec, arg_names = self.tables["CALLING"]
        output_names = [row.name for row in bindings.outs if row.alias is None]
        calling = CallSpec(_spec(in_spec, []), _spec(out_spec, output_names), tuple(arg_names))
        return Program(self.name, graph, bindings, self._refs(bindings), fakes.symbols, calling, Facts())

    def _bindings(self) -> Bindings:
        rows = [
            Binding(name, Role(role), target, dtype, tuple(shape), None, persistent, value, *below)
            for name, (role, target, dtype, shape, persistent, value, *below) in self.tables["INPUTS"].items()
        ]
        for name, (target, dtype, shape, of, why) in self.tables["OUTPUTS"].items():
            alias = Alias(of, why) if of is not None else None
            rows.append(Binding(name, Role.OUTPUT, target, dtype, tuple(shape), alias))
        return Bindings(tuple(rows))

    def _refs(self, bindings: Bindings) -> dict[str, TensorRef]:
        refs: dict[str, TensorRef] = {}
        for row in bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
            if row.name in self.tables["CONSTANTS"]:
                held = self.tables["CONSTANTS"][row.name]
                if held is None and row.name not in self.large_constants:
                    raise ProgramError(
                        f"The value of {row.target} is missing.", "Keep the .safetensors file of a dump in its folder."
                    )
                value = (
                    self.large_constants[row.name]
                    if held is None
                    else torch.tensor(held[0], dtype=held[1]).reshape(held[2])
                )
                refs[row.name] = InMemoryTensor(value)
            else:
                refs[row.name] = self.tensors.get(row.name) or MissingTensor(row.target)
        return refs

    def _graph(self, name: str) -> fx.Graph:
        definition = self.functions[name]
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        for arg in definition.args.args:
            nodes[arg.arg] = graph.placeholder(arg.arg)
            nodes[arg.arg].name = arg.arg
        children: dict[str, fx.GraphModule] = {}

        def lookup(used: str) -> fx.Node:
            if used not in nodes and used in self.functions:
                target = used.removeprefix(f"{name}__")
                inner = self._graph(used)
                children[target] = fx.GraphModule(inner.owning_module or torch.nn.Module(), inner)
                attach_subgraphs(graph, children)
                nodes[used] = graph.get_attr(target)
            if used not in nodes:
                raise ProgramError(f"{name} in the dump reads {used} before it is computed.", suggest(used, nodes))
            return nodes[used]

        attach_subgraphs(graph, {})
        for statement in definition.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=result)], value=ast.Call() as call):
                    args = tuple(parse_literal(arg, lookup) for arg in call.args)
                    kwargs = {str(word.arg): parse_literal(word.value, lookup) for word in call.keywords}
                    target = find_target(ast.unparse(call.func))
                    node = graph.create_node("call_function", target, args, kwargs, name=result)
                    node.meta.update(self._meta(statement))
                    nodes[result] = node
                case ast.Return(value=value) if value is not None:
                    graph.output(parse_literal(value, lookup))
                case _:
                    raise ProgramError(f"Line {statement.lineno} of the dump is not a statement of the text form.")
        return graph

    def _meta(self, statement: ast.stmt) -> dict[str, str]:
        tail = self.lines[(statement.end_lineno or statement.lineno) - 1].encode()[statement.end_col_offset or 0 :]
        parts = [part.strip() for part in tail.decode().lstrip(" #").split("|")]
        found = dict(zip((SOURCE, MODULE), parts[1:], strict=False))
        return {key: value for key, value in found.items() if value}


def _spec(text: str, names: list[str]) -> Any:
    """Return a pytree spec; for a class that is not imported, return a dict of the outputs by name."""
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError:
        return pytree.tree_structure(dict.fromkeys(names, 0))
