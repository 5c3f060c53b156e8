"""The signature of a decoder: names of its inputs and its output. Manifests store it and loading compares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.program.bindings import Role

if TYPE_CHECKING:
    from inlay.program.bindings import Bindings


@dataclass(frozen=True)
class DecoderSignature:
    """The names of the inputs and the output of a decoder."""

    tokens: str = "input_ids"
    """Token ids, `[batch, length]`."""
    slots: str = "slots"
    """The KV cache slot of each sequence, `[batch]`."""
    lengths: str = "lengths"
    """The number of filled rows in the slot of each sequence, `[batch]`."""
    logits: str = "logits"
    """Logits of the next token."""


SIGNATURE = DecoderSignature()


def is_stateless_decoder(bindings: Bindings) -> bool:
    """Whether a captured program takes only tokens and returns only logits, so that a KV cache can be inserted."""
    inputs = [row.target for row in bindings.with_role(Role.INPUT)]
    return inputs == [SIGNATURE.tokens] and [row.name for row in bindings.outs] == [SIGNATURE.logits]


def has_kv_cache(bindings: Bindings) -> bool:
    """Whether a KV cache was inserted: tokens, slots and lengths are inputs."""
    return {SIGNATURE.tokens, SIGNATURE.slots, SIGNATURE.lengths} <= {row.target for row in bindings.ins}
