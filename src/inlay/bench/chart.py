"""The chart of a benchmark as SVG: for each task, one bar per contestant and the limits. Needs no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inlay.bench.metrics import INLAY, number_text
from inlay.insight.svg import FAINT, INK, header, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WIDTH, LEFT, WIDE, TOP = 900, 170, 420, 70
BAR, ROW, GAP = 14, 22, 52
COLOURS = {True: "#2f8f6b", False: "#7b8fb5"}
"""Colors of the package and of all other contestants."""
LIMIT = "#c8743a"


@dataclass(frozen=True)
class Bar:
    """The rate of a contestant in a task: median, spread and time per token."""

    name: str
    tok_s: Mapping[str, float]
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Panel:
    """A task: the rate of each contestant, and the limits if there are any."""

    title: str
    bars: Sequence[Bar]
    limits: Mapping[str, float]
    per: str = "token"


def panels(report: Mapping[str, Any]) -> list[Panel]:
    """Return the panels of the chart."""
    batched = next((name.removesuffix("_tok_s") for name in report if name.startswith("batch")), "")
    sequences = batched.removeprefix("batch")
    limits = {"bare linears": report["bare_decode_tok_s"], "reading the weights": report["reading_tok_s"]}
    found = [
        _panel(report, "decode", "decode, one sequence", limits),
        _panel(report, "prefill", "prefill", {}, per="prompt"),
        _panel(report, batched, f"decode, batch of {sequences}", _bare(report, batched), per="step"),
    ]
    return [panel for panel in found if panel.bars]


def _bare(report: Mapping[str, Any], batched: str) -> dict[str, float | None]:
    return {"bare linears": report.get(f"bare_{batched}_tok_s")}


def _panel(
    report: Mapping[str, Any], task: str, title: str, limits: Mapping[str, float | None], per: str = "token"
) -> Panel:
    done = {name: each["tasks"][task] for name, each in report["contestants"].items() if task in each["tasks"]}
    bars = [Bar(name, each["tok_s"], each["p50_ms"], each["p99_ms"]) for name, each in done.items()]
    bars.sort(key=lambda bar: (bar.name != INLAY, -bar.tok_s["median"]))
    return Panel(title, bars, {name: value for name, value in limits.items() if value}, per)


def draw(report: Mapping[str, Any], title: str) -> str:
    """Draw the chart."""
    drawn = panels(report)
    heights = [GAP + ROW * len(panel.bars) for panel in drawn]
    about = "; ".join(
        f"{panel.title}: " + ", ".join(f"{bar.name} {number_text(bar.tok_s['median'])}" for bar in panel.bars)
        for panel in drawn
    )
    parts = [
        header(title, f"Tokens per second. {about}.", WIDTH, TOP + sum(heights) + 16),
        text(LEFT, 28, title, size=18, weight=600),
        text(
            LEFT, 47, f"tokens per second, median of {report['rounds']} rounds; the thin line spans lowest to highest"
        ),
    ]
    y = float(TOP)
    for panel, height in zip(drawn, heights, strict=True):
        parts += [f'<g transform="translate({LEFT} {y:.1f})">', *_draw_panel(panel), "</g>"]
        y += height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(panel: Panel) -> Iterator[str]:
    most = max([bar.tok_s["high"] for bar in panel.bars] + list(panel.limits.values()))
    high = ROW * len(panel.bars)
    yield text(-150, 14, panel.title, size=13, weight=600)
    yield f'<path d="M0 22V{22 + high}" stroke="{INK}"/>'
    for index, bar in enumerate(panel.bars):
        y = 26 + index * ROW
        colour = COLOURS[bar.name == INLAY]
        wide, low, top = (WIDE * bar.tok_s[key] / most for key in ("median", "low", "high"))
        yield f'<rect class="bar" x="0" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>'
        yield f'<path d="M{low:.1f} {y + BAR / 2}H{top:.1f}" stroke="{INK}" stroke-width="1.5"/>'
        yield text(-8, y + 11, bar.name, anchor="end", weight=600 if bar.name == INLAY else 400)
        spent = f"p50 {number_text(bar.p50_ms)}, p99 {number_text(bar.p99_ms)} ms per {panel.per}"
        yield text(WIDE + 10, y + 11, number_text(bar.tok_s["median"]), weight=600)
        yield text(WIDE + 70, y + 11, spent)
    for number, (name, value) in enumerate(sorted(panel.limits.items(), key=lambda each: each[1])):
        x = WIDE * value / most
        line = f'd="M{x:.1f} 20V{24 + high}" stroke="{LIMIT}" stroke-width="2" stroke-dasharray="4 3"'
        yield f'<path class="limit" {line}/>'
        words = f"{name} {number_text(value)}"
        yield text(
            WIDE + 10 if number else WIDE - 10, 14, words, size=11, anchor="start" if number else "end", colour=LIMIT
        )
    yield f'<path d="M0 {22 + high}H{WIDE}" stroke="{FAINT}"/>'
