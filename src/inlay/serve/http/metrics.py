"""Prometheus metrics: histograms of durations and batch sizes, and the counters and gauges of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from inlay.serve.http.request_log import RequestRecord
    from inlay.serve.http.server_context import ServedEngine

SECONDS = tuple(base * 10**power for power in range(-3, 2) for base in (1.0, 2.0, 5.0))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
HISTOGRAMS = {
    "first_token_seconds": ("time_to_first_token_seconds", "Time from request arrival to first token.", SECONDS),
    "inter_token_seconds": ("inter_token_latency_seconds", "Time between consecutive tokens of a sequence.", SECONDS),
    "queue_seconds": ("queue_seconds", "Time that a request waited for a slot.", SECONDS),
    "step_seconds": ("step_seconds", "Duration of an engine step.", SECONDS),
    "placement_seconds": ("placement_seconds", "Time until a replica of a cluster accepted a request.", SECONDS),
    "batch": ("batch_size", "Sequences in a decode batch, without padding rows.", BATCHES),
}
"""Observation of the engine → name of the metric, help text, histogram buckets."""
GAUGES = {
    "waiting_requests": "Requests that wait for a slot.",
    "waiting_tokens": "Prompt tokens of requests that wait for a slot.",
    "running_tokens": "Tokens of the sequences that run: prompts, and what was generated.",
    "decode_sequences": "Sequences in the decode phase.",
    "prefill_sequences": "Sequences in the prefill phase.",
    "slots": "Maximum number of sequences that run at once.",
    "kv_memory_bytes": "Memory reserved for keys and values, in slots and in the prefix cache.",
    "blocks": "Capacity of the prefix cache in blocks, over all levels.",
    "blocks_used": "Blocks stored in the prefix cache, over all levels.",
    "disk_bytes": "Size of the blocks on disk.",
}
COUNTERS = {
    "accepted": "Sequences accepted by the engine, one for each prompt and choice.",
    "rejected": "Sequences rejected by the engine because its queue was full.",
    "steps": "Engine steps.",
    "step_microseconds": "Total duration of engine steps in microseconds.",
    "calls": "Calls of the compiled model, prefill and decode.",
    "call_microseconds": "Total duration of calls of the compiled model in microseconds.",
    "prompt_tokens": "Prompt tokens computed in prefill, without cached tokens.",
    "generation_tokens": "Tokens generated.",
    "drafted_tokens": "Tokens drafted by prompt lookup and verified in decode calls.",
    "accepted_tokens": "Drafted tokens that were generated.",
    "cached_tokens": "Prompt tokens taken from the prefix cache.",
    "disk_tokens": "Prompt tokens taken from blocks on disk.",
    "disk_writes": "Blocks written to disk.",
    "rows": "Token rows computed in prefill and decode, including padding rows.",
    "padding_rows": "Padding rows computed in decode batches.",
    "prefix_cache_hits": "Prompts that reused at least one block of the prefix cache.",
    "prefix_cache_misses": "Prompts that reused no block of the prefix cache.",
    "finished": "Sequences that finished, by reason.",
    "fallback": "Fallbacks and failures, by kind.",
    "events": "KV cache events recorded.",
    "retries": "Requests that were run again because a replica failed.",
    "resumed": "Requests that were run again after their first token.",
    "predicted_tokens": "Prompt tokens that the selector expected in the cache of the chosen replica.",
    "placements": "Requests that were sent to a replica, by the way it was chosen.",
    "attempts_failed": "Attempts to run a request that failed, by kind.",
    "selector_failures": "Times that the selector was not asked for a while, by reason.",
}
LABELS = {
    "finished": "reason",
    "fallback": "kind",
    "placements": "policy",
    "attempts_failed": "kind",
    "selector_failures": "reason",
}
"""The label name of counters that have a label."""


class Metrics:
    """The metrics of one server. The engine calls `observe` in its own thread."""

    def __init__(self, engine: ServedEngine, model: str, held: Callable[[], int]) -> None:
        self._engine, self._model, self._held = engine, model, held
        self._registry = CollectorRegistry()
        self._observed = {
            name: Histogram(f"inlay_{title}", about, buckets=buckets, registry=self._registry)
            for name, (title, about, buckets) in HISTOGRAMS.items()
        }
        self._requests = Counter(
            "inlay_requests", "HTTP requests, by route and status code.", ["route", "status"], registry=self._registry
        )
        self._registry.register(self)

    def observe(self, name: str, value: float) -> None:
        """Record a measurement; unknown names are ignored."""
        histogram = self._observed.get(name)
        if histogram is not None:
            histogram.observe(value)

    def count_request(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self._requests.labels(record.route, record.status).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current counters and gauges of the engine."""
        about = "Requests in flight: waiting, running or being sent. A request counts once for each choice."
        yield GaugeMetricFamily("inlay_active_requests", about, self._held())
        parted: dict[str, CounterMetricFamily] = {}
        counts = self._engine.counts()
        yield from self._collect_vllm(counts)
        for name, value in counts.items():
            name, _, kind = name.partition(".")
            if name in GAUGES:
                yield GaugeMetricFamily(f"inlay_{name}", GAUGES[name], value)
            elif not kind:
                yield CounterMetricFamily(f"inlay_{name}", COUNTERS.get(name, "Engine counter."), value)
            else:
                about = COUNTERS.get(name, "Engine counter.")
                family = parted.setdefault(name, CounterMetricFamily(f"inlay_{name}", about, labels=[LABELS[name]]))
                family.add_metric([kind], value)
        yield from parted.values()

    def _collect_vllm(self, counts: Mapping[str, float]) -> Iterator[Metric]:
        """Yield the gauges that routers read, with the names and labels of vLLM."""
        running = counts["prefill_sequences"] + counts["decode_sequences"]
        sizes = {"block_size": self._engine.settings.block_size, "num_gpu_blocks": int(counts["blocks"])}
        label, of = ["model_name", "engine"], [self._model, "0"]
        for name, about, value in (
            ("num_requests_running", "Sequences that run.", running),
            ("num_requests_waiting", GAUGES["waiting_requests"], counts["waiting_requests"]),
            ("kv_cache_usage_perc", "Part of the slots that are in use; 1 is all.", running / counts["slots"]),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=label)
            gauge.add_metric(of, value)
            yield gauge
        config = GaugeMetricFamily("vllm:cache_config_info", "Blocks of the prefix cache.", labels=["engine", *sizes])
        config.add_metric(["0", *map(str, sizes.values())], 1)
        yield config
