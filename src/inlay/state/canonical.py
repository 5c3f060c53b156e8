"""Updates in canonical form: each write is an `index_put` into the whole state, one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from inlay.state.indices import Indexer
from inlay.state.updates import State, recognise
from inlay.state.wrapped import is_wrapper

if TYPE_CHECKING:
    from inlay.program.program import Program


def canonical_updates(program: Program) -> tuple[Program, list[str]]:
    """A program in which every eligible update that can be is a chain of `index_put`, and which states those are."""
    made = program.copy()
    moved: dict[fx.Node, fx.Node] = {}
    states = [state for state in recognise(made) if state.eligible and _needs_it(state)]
    done = [state.binding.name for state in states if _rewrite(made.graph, state, moved)]
    made.graph.eliminate_dead_code()  # what was replaced, and what was begun for a state that cannot be
    return made, done


def _needs_it(state: State) -> bool:
    """Not when every write is one to the whole state that compilers know: rows of it, or all of it by one kernel."""
    if any(write.place.views for write in state.writes):
        return True
    names = {write.target._schema.name for write in state.writes}
    return not names <= {"aten::index_put_", "aten::index_copy_"} and names != {"aten::copy_"}


def _rewrite(graph: fx.Graph, state: State, moved: dict[fx.Node, fx.Node]) -> bool:
    """Replace the updates of one state; `moved` knows what became of values of states before, which it may read."""
    base = next(node for node in graph.nodes if node.name == state.binding.name)
    now = [base]
    for write in state.writes:
        if is_wrapper(write.at):
            return False
        with graph.inserting_before(write.node.next):
            try:
                args = fx.map_arg(write.args, lambda node: moved.get(node, node))
                put = Indexer(graph, write.node.next).put(now[-1], replace(write, args=args))
            except (LookupError, RuntimeError):  # a size that has no name here, or that depends on data
                put = None
        if put is None:
            return False
        now.append(put)
    puts = set(now[1:])  # what they put may be a value that the state then holds
    for node, (place, count) in state.versions.items():
        if node is base or not node.users:
            continue
        at: Any = now[count]
        if place.views:
            after = at if at is not base and at > node else node
            with graph.inserting_before(after.next):
                indexer = Indexer(graph, node)
                for view in place.views:
                    at = indexer.call(view.target, at, *view.args)
        node.replace_all_uses_with(at, lambda user: user not in puts, propagate_meta=False)
        moved[node] = at
    output = graph.output_node()
    values: Any = list(output.args[0])  # type: ignore[arg-type]
    values[state.position] = now[-1]
    output.args = (tuple(values),)
    return True
