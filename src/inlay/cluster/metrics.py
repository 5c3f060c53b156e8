"""The metrics of all replicas as one page, each sample with labels for its deployment and replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable


class ReplicaMetrics(NamedTuple):
    """The metrics of one replica in Prometheus text format."""

    deployment: str
    replica: str
    text: bytes


def merge(pages: Iterable[ReplicaMetrics], unreachable: int = 0) -> bytes:
    """Merge pages; `unreachable` replicas did not answer.

    >>> page = b"# HELP inlay_steps_total Steps.\\n# TYPE inlay_steps_total counter\\ninlay_steps_total 3\\n"
    >>> print(merge([ReplicaMetrics("engine", "a", page), ReplicaMetrics("engine", "b", page)]).decode())
    # HELP inlay_unreachable_replicas Replicas whose metrics are missing on this page.
    # TYPE inlay_unreachable_replicas gauge
    inlay_unreachable_replicas 0.0
    # HELP inlay_steps_total Steps.
    # TYPE inlay_steps_total counter
    inlay_steps_total{deployment="engine",replica="a"} 3.0
    inlay_steps_total{deployment="engine",replica="b"} 3.0
    <BLANKLINE>
    """
    about = "Replicas whose metrics are missing on this page."
    missing = GaugeMetricFamily("inlay_unreachable_replicas", about, unreachable)
    found: dict[str, Metric] = {missing.name: missing}
    for page in pages:
        labels = {"deployment": page.deployment, "replica": page.replica}
        for family in text_string_to_metric_families(page.text.decode()):
            merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [each._replace(labels={**each.labels, **labels}) for each in family.samples]
    return generate_latest(_Page(found.values()))


class _Page(NamedTuple):
    """A collector of metrics that are there already."""

    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        return self.metrics
