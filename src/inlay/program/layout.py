"""Laying out lines of code: breaking long ones, writing repetitions short."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True)
class Line:
    """One statement: its code, what stands behind it, and the node it computes."""

    code: str
    note: str = ""


def sequence_text(values: Sequence[str]) -> str:
    """A tuple of names, repetitions written as such.

    >>> sequence_text(["a", "a", "b"] * 3 + ["a"])
    '((a,) * 2 + (b,)) * 3 + (a,)'
    """
    length = len(values)
    for period in range(1, length + 1):
        if all(values[index] == values[index % period] for index in range(length)):
            break
    repeats, tail = divmod(length, period)
    body = _runs_text(values[:period])
    text = body if repeats == 1 else f"({body}) * {repeats}"
    return f"{text} + {_runs_text(values[:tail])}" if tail else text


def _runs_text(values: Sequence[str]) -> str:
    parts = [(value, len(list(group))) for value, group in groupby(values)]
    return " + ".join(f"({value},) * {count}" if count > 1 else f"({value},)" for value, count in parts)


def wrapped(head: str, text: str, budget: int, note: str = "") -> Iterator[Line]:
    """A statement on one line, or broken at spaces inside brackets where it would not fit."""
    if len(head) + len(text) <= budget:
        yield Line(head + text, note)
        return
    opening = _last_bracket(text) if text.endswith(")") else -1
    before, inside, after = (text[: opening + 1], text[opening + 1 : -1], ")") if opening >= 0 else ("(", text, ")")
    if len(head) + len(before) > budget:
        before, inside = "(", text
    yield Line(head + before, note)
    for line in wrap(inside, max(budget - 4, 20), break_long_words=False, break_on_hyphens=False):
        yield Line("    " + line)
    yield Line(after)


def loop_head(head: str, budget: int, note: str) -> Iterator[Line]:
    """The first line of a loop, broken where it would not fit."""
    variables, _, source = head.removesuffix(":").partition(" in ")
    *lines, last = wrapped(f"{variables} in ", source, budget - 1, note)
    yield from lines
    yield Line(f"{last.code}:", last.note)


def _last_bracket(text: str) -> int:
    """Where the bracket opens that closes at the end of `text`."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return -1


def free_name(name: str, taken: Sequence[str]) -> str:
    """The name, or one like it that is not taken."""
    while name in taken:
        name += "_"
    return name
