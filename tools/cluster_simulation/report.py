"""Results as a table and as an SVG picture over time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from inlay.insight.svg import FAINT, INK, header, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COLOURS = {"kv_aware": "#2f8f6b", "least_loaded": "#c8743a", "random": "#7b8fb5", "round_robin": "#a06bb5"}
PANELS = (
    ("ttft_p50", "time to first token, p50 (s)"),
    ("ttft_p99", "time to first token, p99 (s)"),
    ("cached_share", "share of prompt tokens cached"),
    ("tokens_per_second", "generated tokens per second"),
    ("utilisation", "utilisation"),
    ("waiting", "waiting requests per replica"),
    ("alive", "replicas alive"),
)
LEFT, WIDE, TOP, HIGH, GAP = 60, 800, 64, 90, 40
COLUMNS = {
    "TTFT p50 s": ("ttft_p50", "{:.3f}"),
    "TTFT p99 s": ("ttft_p99", "{:.3f}"),
    "ITL p50 ms": ("itl_p50", "{:.1f}"),
    "ITL p99 ms": ("itl_p99", "{:.1f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "cached": ("cached_share", "{:.1%}"),
    "utilisation": ("utilisation", "{:.1%}"),
    "slots used": ("slots_used", "{:.1%}"),
    "queue": ("waiting_mean", "{:.2f}"),
    "longest": ("waiting_most", "{:.0f}"),
    "requests": ("requests", "{:.0f}"),
    "retried": ("retried", "{:.0f}"),
}


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row for each policy."""
    made = Table("policy", *COLUMNS)
    for name, result in results.items():
        made.add_row(name, *(_cell(result["summary"], key, form) for key, form in COLUMNS.values()))
    return made


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the same table in Markdown."""
    lines = [["policy", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for name, result in results.items():
        lines.append([name, *(_cell(result["summary"], key, form) for key, form in COLUMNS.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(summary: Mapping[str, float], key: str, form: str) -> str:
    value = summary[key] * (1e3 if key.startswith("itl") else 1)
    return form.format(value)


def draw(results: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """Draw the course of several policies over time as SVG."""
    parts = [
        header(
            title, f"Values over simulated time for {', '.join(results)}.", WIDE + 100, TOP + len(PANELS) * (HIGH + GAP)
        ),
        text(LEFT, 24, title, size=16, weight=600),
    ]
    for number, name in enumerate(results):
        x = LEFT + 130 * number
        parts.append(f'<path d="M{x} 42h20" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(text(x + 26, 46, name))
    for number, (key, words) in enumerate(PANELS):
        parts.append(f'<g transform="translate({LEFT} {TOP + 16 + number * (HIGH + GAP)})">')
        parts += _panel({name: result["course"] for name, result in results.items()}, key, words)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(courses: Mapping[str, Mapping[str, Sequence[float]]], key: str, words: str) -> Iterator[str]:
    top = (
        max((value for course in courses.values() for value in course[key] if not math.isnan(value)), default=1.0)
        or 1.0
    )
    until = max(course["time"][-1] + course["time"][0] for course in courses.values())
    yield text(0, -4, words, weight=600)
    yield text(-8, 10, f"{top:.3g}", anchor="end", size=11)
    yield text(-8, HIGH, "0", anchor="end", size=11)
    yield text(WIDE, HIGH + 14, f"{until:.0f} s", anchor="end", size=11)
    yield f'<path d="M0 0V{HIGH}H{WIDE}" fill="none" stroke="{INK}"/><path d="M0 0H{WIDE}" stroke="{FAINT}"/>'
    for name, course in courses.items():
        points = [
            f"{WIDE * at / until:.1f} {HIGH * (1 - value / top):.1f}"
            for at, value in zip(course["time"], course[key], strict=True)
            if not math.isnan(value)
        ]
        if points:
            yield f'<path d="M{"L".join(points)}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>'
