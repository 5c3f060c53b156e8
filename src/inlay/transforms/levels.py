"""For which level of graphs someone's pass is written, as far as it can be told, when it changed nothing.

Inlay runs a pass on the captured program, where `linear`, `silu`, attention and norms are whole operators. Passes of
Inductor run on the post-grad graph, where these are decomposed: a pattern for it matches nothing here, in any model.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.program.graphs import all_nodes, target_text
from inlay.rewrite.trees import called_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.program.program import Program

_LEVEL = "It ran on the captured program, where linear, silu, attention and norms are whole operators"
_REMEDY = (
    "For Inductor's post-grad graph, give it to torch.compile (options post_grad_custom_post_pass);"
    " `inlay.testing.post_grad_graphs` shows that graph"
)
_SHOWN = 6


def level_notes(source: Any, program: Program) -> list[str]:
    """Why a pass that changed nothing may belong to another level of graphs."""
    patterns = [pattern for each in _collections(source) for pattern in _patterns(each)]
    if not patterns:
        by_form = callable(source) and takes_graph(source)
        return [f"It takes a graph, as Inductor's post-grad passes do. {_LEVEL}. {_REMEDY}."] if by_form else []
    there = {node.target for node in all_nodes(program.graph)}
    absent = [[calls for calls in called_by(each) if there.isdisjoint(calls)] for each in patterns]
    impossible = [each for each in absent if each]
    if not impossible:
        return []
    names = sorted({" or ".join(sorted(map(target_text, calls))[:2]) for each in impossible for calls in each})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    lacks = f"the program does not call {', '.join(names[:_SHOWN])}{more} at all"
    return [f"{len(impossible)} of its {len(patterns)} patterns cannot match: {lacks}. {_LEVEL}. {_REMEDY}."]


def takes_graph(found: Any) -> bool:
    """Whether a pass works on an `fx.Graph`: Inductor's passes do, and say so by a `uuid` or by annotation."""
    if callable(getattr(found, "uuid", None)):
        return True
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return False
    said = parameters[0].annotation if parameters else None
    return said is fx.Graph or (isinstance(said, str) and said.rpartition(".")[2] == "Graph")


def _collections(source: Any) -> Iterator[Any]:
    """The collections of patterns that a pass is, holds, or names in its code."""
    held = [source, *getattr(source, "__dict__", {}).values()]
    code = getattr(source, "__code__", None)
    if code is not None:
        cells = inspect.getclosurevars(source)
        held += [*cells.nonlocals.values(), *cells.globals.values()]
    seen: set[int] = set()
    for each in held:
        if id(each) not in seen and isinstance(getattr(each, "patterns", None), dict) and hasattr(each, "apply"):
            seen.add(id(each))
            yield each


def _patterns(collection: Any) -> Iterator[Any]:
    for entries in collection.patterns.values():
        for entry in entries if isinstance(entries, list) else ():
            if hasattr(entry, "pattern"):
                yield entry.pattern
