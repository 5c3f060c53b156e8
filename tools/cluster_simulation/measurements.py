"""Measurements of a simulation or of a real run: latencies, throughput and a course over time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.runtime.request import Request
    from tools.cluster_simulation.workload import Session

GAP_STEP = 1e-4
"""Resolution of inter-token latencies in seconds."""


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A request as its client sees it."""

    id: int
    session: Session
    request: Request
    answer: Sequence[int]
    arrival: float
    """When the client sent it."""
    delivered: int = 0
    """Tokens that the client received."""
    generated: int = 0
    """Tokens of the current attempt. After a failure, those that the client already has are not delivered again."""
    attempts: int = 0
    cached: int = 0
    """Cached prompt tokens in the last attempt."""
    first_token: float = math.nan
    last_token: float = math.nan
    replica: str = ""


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values, nan if there are none.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    return values[max(0, math.ceil(len(values) * share) - 1)] if values else math.nan


def histogram_percentile(counts: Mapping[int, int], share: float) -> float:
    """Return a percentile in seconds of a histogram with bins of `GAP_STEP`.

    >>> round(histogram_percentile({100: 3, 200: 1}, 0.5), 6)
    0.01005
    """
    wanted = math.ceil(sum(counts.values()) * share)
    for value in sorted(counts):
        wanted -= counts[value]
        if wanted <= 0:
            return (value + 0.5) * GAP_STEP
    return math.nan


