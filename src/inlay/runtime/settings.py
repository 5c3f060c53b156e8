"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class EngineSettings:
    """Limits of an engine: slots, queue, prefill chunks and cache memory."""

    slots: int | None = None
    """Maximum sequences that run at once. Default: the number of slots of the package."""
    max_waiting: int = 64
    """Maximum requests that wait for a slot."""
    max_prefill_tokens: int = 64
    """Maximum prefill tokens in a step that also decodes."""
    max_prefill_only_tokens: int = 512
    """Maximum prefill tokens in a step without decode."""
    block_size: int = 32
    """Tokens in a block of the prefix cache."""
    cache_bytes: int | None = None
    """Memory of the prefix cache. Default: as many tokens as all slots can have. 0: no prefix cache."""
    host_bytes: int = 0
    """Memory of the second cache level, which receives blocks that are evicted from the first."""
    speculation: int = 7
    """Maximum tokens of a sequence that are drafted by prompt lookup and verified in one step. 0: none."""
    disk_folder: Path | None = None
    """Folder that keeps blocks on disk, also after the engine ends. Engines may share it. Default: none."""
    disk_bytes: int = 0
    """Maximum size of all files in this folder."""
    disk_owner: str = ""
    """Engines share blocks on disk only if they have the same owner."""
