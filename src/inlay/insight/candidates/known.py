"""Known shapes: every transform that puts one call in the place of several describes a kernel.

All of them run on a copy, switched on or not. What each would take in is a region; the program that comes out is where
the search for unknown shapes goes on, so that nothing is found twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from inlay.config import resolve
from inlay.insight.candidates.region import Region
from inlay.insight.candidates.work import Work, is_kernel, short, work_of
from inlay.program.graphs import all_nodes, operands
from inlay.transforms import Stage, configure, registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.program.program import Program
    from inlay.transforms import Applied, Transform

_STAGES = (Stage.CLEAN, Stage.CANONICALIZE, Stage.FUSE)
_FAMILIES = {
    Work.REDUCTION: "norm chain",
    Work.POINTWISE: "elementwise chain",
    Work.ROTATION: "elementwise chain",
    Work.STENCIL: "elementwise chain",
    Work.ATTENTION: "attention neighbours",
}


def known_regions(program: Program) -> tuple[Program, list[Region], dict[str, frozenset[str]]]:
    """The program with every known shape replaced, the regions that were, and what became what.

    The last is the name of a call that is new → the names of the program's own calls it stands for.
    """
    regions: list[Region] = []
    stands_for: dict[str, frozenset[str]] = {}
    for step in _steps():
        applied = step.apply(program.copy())
        if not applied.sites:
            continue
        if step.stage is Stage.CLEAN:
            program = applied.program
            continue
        found = _regions(step, program, applied, stands_for)
        if found:
            program = applied.program
            regions += found
    return program, regions, stands_for


def _steps() -> Sequence[Transform]:
    """One of each transform, in the order of a build; those that the configuration does not name come last."""
    steps = [type(step.transform) for step in configure(resolve())]
    steps += [cls for cls in registry().values() if cls not in steps]
    order = list(Stage)
    wanted = [cls for cls in steps if cls.stage in _STAGES and not cls.adds_inputs]
    return [cls() for cls in sorted(dict.fromkeys(wanted), key=lambda cls: order.index(cls.stage))]


def _regions(step: Transform, before: Program, applied: Applied, stands_for: dict[str, frozenset[str]]) -> list[Region]:
    """What a transform took in at each site; nothing where it does not make one kernel of several."""
    old = {node.name: node for node in all_nodes(before.graph)}
    new = [node for node in all_nodes(applied.program.graph) if node.name not in old and is_kernel(node)]
    made = [node for node in new if work_of(node) in _FAMILIES]
    if len(made) != len(applied.places) or len(new) != len(made):
        return []
    gone = old.keys() - {node.name for node in all_nodes(applied.program.graph)}
    order = {name: index for index, name in enumerate(old)}
    regions, claimed = [], set[fx.Node]()
    for place, node in zip(sorted(applied.places, key=order.__getitem__), made, strict=True):
        nodes = _taken(old[place], gone, claimed)
        claimed.update(nodes)
        calls = frozenset[str]().union(*(stands_for.get(each.name, frozenset({each.name})) for each in nodes))
        stands_for[node.name] = calls
        inside = tuple(sorted(nodes, key=lambda each: order[each.name]))
        family = _FAMILIES[work_of(node)]
        regions.append(Region(family, short(node), (short(node),), inside, calls, node, step.name))
    return [region for region in regions if len(region.kernels) > 1]


def _taken(root: fx.Node, gone: set[str], claimed: set[fx.Node]) -> set[fx.Node]:
    """A site's output and what it is computed from, as far as that is gone and no earlier site's."""
    found, todo = set[fx.Node](), [root]
    while todo:
        node = todo.pop()
        if node not in found and node not in claimed and (node is root or node.name in gone):
            found.add(node)
            todo.extend(operands(node))
    return found