class Measurements:
    """What is measured between `start` and `stop`, and in each of several equal intervals of the whole time."""

    def __init__(self, start: float, stop: float, intervals: int = 60) -> None:
        self.start, self.stop, self.width = start, stop, stop / intervals
        self._intervals = intervals
        self.gaps: Counter[int] = Counter()
        """Histogram of inter-token latencies."""
        self._first: list[tuple[float, float]] = []
        """Arrival and seconds to the first token."""
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._course: dict[str, list[float]] = defaultdict(lambda: [0.0] * intervals)
        self.end = 0.0
        """Time of the last token."""

    def _add(self, name: str, at: float, value: float) -> None:
        index = int(at / self.width)
        if index < self._intervals:
            self._course[name][index] += value
        if self.start <= at < self.stop:
            self.counts[name] += value

    def token(self, asked: ClientRequest, now: float) -> None:
        """A request has generated a token. The client gets it unless it had it before a failure."""
        asked.generated += 1
        if asked.generated <= asked.delivered:
            self._add("repeated_tokens", now, 1)
            return
        if asked.delivered == 0:
            asked.first_token = now
            if self.start <= asked.arrival < self.stop:
                self._first.append((asked.arrival, now - asked.arrival))
        else:
            self._gap(now, now - asked.last_token, 1)
        asked.delivered = asked.generated
        asked.last_token = self.end = now
        self._add("tokens", now, 1)

    def _gap(self, now: float, seconds: float, count: int) -> None:
        if self.start <= now < self.stop:
            self.gaps[int(seconds / GAP_STEP)] += count

    def run(self, asked: Sequence[ClientRequest], times: Sequence[float]) -> None:
        """Requests have generated a token at each of these times. The result equals that of `token` for each."""
        new = []
        for each in asked:
            if each.generated < each.delivered:  # the run ends before the first new token
                each.generated += len(times)
                for now in times:
                    self._add("repeated_tokens", now, 1)
            else:
                self.token(each, times[0])
                new.append(each)
        if not new:
            return
        last, count = times[0], len(new)
        for now in times[1:]:
            self._gap(now, now - last, count)
            self._add("tokens", now, count)
            last = now
        for each in new:
            each.generated += len(times) - 1
            each.delivered = each.generated
            each.last_token = last
        self.end = max(self.end, last)

    def busy(self, start: float, stop: float) -> None:
        """A replica computed from `start` to `stop`."""
        edges = [each * self.width for each in range(int(start / self.width), int(stop / self.width) + 2)]
        inside = sorted(each for each in {*edges, self.start, self.stop} if start < each < stop)
        for low, high in pairwise([start, *inside, stop]):
            self._add("busy_seconds", (low + high) / 2, high - low)

    def finished(self, asked: ClientRequest, now: float) -> None:
        """A request has ended."""
        self._add("finished", now, 1)
        if asked.arrival >= self.start:
            self.counts["prompt_tokens"] += len(asked.request.prompt)
            self.counts["cached_tokens"] += asked.cached
        if self.start <= now < self.stop:
            self.counts["gap_seconds"] += asked.last_token - asked.first_token
            self.counts["gaps"] += asked.delivered - 1
        if asked.attempts > 1:
            self._add("finished_after_retry", now, 1)
        index = int(now / self.width)
        if index < self._intervals:
            self._course["prompt_tokens"][index] += len(asked.request.prompt)
            self._course["cached_tokens"][index] += asked.cached

    def count(self, name: str, now: float) -> None:
        """Something happened."""
        self._add(name, now, 1)

    def sample(self, now: float, values: Mapping[str, float], most_waiting: int) -> None:
        """Record the state of the cluster, and the length of the longest queue."""
        self._add("samples", now, 1)
        for name, value in values.items():
            self._add(name, now, value)
        if self.start <= now < self.stop:
            self.counts["waiting_most"] = max(self.counts["waiting_most"], most_waiting)

    def summary(self) -> dict[str, Any]:
        """Return the result."""
        seconds, counts = self.stop - self.start, self.counts
        first = sorted(each for _, each in self._first)
        samples = max(1.0, counts["samples"])
        alive = max(1e-9, counts["alive"] / samples)
        return {
            "seconds": seconds,
            "makespan": self.end,
            "requests": counts["finished"],
            "ttft_mean": sum(first) / len(first) if first else math.nan,
            "ttft_p50": percentile(first, 0.5),
            "ttft_p90": percentile(first, 0.9),
            "ttft_p99": percentile(first, 0.99),
            "itl_mean": counts["gap_seconds"] / counts["gaps"] if counts["gaps"] else math.nan,
            "itl_p50": histogram_percentile(self.gaps, 0.5),
            "itl_p90": histogram_percentile(self.gaps, 0.9),
            "itl_p99": histogram_percentile(self.gaps, 0.99),
            "tokens_per_second": counts["tokens"] / seconds,
            "tokens": counts["tokens"],
            "prompt_tokens": counts["prompt_tokens"],
            "cached_tokens": counts["cached_tokens"],
            "cached_share": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
            "utilisation": counts["busy_seconds"] / (alive * seconds),
            "slots_used": counts["running"] / max(1.0, counts["slots"]),
            "waiting_mean": counts["waiting"] / samples / alive,
            "waiting_most": counts["waiting_most"],
            "alive_mean": alive,
            "failures": counts["failures"],
            "retried": counts["retried"],
            "rejected": counts["rejected"],
            "repeated_tokens": counts["repeated_tokens"],
        }

    def course(self) -> dict[str, list[float]]:
        """Return values over time: one for each interval."""
        found, width = self._course, self.width
        samples = [max(1.0, each) for each in found["samples"]]
        alive = [each / count for each, count in zip(found["alive"], samples, strict=True)]
        first: list[list[float]] = [[] for _ in range(self._intervals)]
        for at, each in self._first:
            first[min(int(at / width), self._intervals - 1)].append(each)
        ordered = [sorted(each) for each in first]
        return {
            "time": [round((each + 0.5) * width, 3) for each in range(self._intervals)],
            "tokens_per_second": [each / width for each in found["tokens"]],
            "utilisation": _ratio(found["busy_seconds"], [each * width for each in alive]),
            "cached_share": _ratio(found["cached_tokens"], found["prompt_tokens"]),
            "ttft_p50": [percentile(each, 0.5) for each in ordered],
            "ttft_p99": [percentile(each, 0.99) for each in ordered],
            "waiting": _ratio(found["waiting"], [a * s for a, s in zip(alive, samples, strict=True)]),
            "alive": alive,
        }


def _ratio(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    return [a / b if b else 0.0 for a, b in zip(upper, lower, strict=True)]
