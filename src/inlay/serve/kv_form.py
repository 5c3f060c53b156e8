"""KV-cache events in the form that vLLM publishes and existing routers read.

Read in vLLM's source (vllm/distributed/kv_events.py, versions from April 2025 to August 2026) and in Dynamo's reader of
it (lib/kv-router/src/zmq_wire):

- A payload is msgpack, `[time, [events], rank]`, in every version.
- An event is an array up to June 2026, `[type, fields…]`, and a map with the key `type` since. Fields, in the order of
  the array: `BlockStored` block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium (since September
  2025), lora_name (since December 2025); `BlockRemoved` block_hashes, medium; `AllBlocksCleared` none.
- Later fields (extra_keys, group_idx, locality, …) may be left out; Inlay has nothing to say in them.
- `BlockStored` holds a run of blocks, each of which follows the one before it.
- Media are `GPU`, `CPU` and `STORAGE`; Dynamo ignores blocks on others.

Routers hash the tokens themselves. vLLM names a salt only in extra_keys of the first block, which routers may not read:
they would take a salted block for a plain one and send a request to where it cannot be used. So blocks with a salt
stay off the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError, nearest
from inlay.runtime.kv.events import Cleared, Created, Removed, Replica, Stored, Updated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inlay.runtime.kv.events import Event

MEDIA = ("GPU", "CPU", "STORAGE")
"""What levels are called on the wire, whatever they are made of: the first is where sequences are computed."""
FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
ENCODINGS = ("map", "array")
CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


class Form:
    """What a router is told about one cache. It knows the blocks: the wire asks for the tokens of one that moved.

    >>> form = Form(block_size=2)
    >>> stored = Stored(None, 7, (1, 2), "", 0, 0), Stored(7, 8, (3, 4), "", 0, 0), Stored(None, 9, (1, 2), "me", 0, 0)
    >>> form.told(stored)  # doctest: +NORMALIZE_WHITESPACE
    [{'type': 'BlockStored', 'block_hashes': [7, 8], 'parent_block_hash': None, 'token_ids': [1, 2, 3, 4],
      'block_size': 2, 'lora_id': None, 'medium': 'GPU', 'lora_name': None}]
    >>> form.told([Removed(8, 0), Removed(9, 0), Updated(7, priority=(0, 1))]), form.withheld
    ([{'type': 'BlockRemoved', 'block_hashes': [8], 'medium': 'GPU'}], 1)
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.withheld = 0
        """Stored blocks that were not told of, because they have a salt."""
        self._replica = Replica()

    def told(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Events as maps. A block that moved is removed from one medium and stored in another. Priorities are not told."""
        made: list[dict[str, Any]] = []
        for event in events:
            known = self._replica.blocks.get(event.hash) if isinstance(event, Removed | Updated) else None
            self._replica.apply(event)
            match event:
                case Created() | Cleared():
                    made.append(CLEARED)
                case Stored():
                    self._add_stored(made, event)
                case Removed() if known is not None:
                    _add_removed(made, known)
                case Updated(level=(_, _)) if known is not None:
                    _add_removed(made, known)
                    self._add_stored(made, self._replica.blocks[event.hash], again=True)
                case _:
                    pass
        return made

    def whole(self, blocks: Iterable[Stored] | None = None) -> list[dict[str, Any]]:
        """All that is held, for one who knows nothing, or wrong things; with `blocks`, these are held from now on."""
        if blocks is not None:
            self._replica = Replica(blocks)
        made = [CLEARED]
        for block in self._replica.blocks.values():
            self._add_stored(made, block, again=blocks is None)
        return made

    def _add_stored(self, made: list[dict[str, Any]], block: Stored, again: bool = False) -> None:
        if block.salt:
            self.withheld += not again
            return
        medium, last = _medium(block), made[-1] if made else CLEARED
        if last["type"] == "BlockStored" and last["medium"] == medium and last["block_hashes"][-1] == block.parent:
            last["block_hashes"].append(block.hash)
            last["token_ids"].extend(block.tokens)
            return
        values = ([block.hash], block.parent, list(block.tokens), self.block_size, None, medium, None)
        made.append({"type": "BlockStored"} | dict(zip(FIELDS["BlockStored"], values, strict=True)))


def _add_removed(made: list[dict[str, Any]], block: Stored) -> None:
    if block.salt:
        return
    medium, last = _medium(block), made[-1] if made else CLEARED
    if last["type"] == "BlockRemoved" and last["medium"] == medium:
        last["block_hashes"].append(block.hash)
    else:
        made.append({"type": "BlockRemoved", "block_hashes": [block.hash], "medium": medium})


def _medium(block: Stored) -> str:
    return MEDIA[min(block.level, len(MEDIA) - 1)]


def encoded(events: Sequence[dict[str, Any]], encoding: str) -> list[Any]:
    """Events in one of the two encodings.

    >>> encoded([{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}], "array")
    [['BlockRemoved', [7], 'GPU']]
    """
    if encoding not in ENCODINGS:
        raise UsageError(f"There is no encoding {encoding!r}.", nearest(encoding, ENCODINGS) or "Take map or array.")
    return list(events) if encoding == "map" else [list(event.values()) for event in events]


def decoded(event: Any) -> dict[str, Any]:
    """An event of either encoding as a map. Fields that Inlay does not know are kept in a map and left out of an array.

    >>> decoded(["BlockRemoved", [7], "GPU"]) == decoded({"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"})
    True
    """
    if isinstance(event, dict):
        return event
    type_, *values = event
    return {"type": type_} | dict(zip(FIELDS.get(type_, ()), values, strict=False))
