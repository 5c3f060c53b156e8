"""Program: the representation that all stages take and return."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_structure

from inlay.program.bindings import Bindings, Role
from inlay.program.graphs import TypeFormatter, all_nodes, copy_graph, op_counts

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    import torch
    from torch import fx
    from torch.export import ExportedProgram

    from inlay.program.facts import Facts
    from inlay.program.weights import TensorRef


@dataclass(frozen=True)
class Symbol:
    """A size that is only known at run time: its display name and the range it was captured for."""

    name: str
    low: int
    high: int | None
    example: int = 2
    """The size at capture, which is used again to compute types when a dump is read."""
    limited_by: str = field(default="", compare=False)
    """The option that `high` comes from, for messages."""

    @property
    def range_text(self) -> str:
        """The range as text.

        >>> Symbol("batch", 1, None).range_text, Symbol("length", 1, 8192).range_text
        ('1 … ∞', '1 … 8192')
        """
        return f"{self.low} … {'∞' if self.high is None else self.high}"


@dataclass(frozen=True)
class CallSpec:
    """How flat bindings map to the arguments and results of the model's `forward` (pytree specs)."""

    in_spec: Any
    out_spec: Any
    arg_names: tuple[str, ...]

    @classmethod
    def flat(cls, arg_names: Sequence[str], output_count: int) -> CallSpec:
        """Return the call of a function that takes these positional arguments and returns a tuple."""
        in_spec, out_spec = tree_structure((tuple(arg_names), {})), tree_structure(tuple(range(output_count)))
        return cls(in_spec, out_spec, tuple(arg_names))


@dataclass(frozen=True, eq=False)
class Program:
    """A graph, its binding table and references to its weights.

    The graph is functional ATen. Treat a Program that you did not create as read-only and copy it. `copy` is cheap,
    because weights are references and the values on nodes are shared.
    """

    name: str
    graph: fx.Graph
    bindings: Bindings
    tensors: Mapping[str, TensorRef]
    """Binding name → reference to its value, for every parameter, buffer and constant."""
    symbols: Mapping[str, Symbol]
    """Symbol in the graph's shapes (`s72`) → its display name and its range."""
    call_spec: CallSpec
    facts: Facts
    types: TypeFormatter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", TypeFormatter({raw: symbol.name for raw, symbol in self.symbols.items()}))

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self)} nodes, {len(self.bindings)} bindings>"

    def __len__(self) -> int:
        """Return the number of nodes without `getitem`, which only selects a result of a call."""
        return sum(1 for node in all_nodes(self.graph) if node.target is not operator.getitem)

    @classmethod
    def from_graph(cls, graph: fx.Graph | fx.GraphModule | ExportedProgram, name: str = "graph") -> Program:
        """Return a program of a functional ATen graph with `meta["val"]`. Every placeholder is an input.

        >>> import torch
        >>> exported = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(3, 4),))
        >>> Program.from_graph(exported.graph)
        <Program graph: 5 nodes, 4 bindings>
        """
        from inlay.program.graph_import import import_graph

        return import_graph(graph, name)

    def copy(self) -> Program:
        """Return the same program with a copied graph; weights are not copied."""
        return replace(self, graph=copy_graph(self.graph))

    def op_counts(self) -> Counter[str]:
        """Return the number of calls of each operator, including nested graphs."""
        return op_counts(self.graph)

    def parameter_count(self) -> int:
        """Return the number of parameter values, with tied weights counted once."""
        return sum(row.numel for row in self.bindings.with_role(Role.PARAMETER))

    def to_exported(self) -> ExportedProgram:
        """Return an ExportedProgram with the weights bound, for eager runs, saving and compiling."""
        from inlay.program.exported_program import to_exported

        return to_exported(self)

    def module(self) -> torch.nn.Module:
        """Return a callable that runs this program eagerly, with the signature of the captured model."""
        module: torch.nn.Module = self.to_exported().module(check_guards=False)
        return module
