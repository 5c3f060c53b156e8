"""The full text form of a program: importable Python with one statement for each node. `parser.load` reads it back.

    aten = torch.ops.aten
    def forward(p_weight, x):
        linear = aten.linear.default(x, p_weight)  # f32[batch, 8] | model.py:12 | layers.0
        return (linear,)

As Python code, `forward` takes the bindings in order and runs the program. Reading it back executes nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inlay.errors import ProgramError, one_line
from inlay.program.bindings import Role
from inlay.program.gc_pause import pause_gc
from inlay.program.graphs import MODULE, SOURCE, all_graphs, all_nodes, nested_name, subgraphs, target_text
from inlay.program.text.literals import literal, namespace, registering_module
from inlay.program.weights import InMemoryTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from inlay.program.program import Program

FORMAT_VERSION = 1
HEADER = "# inlay program"
MAX_INLINE_VALUES = 4096
"""Constants of at most this many values are written into the text, larger ones into a separate file."""


@pause_gc()
def dump(program: Program) -> str:
    """Return the whole program as Python source.

    Constants of more than `MAX_INLINE_VALUES` values are omitted; `save` writes them to a separate file.
    """
    return "\n".join(_lines(program)) + "\n"


def save(program: Program, path: Path | str) -> list[Path]:
    """Write the text form to `path` and large constants to a `.safetensors` file; return the written files.

    Files that are not dumps are never overwritten.
    """
    path = Path(path)
    if path.is_dir() or not path.name:
        raise ProgramError(f"{path} is a folder.", "Pass a file name.")
    beside = path.with_suffix(".safetensors")
    large = {row: value for row, value in _constants(program).items() if value.numel() > MAX_INLINE_VALUES}
    for file in (path, beside) if large else (path,):
        _check_overwrite(file, path)
    text = dump(program)
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if large:
            from safetensors.torch import save_file

            tensors = {name: value.contiguous() for name, value in large.items()}
            save_file(tensors, beside, metadata={"inlay": path.name})
        path.write_text(text)
    return [path, beside] if large else [path]


def save_text(text: str, path: Path | str) -> Path:
    """Write another text form, such as the folded one; files that are not dumps are never overwritten."""
    path = Path(path)
    _check_overwrite(path, path)
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProgramError(f"{path} cannot be written: {one_line(error)}.", "Choose another path.") from error


def _check_overwrite(file: Path, dump_file: Path) -> None:
    if not file.exists():
        return
    if file.is_file():
        if file == dump_file:
            with file.open("rb") as opened:
                if opened.read(len(HEADER)) == HEADER.encode():
                    return
        else:
            from safetensors import safe_open

            try:
                with safe_open(file, framework="pt") as opened_tensors:
                    if "inlay" in (opened_tensors.metadata() or {}):
                        return
            except Exception:  # noqa: S110 - not a file of a dump
                pass
    raise ProgramError(f"{file} exists and is not an Inlay dump.", "Choose another name, or remove the file.")


def _constants(program: Program) -> dict[str, torch.Tensor]:
    """Return the values that are in no file, which the dump must contain."""
    rows = program.bindings.with_role(Role.BUFFER, Role.CONSTANT)
    refs = {row.name: program.tensors[row.name] for row in rows}
    return {name: ref.tensor for name, ref in refs.items() if isinstance(ref, InMemoryTensor)}


def _lines(program: Program) -> Iterator[str]:
    yield f"{HEADER} {FORMAT_VERSION}: {program.name}"
    targets = [node.target for node in all_nodes(program.graph) if node.op == "call_function"]
    spaces = sorted({namespace(target) for target in [*targets, *_operators_as_arguments(program)]})
    yield from _imports(targets, spaces)
    yield ""
    symbols = ", ".join(f"{s.name!r}: ({s.low}, {s.high}, {s.example})" for s in program.symbols.values())
    yield f"SYMBOLS = {{{symbols}}}  # name: (min, max, size at capture)"
    yield "INPUTS = {  # placeholder: (role, name in the model, dtype, shape, stored in checkpoints, value if a number)"
    for row in program.bindings.ins:
        bound = () if row.below is None else (row.below,)
        fields = (row.role.value, row.target, row.dtype, row.shape, row.persistent, row.value, *bound)
        yield f"    {row.name!r}: {literal(fields)},"
    yield "}"
    yield "OUTPUTS = {  # name: (name in the model, dtype, shape, aliased binding, kind of alias)"
    for row in program.bindings.outs:
        alias = (row.alias.binding, row.alias.kind) if row.alias else (None, None)
        yield f"    {row.name!r}: ({row.target!r}, {row.dtype!r}, {row.shape!r}, {alias[0]!r}, {alias[1]!r}),"
    yield "}"
    calling = program.call_spec
    specs = (pytree.treespec_dumps(calling.in_spec), pytree.treespec_dumps(calling.out_spec))
    yield f"CALLING = ({specs[0]!r}, {specs[1]!r}, {calling.arg_names!r})"
    yield "CONSTANTS = {"
    for name, value in _constants(program).items():
        yield f"    {name!r}: {_constant_text(value)},"
    yield "}"
    graphs = list(all_graphs(program.graph))
    for name, graph in reversed(graphs):
        yield ""
        yield ""
        yield from _function(
            program, name, graph, {target: nested_name(name, target) for target, _ in subgraphs(graph)}
        )


def _operators_as_arguments(program: Program) -> Iterator[object]:
    """Yield operators that are arguments, as of wrappers such as `auto_functionalized`."""
    for node in all_nodes(program.graph):
        for value in pytree.tree_leaves((node.args, dict(node.kwargs))):
            if isinstance(value, torch._ops.OpOverload):
                yield value


def _imports(targets: Sequence[object], spaces: list[str]) -> Iterator[str]:
    if "math" in spaces:
        yield "import math"
    yield "from math import inf, nan"
    for module in sorted({"operator", "builtins"} & set(spaces)):
        yield f"import {module}"
    yield ""
    yield "import torch"
    for module in sorted({registering_module(target) for target in targets} - {""}):
        yield f"import {module}  # registers operators"
    yield ""
    for space in spaces:
        if space not in ("math", "operator", "builtins", "torch"):
            yield f"{space} = torch.ops.{space}"


def _constant_text(value: torch.Tensor) -> str:
    if value.numel() > MAX_INLINE_VALUES:
        return f"None  # {tuple(value.shape)}: in the .safetensors file of this dump"
    exact = value.to(torch.float64) if value.is_floating_point() else value
    return f"({literal(exact.tolist())}, {value.dtype}, {list(value.shape)})"


def _function(program: Program, name: str, graph: fx.Graph, nested: Mapping[str, str]) -> Iterator[str]:
    parameters = [node.name for node in graph.nodes if node.op == "placeholder"]
    yield f"def {name}("
    for parameter in parameters:
        yield f"    {parameter},"
    yield "):"
    renamed = {node: nested[node.target] for node in graph.nodes if node.op == "get_attr" and node.target in nested}

    def name_of(node: fx.Node) -> str:
        return renamed.get(node, node.name)

    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [literal(arg, name_of) for arg in node.args]
            arguments += [f"{key}={literal(value, name_of)}" for key, value in node.kwargs.items()]
            code = f"    {node.name} = {target_text(node.target)}({', '.join(arguments)})"
            comment = _node_comment(program, node)
            yield f"{code}  # {comment}" if comment else code
        elif node.op == "output":
            yield f"    return {literal(node.args[0], name_of)}"
        elif node.op != "placeholder" and node not in renamed:
            raise ProgramError(f"{node.name} ({node.op} {node.target}) has no text form.")


def _node_comment(program: Program, node: fx.Node) -> str:
    """Return the comment of a statement: type, source line and module of its node."""
    type_text = program.types.text(node.meta.get("val"))
    parts = [type_text, node.meta.get(SOURCE, ""), node.meta.get(MODULE, "")]
    while parts and not parts[-1]:
        parts.pop()
    return " | ".join(parts)
