"""What an engine measures: counters, and observers of single measurements."""

from __future__ import annotations

from typing import Protocol

from inlay.runtime.kv import disk
from inlay.runtime.outputs import FinishReason


class Observer(Protocol):
    """Receives measurements of the engine, such as metrics."""

    def observe(self, name: str, value: float) -> None:
        """Record a measurement. Called in the engine's thread, so it must be fast."""


COUNTERS = (
    *("accepted", "rejected", "steps", "step_microseconds", "calls", "call_microseconds", "rows", "padding_rows"),
    *("prompt_tokens", "generation_tokens", "cached_tokens", "prefix_cache_hits", "prefix_cache_misses"),
    *("drafted_tokens", "accepted_tokens"),
    *("fallback.call_failed", "fallback.step_failed", "fallback.promote_failed", "fallback.cache_full"),
    *("disk_tokens", *disk.COUNTERS),
    *(f"finished.{finish}" for finish in (*FinishReason, "failed")),
)
"""All counters, so that each is reported as 0 before its first event."""
