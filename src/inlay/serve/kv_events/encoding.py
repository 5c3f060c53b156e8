"""Encoding of cache events to the wire format.

Routers hash the tokens themselves, with the salt. vLLM puts it into `extra_keys` of the first block of a prompt, which
llm-d reads; Dynamo reads `cache_salt` of every event, and only if events are maps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.runtime.kv.events import CacheMirror, ClearedEvent, CreatedEvent, RemovedEvent, StoredEvent, UpdatedEvent
from inlay.serve.kv_events.wire_format import CLEARED_EVENT, FIELDS, MEDIA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.runtime.kv.events import CacheEvent


class WireEncoder:
    """Encodes the events of one cache. It mirrors the blocks, because the wire needs the tokens of a moved block.

    >>> told = WireEncoder(block_size=2)
    >>> stored = StoredEvent(None, 7, (1, 2), "", 0, 0), StoredEvent(7, 8, (3, 4), "", 0, 0)
    >>> stored = *stored, StoredEvent(None, 9, (1, 2), "me", 0, 0)
    >>> told.encode(stored)  # doctest: +NORMALIZE_WHITESPACE
    [{'type': 'BlockStored', 'block_hashes': [7, 8], 'parent_block_hash': None, 'token_ids': [1, 2, 3, 4],
      'block_size': 2, 'lora_id': None, 'medium': 'GPU', 'lora_name': None},
     {'type': 'BlockStored', 'block_hashes': [9], 'parent_block_hash': None, 'token_ids': [1, 2],
      'block_size': 2, 'lora_id': None, 'medium': 'GPU', 'lora_name': None, 'extra_keys': [['me']], 'cache_salt': 'me'}]
    >>> told.encode([RemovedEvent(8, 0), RemovedEvent(9, 0), UpdatedEvent(7, priority=(0, 1))])
    [{'type': 'BlockRemoved', 'block_hashes': [8, 9], 'medium': 'GPU'}]
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._replica = CacheMirror()

    def encode(self, events: Iterable[CacheEvent]) -> list[dict[str, Any]]:
        """Return events as maps. A move is encoded as a removal and a store. Priorities are not published."""
        made: list[dict[str, Any]] = []
        for event in events:
            known = self._replica.blocks.get(event.hash) if isinstance(event, RemovedEvent | UpdatedEvent) else None
            self._replica.apply(event)
            match event:
                case CreatedEvent() | ClearedEvent():
                    made.append(CLEARED_EVENT)
                case StoredEvent():
                    self._add_stored(made, event)
                case RemovedEvent() if known is not None:
                    _add_removed(made, known)
                case UpdatedEvent(level=(_, _)) if known is not None:
                    _add_removed(made, known)
                    self._add_stored(made, self._replica.blocks[event.hash])
        return made

    def encode_snapshot(self, blocks: Iterable[StoredEvent] | None = None) -> list[dict[str, Any]]:
        """Return a clear event followed by all stored blocks. With `blocks`, they replace the mirrored ones first."""
        if blocks is not None:
            self._replica = CacheMirror(blocks)
        made = [CLEARED_EVENT]
        for block in self._replica.blocks.values():
            self._add_stored(made, block)
        return made

    def _add_stored(self, made: list[dict[str, Any]], block: StoredEvent) -> None:
        medium, last = _medium(block), made[-1] if made else CLEARED_EVENT
        if last["type"] == "BlockStored" and last["medium"] == medium and last["block_hashes"][-1] == block.parent:
            last["block_hashes"].append(block.hash)
            last["token_ids"].extend(block.tokens)
            if block.salt:
                last["extra_keys"].append(None)
            return
        values = ([block.hash], block.parent, list(block.tokens), self.block_size, None, medium, None)
        stored: dict[str, Any] = {"type": "BlockStored", **dict(zip(FIELDS["BlockStored"], values, strict=False))}
        if block.salt:
            stored |= {"extra_keys": [[block.salt] if block.parent is None else None], "cache_salt": block.salt}
        made.append(stored)


def _add_removed(made: list[dict[str, Any]], block: StoredEvent) -> None:
    medium, last = _medium(block), made[-1] if made else CLEARED_EVENT
    if last["type"] == "BlockRemoved" and last["medium"] == medium:
        last["block_hashes"].append(block.hash)
    else:
        made.append({"type": "BlockRemoved", "block_hashes": [block.hash], "medium": medium})


def _medium(block: StoredEvent) -> str:
    return MEDIA[min(block.level, len(MEDIA) - 1)]
