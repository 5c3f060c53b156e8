"""Computes rates, fractions of the limit and ratios from seconds, each as a median over rounds with its spread."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from inlay.bench.rounds import FIRST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.bench.rounds import BenchResult, Samples

INLAY = "Inlay"


@dataclass(frozen=True)
class Spread:
    """The median, lowest and highest value of all rounds.

    >>> str(Spread.of([1.0, 4.0, 2.0]))
    '2.00 (1.00–4.00)'
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of these values."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{number_text(self.median)} ({number_text(self.low)}–{number_text(self.high)})"

    def to_json(self) -> dict[str, float]:
        """Return the spread as JSON."""
        return {"median": self.median, "low": self.low, "high": self.high}


def number_text(value: float) -> str:
    """Format a number with about three digits.

    >>> number_text(1234.5), number_text(86.42), number_text(0.8712)
    ('1,234', '86.4', '0.87')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all values does not exceed.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(share * len(ordered) + 0.5) - 1))]


def rates(samples: Samples, task: str) -> list[float]:
    """Return tokens per second of each round; for the first token and for reading, seconds."""
    rounds = samples.seconds.get(task, [])
    if task in (FIRST, "read"):
        return [sum(each) for each in rounds]
    return [samples.tokens[task] * len(each) / sum(each) for each in rounds]


def latency_percentiles(samples: Samples, task: str) -> dict[str, float]:
    """Return p50 and p99 of the time of a token, or of a step of a batch, over all rounds."""
    all_of_them = [1000 * each for seconds in samples.seconds[task] for each in seconds]
    return {"p50_ms": percentile(all_of_them, 0.5), "p99_ms": percentile(all_of_them, 0.99)}


def ratio(one: Sequence[float], other: Sequence[float]) -> Spread | None:
    """Return the ratio of two lists, computed round by round."""
    pairs = list(zip(one, other, strict=False))
    return Spread.of([a / b for a, b in pairs]) if pairs else None


def report(raced: BenchResult, batch: int) -> dict[str, Any]:
    """Return all results as one JSON document. Top-level numbers are medians of the package."""
    ours = raced.samples[INLAY]
    batched = f"batch{batch}"

    def middle(task: str) -> float | None:
        found = rates(ours, task)
        return median(found) if found else None

    reading = [1 / seconds for seconds in rates(ours, "read")]
    shares = {
        "decode_of_bare": ratio(rates(ours, "decode"), rates(ours, "bare_decode")),
        f"{batched}_of_bare": ratio(rates(ours, batched), rates(ours, f"bare_{batched}")),
        "decode_of_reading": ratio(rates(ours, "decode"), reading),
        "bare_of_reading": ratio(rates(ours, "bare_decode"), reading),
        "deep_of_decode": ratio(rates(ours, "deep_decode"), rates(ours, "decode")),
    }
    return {
        "decode_tok_s": middle("decode"),
        "prefill_tok_s": middle("prefill"),
        "first_token_s": middle(FIRST),
        "bare_decode_tok_s": middle("bare_decode"),
        f"{batched}_tok_s": middle(batched),
        f"bare_{batched}_tok_s": middle(f"bare_{batched}"),
        "deep_decode_tok_s": middle("deep_decode"),
        "reading_tok_s": median(reading) if reading else None,
        "rounds": max(len(each) for each in ours.seconds.values()),
        "shares": {name: share.to_json() for name, share in shares.items() if share},
        "contestants": {name: _contestant(samples) for name, samples in raced.samples.items()},
        "against": {name: _compare(ours, samples) for name, samples in raced.samples.items() if name != INLAY},
        "over_best": _compare_best(raced),
        "notes": raced.notes,
    }


def _compare_best(raced: BenchResult) -> dict[str, Any]:
    """Return, for each task, the fastest other contestant and the speedup of the package over it."""
    ours, found = raced.samples[INLAY], {}
    for task in ours.seconds:
        others = {
            name: rates(each, task) for name, each in raced.samples.items() if name != INLAY and task in each.seconds
        }
        if others and task != FIRST:
            name = max(others, key=lambda each: median(others[each]))
            times = ratio(rates(ours, task), others[name])
            if times:
                found[task] = {"name": name, **times.to_json()}
    return found


def _contestant(samples: Samples) -> dict[str, Any]:
    return {
        "version": samples.version,
        "tasks": {
            task: {
                ("seconds" if task in (FIRST, "read") else "tok_s"): Spread.of(rates(samples, task)).to_json(),
                **latency_percentiles(samples, task),
            }
            for task in samples.seconds
        },
    }


def _compare(ours: Samples, other: Samples) -> dict[str, Any]:
    """Return the speedup of the package in each task; for the first token, the ratio of times."""
    found = {}
    for task in other.seconds:
        mine, theirs = rates(ours, task), rates(other, task)
        times = ratio(theirs, mine) if task == FIRST else ratio(mine, theirs)
        if times:
            found[task] = times.to_json()
    return found
