"""Programs from bare FX graphs, such as torch.export, AOTAutograd or another compiler's pass manager hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx
from torch.utils._pytree import tree_leaves, tree_structure

from inlay.errors import TransformError
from inlay.program.bindings import Bindings, Role
from inlay.program.exported_program import free_symbols, select_meta
from inlay.program.facts import Facts
from inlay.program.graphs import TypeFormatter, all_nodes, copy_graph, subgraphs, target_text, written_operands
from inlay.program.program import CallSpec, Program, Symbol
from inlay.program.symbols import FakeValues

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.export import ExportedProgram


def import_graph(
    graph: fx.Graph | fx.GraphModule | ExportedProgram, name: str, symbols: Mapping[str, Symbol] | None = None
) -> Program:
    """Return a program in which every placeholder is an input. The graph is copied.

    `symbols` are the names and ranges of dynamic sizes; others keep the names that torch gave them.
    """
    module: Any = graph.owning_module if isinstance(graph, fx.Graph) else getattr(graph, "graph_module", graph)
    made = copy_graph(graph.graph if not isinstance(graph, fx.Graph) else graph)
    for node in all_nodes(made):
        node.meta = select_meta(node)
    fakes, nested = FakeValues.from_graph(made), {target for target, _ in subgraphs(made)}
    known = symbols or {}
    table = {raw: known.get(raw, Symbol(raw, 0, None, size)) for raw, (_, size) in free_symbols(made).items()}
    types, rows = TypeFormatter({raw: symbol.name for raw, symbol in table.items()}), []
    for node in made.nodes:
        if written_operands(node):
            raise TransformError(
                f"{node.name} ({target_text(node.target)}) writes in place, but {name} requires a functional graph.",
                "Run torch.export and run_decompositions({}) first.",
            )
        if node.op == "get_attr" and node.target not in nested and "val" not in node.meta:
            node.meta["val"] = fakes.mode.from_tensor(find_attribute(module, node.target), static_shapes=True)
        if node.op == "placeholder":
            rows.append(types.binding(node.name, Role.INPUT, node.meta.get("val")))
    names = tuple(row.name for row in rows)
    results = next(iter(reversed(made.nodes))).args[0]
    for index, value in enumerate(tree_leaves(results)):
        held = value.meta.get("val") if isinstance(value, fx.Node) else value
        rows.append(types.binding(f"output.{index}", Role.OUTPUT, held))
    calling = CallSpec(tree_structure((names, {})), tree_structure(results), names)
    return Program(name, made, Bindings(tuple(rows)), {}, table, calling, Facts())


def find_attribute(module: Any, path: str) -> Any:
    """Return the attribute of a module that a dotted path names."""
    for part in path.split("."):
        if not hasattr(module, part):
            raise TransformError(f"The graph reads {path}, which its module does not have.", "Pass a GraphModule.")
        module = getattr(module, part)
    return module
