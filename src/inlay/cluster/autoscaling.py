"""The number of replicas, from the prompt tokens that wait."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve.config import AutoscalingContext

BUSY = 0.8
"""Share of the slots that may be used after replicas were removed."""


def queued_tokens_policy(ctx: AutoscalingContext, queued_tokens: int = 2048) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: `EngineReplica.record_autoscaling_stats` has the load of each replica."""
    latest = {name: _latest(ctx, name) for name in ("queued_tokens", "queued", "running", "slots")}
    if len(latest["slots"]) < ctx.current_num_replicas:  # no report is not the same as no load
        return ctx.target_num_replicas, {}
    total = {name: sum(values.values()) for name, values in latest.items()}
    in_ingress = ctx.total_queued_requests or 0.0
    each = total["queued_tokens"] / total["queued"] if total["queued"] else queued_tokens / 8
    slots = max(latest["slots"].values(), default=1.0)
    sequences = total["running"] + total["queued"] + in_ingress
    waiting = total["queued_tokens"] + in_ingress * each
    return wanted_replicas(ctx.target_num_replicas, waiting, queued_tokens, sequences, slots), {}


def wanted_replicas(now: int, waiting: float, target: int, sequences: float, slots: float) -> int:
    """Return the number of replicas: enough for the tokens that wait, and for all sequences to run or wait.

    Each replica may have as many sequences in its queue as in its slots. Replicas are removed only if nothing waits and
    the sequences fit into `BUSY` of the slots that remain.

    >>> wanted_replicas(1, waiting=9_000, target=2048, sequences=4, slots=4)
    5
    >>> wanted_replicas(1, waiting=400, target=2048, sequences=24, slots=4)
    3
    >>> wanted_replicas(4, waiting=0, target=2048, sequences=5, slots=4)
    2
    >>> wanted_replicas(4, waiting=100, target=2048, sequences=5, slots=4)
    4
    """
    if waiting:
        return max(now, ceil(waiting / target), ceil(sequences / (2 * slots)), 1)
    return max(1, min(now, ceil(sequences / (BUSY * slots))))


def _latest(ctx: AutoscalingContext, name: str) -> Mapping[Any, float]:
    """Return the last value of a measurement of each replica."""
    series = (ctx.raw_metrics or {}).get(name, {})
    return {replica: points[-1].value for replica, points in series.items() if points}
