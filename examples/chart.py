"""Line charts with logarithmic axes, side by side, as SVG; readable on light and dark pages, without a library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inlay.insight.svg import FAINT, INK, header, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

WIDTH, HEIGHT = 960, 430
LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, PANEL_SPACING = 74, 114, 310, 250, 480
"""Origin and size of the axes of the first panel, and the distance to the next panel."""
LABEL_SPACING = 14
LETTER_WIDTH = 6.8
"""Upper bound of the average letter width of a label."""


@dataclass(frozen=True)
class Line:
    """The points of one line."""

    label: str
    colour: str
    is_dashed: bool
    points: Mapping[int, float]


@dataclass(frozen=True)
class Panel:
    """Lines with common axes."""

    title: str
    format_value: Callable[[float], str]
    """Formats a value for display."""
    lines: Sequence[Line]


def draw(title: str, description: str, x_label: str, panels: Sequence[Panel]) -> str:
    """Return the chart: a title, one legend for all panels, and the panels with the label of their x axis."""
    parts = [
        header(title, description, WIDTH, HEIGHT),
        text(LEFT, 28, title, size=18, weight=600),
        *_legend(panels[0].lines),
    ]
    for index, panel in enumerate(panels):
        parts += [f'<g transform="translate({LEFT + index * PANEL_SPACING} {TOP})">', *_panel(panel, x_label), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    """Yield one legend row for all panels."""
    x = float(LEFT)
    for line in lines:
        yield _stroke(f"M{x:.1f} 56h34", line)
        yield _dot(x + 17, 56, line)
        yield text(x + 42, 60, line.label)
        x += 66 + LETTER_WIDTH * len(line.label)


def _panel(panel: Panel, below: str) -> Iterator[str]:
    lengths = sorted({length for line in panel.lines for length in line.points})
    values = [value for line in panel.lines for value in line.points.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(length: int) -> float:
        span = math.log2(lengths[-1] / lengths[0]) or 1.0
        return PLOT_WIDTH * math.log2(length / lengths[0]) / span

    def y(value: float) -> float:
        return PLOT_HEIGHT * (high - math.log10(value)) / (high - low)

    yield text(0, -18, panel.title, size=14, weight=600)
    for power in range(low, high + 1):
        at = y(10.0**power)
        yield f'<path d="M0 {at:.1f}H{PLOT_WIDTH}" stroke="{FAINT}"/>'
        yield text(-8, at + 4, panel.format_value(10.0**power), anchor="end")
    for length in lengths:
        yield f'<path d="M{x(length):.1f} {PLOT_HEIGHT}v5" stroke="{INK}"/>'
        yield text(x(length), PLOT_HEIGHT + 20, f"{length:,}", size=10, anchor="middle")
    yield f'<path d="M0 {PLOT_HEIGHT}H{PLOT_WIDTH}" stroke="{INK}"/>'
    yield text(PLOT_WIDTH / 2, PLOT_HEIGHT + 42, below, anchor="middle")
    for line in panel.lines:
        places = [(x(length), y(value)) for length, value in sorted(line.points.items())]
        yield _stroke("M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in places), line)
        yield from (_dot(across, down, line) for across, down in places)
    yield from _end_labels(panel, y)


def _end_labels(panel: Panel, y: Callable[[float], float]) -> Iterator[str]:
    """Yield the last value of every line as a label, moved down where two would overlap."""
    taken = -math.inf
    last = [(line.points[max(line.points)], line) for line in panel.lines]
    for value, line in sorted(last, key=lambda each: -each[0]):
        taken = max(y(value) + 4, taken + LABEL_SPACING)
        yield text(PLOT_WIDTH + 9, taken, panel.format_value(value), colour=line.colour, weight=600)


def _stroke(path: str, line: Line) -> str:
    dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    return f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>'


def _dot(x: float, y: float, line: Line) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>'
