"""KV-cache events on ZeroMQ, in the form that vLLM publishes and existing routers read.

A batch is three frames: topic, number as eight bytes, and a msgpack payload `[time, [events], rank]`. What was published
lately can be asked for again by number (`replay`). A reader that lost the last batch before a quiet time would not notice,
so an empty batch goes out now and then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.runtime.kv.events import Cleared, Created, Gap, Removed, Stored, Updated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.runtime.kv.events import Event, Log

MEDIA = ("GPU", "CPU")
"""What levels are called on the wire: the nearest one is where a router wants to find a prefix."""
_LAST = (-1).to_bytes(8, "big", signed=True)


def wire_events(events: Iterable[Event], block_size: int) -> list[dict[str, Any]]:
    """Events as maps. A block that moves is removed from one medium and stored in the other.

    >>> stored = Stored(None, 7, (1, 2), "", 0, 0)
    >>> wire_events([stored, Removed(7, 0)], 2)[1]
    {'type': 'BlockRemoved', 'block_hashes': [7], 'medium': 'GPU'}
    """
    held: dict[int, Stored] = {}
    made: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Stored():
                held[event.hash] = event
                made.append(_stored(event, event.level, block_size))
            case Removed():
                made.append(_removed(event.hash, event.level))
            case Updated(level=(old, new)):
                made.append(_removed(event.hash, old))
                if event.hash in held:
                    made.append(_stored(held[event.hash], new, block_size))
            case Cleared() | Created():
                made.append({"type": "AllBlocksCleared"})
            case _:
                pass  # priorities stay inside
    return made


def _stored(block: Stored, level: int, block_size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [block.hash],
        "parent_block_hash": block.parent,
        "token_ids": list(block.tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIA[min(level, len(MEDIA) - 1)],
        "lora_name": None,
    }


def _removed(hash_: int, level: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [hash_], "medium": MEDIA[min(level, len(MEDIA) - 1)]}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The older form: the type, then the values in order."""
    return list(event.values())
