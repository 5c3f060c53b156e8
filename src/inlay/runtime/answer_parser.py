"""Splits the text of an answer, as it is generated, into reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from inlay.runtime.generation_state import overlap
from inlay.runtime.tool_format import (
    ARGS,
    CALL,
    CALL_ID,
    CALLS,
    CHANNEL,
    CODE,
    END,
    END_CALL,
    END_THINK,
    FUNCTIONS,
    MESSAGE,
    START,
    THINK,
    ToolFormat,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from inlay.runtime.tool_format import Markup


_GAP = " \r\n\t"
"""What may be between calls."""


@dataclass(frozen=True)
class Delta:
    """A piece of an answer."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    """The name of a function begins a call; its arguments are a piece of JSON."""
    text: str


class AnswerParser:
    """The parts of one answer. What is in no known form is content, so no text is lost.

    >>> from inlay.runtime.tool_format import Markup
    >>> parser = AnswerParser(Markup(), tools={"f"}, is_thinking=False)
    >>> parser.add('One.<tool_call>{"name": "f", "arguments": {"a"')
    [Delta(kind='content', text='One.'), Delta(kind='name', text='f'), Delta(kind='arguments', text='{"a"')]
    >>> parser.add(": 1}}</tool_call>") + parser.finish()
    [Delta(kind='arguments', text=': 1}')]
    """

    def __init__(self, markup: Markup, *, tools: Collection[str], is_thinking: bool) -> None:
        """`tools`: names of functions; others are no calls. `is_thinking`: the prompt ends within the reasoning."""
        self._markup, self._held, self._space, self._done = markup, "", "", list[Delta]()
        self._names, self._tools = tools, markup.tools if tools else None
        self._skipped: str | None = None
        """What was read between calls, as long as no call followed: it may be content."""
        self._call: _CallScanner | None = None
        self._state: Callable[[], bool] = self._read_content
        if markup.tools is ToolFormat.CHANNELS:
            self._state = self._read_header
        elif is_thinking:
            self._state = self._read_reasoning
        self._is_first = True
        """Whether no text of this part was emitted yet."""
        self._has_call = False
        self._is_reasoning = False
        """Whether the message of this channel is reasoning."""

    def add(self, text: str) -> list[Delta]:
        """Add a piece of the answer; return what is certain now."""
        self._held += text
        while self._held and self._state():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """Return what was held back, when no text follows."""
        if self._call is not None:
            self._end_call()
        if self._skipped is not None:
            self._end_calls()
        kind: Literal["content", "reasoning"] = "reasoning" if self._state == self._read_reasoning else "content"
        if self._state not in (self._read_calls, self._read_header, self._read_name) or self._held.strip():
            self._emit(kind, self._held)
        if self._space and not self._has_call and kind == "content":
            self._done.append(Delta("content", self._space))
        self._held = self._space = ""
        return self._take()

    def _take(self) -> list[Delta]:
        """Return the deltas, with neighbors of one kind joined."""
        made: list[Delta] = []
        for each in self._done:
            if made and made[-1].kind == each.kind != "name":
                made[-1] = Delta(each.kind, made[-1].text + each.text)
            else:
                made.append(each)
        self._done = []
        return made

    def _emit(self, kind: Literal["content", "reasoning"], text: str) -> None:
        """Emit text. Space at its end is held back: it is dropped before a call and at the end of the reasoning."""
        text = self._space + text
        if self._is_first and (self._markup.has_reasoning or self._tools):
            text = text.lstrip(_GAP)
        kept = text.rstrip(_GAP) if self._markup.has_reasoning or self._tools or kind == "reasoning" else text
        self._space = text[len(kept) :]
        if kept:
            self._is_first = False
            self._done.append(Delta(kind, kept))

    def _split(self, *markers: str) -> tuple[str, str]:
        """Take text up to the first of these markers, and the marker; without one, all but its possible beginning."""
        places = [(at, each) for each in markers if (at := self._held.find(each)) >= 0]
        if places:
            at, marker = min(places)
            text, self._held = self._held[:at], self._held[at + len(marker) :]
            return text, marker
        keep = max(overlap(self._held, each) for each in markers)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, ""

    def _read_content(self) -> bool:
        markers = [THINK] if self._markup.has_reasoning and self._is_first else []
        if self._tools is ToolFormat.TAGS:
            markers.append(CALL)
        elif self._tools in (ToolFormat.LIST, ToolFormat.NAMES):
            markers.append(CALLS)
        elif self._tools is ToolFormat.OBJECTS:
            markers.append(CODE)
            if self._is_first and self._held.lstrip(_GAP).startswith("{"):
                self._begin_calls("")
                return True
        if not markers:
            self._emit("content", self._held)
            self._held = ""
            return False
        text, marker = self._split(*markers)
        if marker == THINK and not text.strip(_GAP):
            self._state = self._read_reasoning
            return True
        self._emit("content", text + (THINK if marker == THINK else ""))
        if marker and marker != THINK:
            self._begin_calls(marker)
        return bool(marker)

    def _begin_calls(self, marker: str) -> None:
        self._skipped = marker
        self._state = self._read_name if self._tools is ToolFormat.NAMES else self._read_calls

    def _skip(self, count: int) -> None:
        if self._skipped is not None:
            self._skipped += self._held[:count]
        self._held = self._held[count:]

    def _end_calls(self) -> None:
        """What was skipped is content if there was no call."""
        if self._skipped:
            self._emit("content", self._skipped)
        self._skipped, self._state = None, self._read_content

    def _read_reasoning(self) -> bool:
        text, marker = self._split(END_THINK)
        self._emit("reasoning", text)
        if marker:
            self._begin_content()
        return bool(marker)

    def _begin_content(self) -> None:
        self._space, self._is_first, self._state = "", True, self._read_content

    def _read_calls(self) -> bool:
        """Between calls in JSON: separators and end tags are dropped."""
        if self._call is not None:
            self._read_call()
            return True
        self._skip(len(self._held) - len(self._held.lstrip(_GAP + "[],;")))
        for marker in (END_CALL, CALL, CALLS, CODE):
            if self._held.startswith(marker):
                self._skip(len(marker))
                if marker == END_CALL:
                    self._end_calls()
                return True
            if marker.startswith(self._held):
                return False
        if self._held.startswith("{"):
            self._call = _CallScanner(self._names)
        else:
            self._end_calls()
        return True

    def _read_call(self) -> bool:
        """Read on in a call; return whether it ended."""
        assert self._call is not None
        used = self._call.add(self._held)
        self._held = self._held[used:]
        self._pass_on()
        is_complete = self._call.is_complete
        if is_complete:
            self._end_call()
        return is_complete

    def _pass_on(self) -> None:
        assert self._call is not None
        for each in self._call.take():
            if each.kind == "name":
                self._space, self._is_first, self._has_call, self._skipped = "", False, True, None
            self._done.append(each)

    def _end_call(self) -> None:
        assert self._call is not None
        self._call.close()
        self._pass_on()
        if not self._call.is_named:
            self._emit("content", (self._skipped or "") + self._call.text)
            self._skipped = None if self._skipped is None else ""
        self._call = None

    def _read_name(self) -> bool:
        """The name of a function, then its arguments."""
        if self._call is not None:
            if self._read_call():
                self._state = self._read_content
            return True
        if re.match(rf"[{_GAP}]*\[[{_GAP}]*\{{", self._held):
            self._state = self._read_calls  # the older form: a list
            return True
        if re.fullmatch(rf"[{_GAP}]*\[[{_GAP}]*", self._held) or not (ARGS in self._held or "{" in self._held):
            return False
        text, marker = self._split(ARGS, "{")
        name = text.split(CALL_ID)[0].strip()
        self._held = ("{" if marker == "{" else "") + self._held
        if name in self._names:
            self._call = _CallScanner(self._names, name)
            self._pass_on()
        else:
            self._skipped = (self._skipped or "") + text + (ARGS if marker == ARGS else "")
            self._end_calls()
        return True

    def _read_header(self) -> bool:
        """The header of a message in a channel."""
        if MESSAGE not in self._held:
            return False
        text, _ = self._split(MESSAGE)
        header = text.rpartition(CHANNEL)[2]
        found = re.search(rf"to={re.escape(FUNCTIONS)}([\w.-]+)", text)
        if found and found[1] in self._names:
            self._call = _CallScanner(self._names, found[1])
            self._pass_on()
        self._is_reasoning = header.strip().startswith("analysis")
        self._state = self._read_body
        return True

    def _read_body(self) -> bool:
        if self._call is not None:
            if self._read_call():
                self._state = self._read_header
            return True
        text, marker = self._split(END, START, CHANNEL)
        self._emit("reasoning" if self._is_reasoning else "content", text)
        if marker:
            self._space = ""
            self._held = CHANNEL + self._held if marker == CHANNEL else self._held
            self._state = self._read_header
        return bool(marker)


class _CallScanner:
    """Reads a call in JSON character by character: its name, and the text of its arguments as it comes.

    If the name is known, all of the JSON is the arguments.
    """

    def __init__(self, names: Collection[str], name: str | None = None) -> None:
        self._names = names
        self.text = ""
        self.is_complete = False
        self.is_named = name is not None
        self._is_bare = name is not None
        self._deltas = [Delta("name", name)] if name is not None else []
        self._depth, self._string, self._is_escaped = 0, -1, False
        self._key: str | None = None
        self._is_value = self._is_bare
        self._begin, self._end, self._sent = -1, -1, 0

    def add(self, text: str) -> int:
        """Add text; return how much of it belongs to the call."""
        before = len(self.text)
        self.text += text
        for at in range(before, len(self.text)):
            if self._string >= 0:
                self._read_string(self.text[at], at)
            else:
                self._read_char(self.text[at], at)
            if self.is_complete:
                self.text = self.text[: at + 1]
                return at + 1 - before
        return len(text)

    def _read_string(self, char: str, at: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            value, self._string = self.text[self._string : at + 1], -1
            if self._depth == 1 and not self._is_bare:
                self._read_word(value)

    def _read_word(self, text: str) -> None:
        """A string of the call itself is a key, or a value such as the name."""
        try:
            value = json.loads(text)
        except ValueError:
            return
        if not self._is_value:
            self._key = value
        elif self._key == "name" and not self.is_named and value in self._names:
            self.is_named = True
            self._deltas.append(Delta("name", value))

    def _read_char(self, char: str, at: int) -> None:
        if not self._is_bare and self._depth == 1 and char in ":,}":
            if char == ":":
                self._is_value = True
                if self._key in ("arguments", "parameters") and self._begin < 0:
                    self._begin = at + 1
            else:
                if self._is_value and self._begin >= 0 > self._end:
                    self._end = at
                self._is_value = False
        if char == '"':
            self._string = at
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0

    def take(self) -> list[Delta]:
        """Return the pieces that are certain now."""
        if self._is_bare:
            begin, end = 0, len(self.text)
        else:
            begin, end = self._begin, len(self.text) if self._end < 0 else self._end
        if self.is_named and begin >= 0:
            given = self.text[begin:end].strip()
            is_object = given.startswith("{")
            if not is_object and self._end >= 0 and not self._sent:  # some models write the object as a string
                given = _unquoted(given)
                is_object = True
            if is_object and len(given) > self._sent:
                self._deltas.append(Delta("arguments", given[self._sent :]))
                self._sent = len(given)
        made, self._deltas = self._deltas, []
        return made

    def close(self) -> None:
        """No text follows. A call without arguments has an empty object, if it is complete."""
        made = self.take()
        if self.is_named and self.is_complete and not self._sent:
            made.append(Delta("arguments", "{}"))
        self._deltas = made


def _unquoted(text: str) -> str:
    """Return the text of an object that is written as a string; an empty object for null."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # halves of characters
    return "{}" if value is None else text
