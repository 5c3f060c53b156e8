"""A timeline as SVG: lanes, tasks, events as arrows, and the critical path highlighted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from inlay.insight.svg import FAINT, INK, header, text
from inlay.streams.timeline import format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.streams.timeline import TaskRun, Timeline

WIDTH, LEFT, WIDE, TOP = 960, 70, 860, 96
BAR, ROW = 34, 64
TASK, CRITICAL, ARROW = "#7b8fb5", "#2f8f6b", "#c8743a"
LETTER = 6.4
"""Average width of a letter of a task name, in pixels."""


def draw_timeline(timeline: Timeline, title: str) -> str:
    """Return the SVG of a timeline. Tooltips show the name and the times of each task."""
    scale = WIDE / (timeline.seconds or 1.0)
    high = ROW * timeline.lane_count
    about = ", ".join(f"{each.task} in lane {each.lane}" for each in timeline.runs)
    parts = [
        header(title, f"{timeline}: {about}.", WIDTH, TOP + high + 40),
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{ARROW}"/></marker></defs>',
        text(LEFT, 28, title, size=18, weight=600),
        text(LEFT, 47, str(timeline)),
        *_legend(),
        f'<g transform="translate({LEFT} {TOP})">',
        *_axis(timeline.seconds, high),
        *_lanes(timeline, scale),
        *_arrows(timeline, scale),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def section(timeline: Timeline) -> dict[str, Any]:
    """Return the report section of a run: metrics, the SVG, and all tasks ordered by start."""
    critical = set(timeline.critical_path)
    on_path = sum(each.seconds for each in timeline.runs if each.task in critical)
    return {
        "says": str(timeline),
        "figures": [
            ["a run", format_seconds(timeline.seconds)],
            ["all tasks together", format_seconds(timeline.busy_seconds)],
            ["two lanes or more ran", f"{100 * timeline.overlap_share:.0f} % of the time"],
            ["lost waiting", format_seconds(timeline.wait_seconds)],
            ["on the critical path", f"{format_seconds(on_path)} in {len(critical)} of {len(timeline.runs)} tasks"],
        ],
        "picture": draw_timeline(timeline, "Lanes as they ran"),
        "rows": [
            [
                each.task,
                each.lane,
                *map(format_seconds, (each.begin, each.seconds, each.wait_seconds)),
                each.task in critical,
            ]
            for each in sorted(timeline.runs, key=lambda each: (each.begin, each.lane))
        ],
    }


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for colour, words in ((CRITICAL, "on the critical path"), (TASK, "not critical")):
        yield f'<rect x="{x:.1f}" y="60" width="16" height="12" rx="2" fill="{colour}"/>'
        yield text(x + 22, 70, words)
        x += 48 + LETTER * len(words)
    yield f'<path d="M{x:.1f} 66h16" stroke="{INK}" stroke-width="3" stroke-dasharray="2 3"/>'
    yield text(x + 22, 70, "waits")
    yield f'<path d="M{x + 84:.1f} 66h26" stroke="{ARROW}" stroke-width="1.5" marker-end="url(#tip)"/>'
    yield text(x + 116, 70, "event")


def _axis(seconds: float, high: int) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        x = WIDE * tenth / 10
        yield f'<path d="M{x:.1f} 0V{high}" stroke="{FAINT}"/>'
        yield text(x, high + 18, format_seconds(seconds * tenth / 10) if tenth else "0", size=11, anchor="middle")


def _lanes(timeline: Timeline, scale: float) -> Iterator[str]:
    critical = set(timeline.critical_path)
    for lane in range(timeline.lane_count):
        yield text(-10, lane * ROW + 38, f"lane {lane}", anchor="end", weight=600)
    for each in timeline.runs:
        x, y, wide = each.begin * scale, each.lane * ROW + 16, max(each.seconds * scale - 1, 0.6)
        if each.wait_seconds * scale >= 1:
            line = f'd="M{each.wait_begin * scale:.1f} {y + BAR / 2}H{x:.1f}" stroke="{INK}" stroke-width="3"'
            yield f'<path class="wait" {line} stroke-dasharray="2 3"/>'
        colour = CRITICAL if each.task in critical else TASK
        yield (
            f'<rect class="task" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="2" fill="{colour}">'
            f"<title>{escape(_tooltip(each))}</title></rect>"
        )
        yield from _name(each, x, y, wide)


def _tooltip(each: TaskRun) -> str:
    times = [format_seconds(value) for value in (each.seconds, each.begin, each.wait_seconds)]
    return f"{each.task}: {times[0]} from {times[1]}, waited {times[2]}"


def _name(each: TaskRun, x: float, y: float, wide: float) -> Iterator[str]:
    """Yield the name of a task, shortened to the width of its bar."""
    fits = int((wide - 8) / LETTER)
    if fits >= 3:
        name = each.task if len(each.task) <= fits else each.task[: fits - 1] + "…"
        yield text(x + wide / 2, y + 21, name, size=11, anchor="middle", colour="#ffffff")


def _arrows(timeline: Timeline, scale: float) -> Iterator[str]:
    for event in timeline.events:
        one, two = timeline.by_task[event.after], timeline.by_task[event.before]
        down = two.lane > one.lane
        x, y = one.end * scale, one.lane * ROW + 16 + (BAR if down else 0)
        to_x, to_y = two.begin * scale, two.lane * ROW + 16 + (0 if down else BAR)
        bend = (to_y - y) / 2
        path = f"M{x:.1f} {y}C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y}"
        yield (
            f'<path class="event" d="{path}" fill="none" stroke="{ARROW}" stroke-width="1.5" marker-end="url(#tip)">'
            f"<title>{escape(str(event))}</title></path>"
        )
