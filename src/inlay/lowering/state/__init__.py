"""Programs whose state is written in place, with reasons where it is not."""

from inlay.lowering.state.buffers import inline_lifted_buffers, lift_mutated_buffers, zero_state
from inlay.lowering.state.declared_aliases import declare_aliases
from inlay.lowering.state.in_place_writes import InPlaceProgram, copy_remarks, write_in_place
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.lowering.state.state_copies import find_compiled_copies, find_eager_copies

__all__ = [
    "InPlaceProgram",
    "canonicalize_updates",
    "copy_remarks",
    "declare_aliases",
    "find_compiled_copies",
    "find_eager_copies",
    "inline_lifted_buffers",
    "lift_mutated_buffers",
    "write_in_place",
    "zero_state",
]
