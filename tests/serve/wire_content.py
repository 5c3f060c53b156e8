"""What a router knows of a cache from what it was told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inlay.serve.kv_form import MEDIA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inlay.runtime.kv.manager import Manager
    from inlay.serve.kv_reader import Batch, Reader

Held = dict[int, tuple[int | None, tuple[int, ...], str]]
"""Hash → parent, tokens, medium."""


def apply(held: Held, events: Iterable[dict[str, Any]]) -> None:
    """Do what events say. One that contradicts what is known is a defect of who sent it."""
    for event in events:
        match event["type"]:
            case "AllBlocksCleared":
                held.clear()
            case "BlockRemoved":
                for hash_ in event["block_hashes"]:
                    assert held.pop(hash_)[2] == event["medium"]
            case "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                assert (event["lora_id"], event["lora_name"]) == (None, None)
                for at, hash_ in enumerate(event["block_hashes"]):
                    assert hash_ not in held
                    held[hash_] = (parent, tuple(event["token_ids"][at * size : (at + 1) * size]), event["medium"])
                    parent = hash_
            case other:
                raise AssertionError(other)


def expected(manager: Manager) -> Held:
    """What a router has to know."""
    return {
        block.hash: (block.parent.hash if block.parent else None, block.tokens, MEDIA[block.level])
        for block in manager
        if not block.salt
    }


def follow(reader: Reader, held: Held, until: Held, seconds: float = 60.0) -> list[Batch]:
    """Read until what is known is this; what was read. What is expected must not change meanwhile."""
    seen: list[Batch] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for batch in reader.read(0.1):
            apply(held, batch.events)
            seen.append(batch)
        if held == until:
            return seen
    raise AssertionError(f"{len(held)} blocks are known and {len(until)} are held, after {len(seen)} batches")
