"""KV events in vLLM's wire format, which existing routers read.

Sources: vLLM (vllm/distributed/kv_events.py, versions from April 2025 to August 2026) and Dynamo's subscriber
(lib/kv-router/src/zmq_wire):

- A payload is msgpack, `[time, [events], rank]`, in every version.
- An event is an array up to June 2026, `[type, fields…]`, and a map with the key `type` since. Fields, in the order of
  the array: `BlockStored` block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium (since September
  2025), lora_name (since December 2025); `BlockRemoved` block_hashes, medium; `AllBlocksCleared` none.
- `extra_keys` (since 2026) has an entry for each block: a list with the salt for the first block of a prompt, else
  None. It is left out where there is no salt. A map has the salt in `cache_salt` too, which Dynamo reads.
- Later fields (group_idx, locality, …) are optional; Inlay does not send them.
- `BlockStored` contains a run of blocks, each the parent of the next.
- Media are `GPU`, `CPU` and `STORAGE`; Dynamo ignores blocks on other media.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence


MEDIA = ("GPU", "CPU", "STORAGE")
"""The wire name of each level, independent of the actual memory. The first is the level next to the slots."""
FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
ENCODINGS = ("map", "array")
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends a replay."""
CLEARED_EVENT: dict[str, Any] = {"type": "AllBlocksCleared"}


def encode_events(events: Sequence[dict[str, Any]], encoding: str) -> list[Any]:
    """Return events in one of the two encodings.

    >>> encode_events([{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}], "array")
    [['BlockRemoved', [7], 'GPU']]
    """
    if encoding not in ENCODINGS:
        raise UsageError(f"Unknown encoding {encoding!r}.", suggest(encoding, ENCODINGS) or "Use map or array.")
    if encoding == "map":
        return list(events)
    return [[value for name, value in event.items() if name != "cache_salt"] for event in events]


def decode_event(event: Any) -> dict[str, Any]:
    """Return an event of either encoding as a map. Unknown fields of a map are kept, those of an array are dropped.

    >>> removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    >>> decode_event(["BlockRemoved", [7], "GPU"]) == decode_event(removed)
    True
    """
    if isinstance(event, dict):
        return event
    type_, *values = event
    return {"type": type_} | dict(zip(FIELDS.get(type_, ()), values, strict=False))


def import_zmq() -> Any:
    """Return the zmq module, or raise an error with the install command."""
    try:
        import msgspec  # noqa: F401 - the payloads
        import zmq
    except ImportError as error:
        raise UsageError("KV events over ZeroMQ require pyzmq and msgspec.", "pip install 'inlay[events]'") from error
    return zmq
