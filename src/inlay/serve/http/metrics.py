"""Figures for Prometheus: how long things take, as histograms; how many there are, as the engine counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from inlay.serve.http.request_log import RequestRecord

SECONDS = tuple(base * 10**power for power in range(-3, 2) for base in (1.0, 2.0, 5.0))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
HISTOGRAMS = {
    "first_token_seconds": ("time_to_first_token_seconds", "From being asked to the first token.", SECONDS),
    "inter_token_seconds": ("inter_token_latency_seconds", "From one token of an answer to its next.", SECONDS),
    "queue_seconds": ("queue_seconds", "From being asked to having a slot.", SECONDS),
    "step_seconds": ("step_seconds", "One step of the model.", SECONDS),
    "batch": ("batch_size", "Sequences that got a token in a step.", BATCHES),
}
"""What the engine observes: the name of the metric, what it is, and its buckets."""
GAUGES = {
    "waiting_requests": "Requests that wait for a slot.",
    "decode_sequences": "Sequences in the decode phase.",
    "prefill_sequences": "Sequences in the prefill phase.",
    "slots": "Sequences there can be at once.",
    "kv_memory_bytes": "Memory for keys and values, in slots and in the cache.",
    "blocks": "Blocks that the cache can hold.",
    "blocks_used": "Blocks in the cache.",
}
COUNTERS = {
    "accepted": "Requests that were accepted.",
    "rejected": "Requests that were rejected.",
    "steps": "Steps of the model.",
    "prompt_tokens": "Tokens of prompts that were computed.",
    "generation_tokens": "Tokens that were generated.",
    "cached_tokens": "Tokens of prompts that were in the cache.",
    "rows": "Rows that were computed.",
    "padding_rows": "Padding rows that were computed.",
    "prefix_cache_hits": "Prompts with a prefix in the cache.",
    "prefix_cache_misses": "Prompts without a prefix in the cache.",
    "finished": "Sequences that finished, by reason.",
    "fallback": "What went another way than planned.",
    "events": "Events of the cache.",
}
LABELS = {"finished": "reason", "fallback": "kind"}
"""The label of counters that are kept by kind."""


class Metrics:
    """The figures of one server. `observe` is called by the engine, in its own thread."""

    def __init__(self, counts: Callable[[], dict[str, float]], held: Callable[[], int]) -> None:
        self._counts, self._held = counts, held
        self._registry = CollectorRegistry()
        self._observed = {
            name: Histogram(f"inlay_{title}", about, buckets=buckets, registry=self._registry)
            for name, (title, about, buckets) in HISTOGRAMS.items()
        }
        self._requests = Counter(
            "inlay_requests", "Requests that were dealt with.", ["route", "status"], registry=self._registry
        )
        self._registry.register(self)

    def observe(self, name: str, value: float) -> None:
        """Something was measured; a name nobody knows is passed over."""
        histogram = self._observed.get(name)
        if histogram is not None:
            histogram.observe(value)

    def count_request(self, record: RequestRecord) -> None:
        """A request was dealt with."""
        self._requests.labels(record.route, record.status).inc()

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the engine counts, now."""
        yield GaugeMetricFamily("inlay_active_requests", "Requests that wait, run or are being sent.", self._held())
        parted: dict[str, CounterMetricFamily] = {}
        for name, value in self._counts().items():
            name, _, kind = name.partition(".")
            if name in GAUGES:
                yield GaugeMetricFamily(f"inlay_{name}", GAUGES[name], value)
            elif not kind:
                yield CounterMetricFamily(f"inlay_{name}", COUNTERS.get(name, "As the engine counts it."), value)
            else:
                about = COUNTERS.get(name, "As the engine counts it.")
                family = parted.setdefault(name, CounterMetricFamily(f"inlay_{name}", about, labels=[LABELS[name]]))
                family.add_metric([kind], value)
        yield from parted.values()

    def describe(self) -> Iterator[Metric]:
        """Nothing: what the engine counts is known when it is asked."""
        return iter(())
