"""The Program: graph, binding table, text form, folds and diffs."""

from inlay.program.bindings import Alias, Binding, Bindings, Role
from inlay.program.facts import Fact, Facts
from inlay.program.program import Program, Symbol

__all__ = ["Alias", "Binding", "Bindings", "Fact", "Facts", "Program", "Role", "Symbol"]
