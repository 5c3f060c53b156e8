"""State that a program updates: which bindings, in what form, whether in place, and if not why."""

from inlay.state.buffers import inline_lifted_buffers, lift_mutated_buffers, zeros
from inlay.state.canonical import canonical_updates
from inlay.state.copied import under_compilers, under_eager
from inlay.state.declared import declare
from inlay.state.in_place import InPlace, in_place, remarks_on
from inlay.state.updates import State, Write, recognise

__all__ = [
    "InPlace",
    "State",
    "Write",
    "canonical_updates",
    "declare",
    "in_place",
    "inline_lifted_buffers",
    "lift_mutated_buffers",
    "recognise",
    "remarks_on",
    "under_compilers",
    "under_eager",
    "zeros",
]
