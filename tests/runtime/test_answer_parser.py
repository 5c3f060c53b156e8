"""Answers are split into reasoning, content and calls the same way, however their text arrives."""

from __future__ import annotations

import json
import random

import pytest

from inlay.runtime.answer_parser import AnswerParser
from inlay.runtime.tool_format import Markup, ToolFormat

pytestmark = pytest.mark.fast

TOOLS = frozenset({"a", "b", "f", "g", "weather", 'f"}'})
NOISE = ["", "{", "}", '"', "\\", "<", "[", " ", "x", ":", "<think>", "[ARGS]", "\u00a0"]
Parts = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and names and arguments of calls."""
TAGS = Markup(ToolFormat.TAGS, shows_tools=True, has_reasoning=True)
PLAIN = Markup(ToolFormat.TAGS, shows_tools=True)
OBJECTS = Markup(ToolFormat.OBJECTS, shows_tools=True)
LIST = Markup(ToolFormat.LIST, shows_tools=True)
NAMES = Markup(ToolFormat.NAMES, shows_tools=True)
CHANNELS = Markup(ToolFormat.CHANNELS, shows_tools=True)
PARIS = '{"city": "Paris", "days": [1, {"x": "}"}]}'
GOLDEN: dict[str, tuple[Markup, str, Parts]] = {
    "text only": (PLAIN, "Hello <b>you</b>, 3 < 4 {x}.\n", ("", "Hello <b>you</b>, 3 < 4 {x}.\n", [])),
    "a call": (
        PLAIN,
        f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
        ("", "", [("weather", PARIS)]),
    ),
    "text and two calls": (
        PLAIN,
        'Let me see.\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"s": "\\"}</tool_call>"}, "name": "b"}\n</tool_call>',
        ("", "Let me see.", [("a", "{}"), ("b", '{"s": "\\"}</tool_call>"}')]),
    ),
    "reasoning and a call": (
        TAGS,
        '<think>\nIs it {"name": 1}?\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ('Is it {"name": 1}?', "", [("f", '{"a": 1}')]),
    ),
    "reasoning and text": (TAGS, "<think>Hm.\n\nSo.</think>\n\n It is.", ("Hm.\n\nSo.", "It is.", [])),
    "no reasoning": (TAGS, "It is <think>.", ("", "It is <think>.", [])),
    "reasoning without end": (TAGS, "<think>Hm. </thi", ("Hm. </thi", "", [])),
    "arguments as a string": (
        PLAIN,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    "no arguments": (PLAIN, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    "null for arguments": (PLAIN, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
    "not a call": (PLAIN, "<tool_call>what?</tool_call>.", ("", "<tool_call>what?</tool_call>.", [])),
    "an object without a name": (
        PLAIN,
        'See <tool_call>{"title": "x"}</tool_call>.',
        ("", 'See <tool_call>{"title": "x"}</tool_call>.', []),
    ),
    "cut off in the name": (PLAIN, '<tool_call>{"name": "f', ("", '<tool_call>{"name": "f', [])),
    "cut off in the arguments": (
        PLAIN,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        ("", "", [("f", '{"a": "b')]),
    ),
    "objects": (
        OBJECTS,
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "an object after a token": (
        OBJECTS,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"name": "x"}}',
        ("", "", [("f", '{"name": "x"}')]),
    ),
    "JSON that is no call": (OBJECTS, '{"title": "x"}', ("", '{"title": "x"}', [])),
    "a function that does not exist": (OBJECTS, '{"name": "Alice", "age": 3}', ("", '{"name": "Alice", "age": 3}', [])),
    "objects that are no calls": (OBJECTS, '{"a": 1}, {"b": 2}', ("", '{"a": 1}, {"b": 2}', [])),
    "a mark in a text": (PLAIN, "Use the <tool_call> tag.", ("", "Use the <tool_call> tag.", [])),
    "another space": (OBJECTS, '\u00a0{"name": "f"', ("", '\u00a0{"name": "f"', [])),
    "half a character": (PLAIN, '<tool_call>{"name": "\\ud800"}', ("", '<tool_call>{"name": "\\ud800"}', [])),
    "an object in a text": (OBJECTS, 'It is {"name": "f"}.', ("", 'It is {"name": "f"}.', [])),
    "a list": (
        LIST,
        'I will.[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}, "id": "x"}]',
        ("", "I will.", [("f", '{"a": [1]}'), ("g", "{}")]),
    ),
    "names": (
        NAMES,
        'I will.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ("", "I will.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    "names in a list": (NAMES, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("", "", [("f", '{"a": 1}')])),
    "channels": (
        CHANNELS,
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        ("Need it.", "", [("f", '{"a": 1}')]),
    ),
    "channels, the recipient first": (
        CHANNELS,
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.g<|channel|>commentary<|message|>{}",
        ("So.", "", [("g", "{}")]),
    ),
    "channels of text": (
        CHANNELS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|> It is.\n",
        ("Hm.", "I look. It is.\n", []),
    ),
}


def _parse(markup: Markup, pieces: list[str], *, tools: frozenset[str] = TOOLS, is_thinking: bool = False) -> Parts:
    parser = AnswerParser(markup, tools=tools, is_thinking=is_thinking)
    found = [delta for piece in pieces for delta in parser.add(piece)] + parser.finish()
    texts, calls = {"reasoning": "", "content": ""}, list[list[str]]()
    for each in found:
        assert each.text or each.kind == "name", "no delta is empty"
        if each.kind == "name":
            calls.append([each.text, ""])
        elif each.kind == "arguments":
            calls[-1][1] += each.text
        else:
            texts[each.kind] += each.text
    return texts["reasoning"], texts["content"], [(name, given) for name, given in calls]


def _split(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), rng.randint(0, min(len(text), 12))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    """The parts of an answer, whole, character by character, and split at random."""
    markup, text, expected = GOLDEN[name]
    assert _parse(markup, [text]) == expected
    assert _parse(markup, list(text)) == expected
    seed = random.SystemRandom().randrange(1 << 32)
    for number in range(20):
        assert _parse(markup, _split(text, random.Random(seed + number))) == expected, seed + number


def test_a_prompt_that_ends_within_the_reasoning() -> None:
    assert _parse(TAGS, list("Hm.\n</think>\nYes."), is_thinking=True) == ("Hm.", "Yes.", [])


def test_without_tools_calls_are_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert _parse(TAGS, list(text), tools=frozenset()) == ("", text, [])
    assert _parse(TAGS, list("<think>Hm.</think>" + text), tools=frozenset()) == ("Hm.", text, [])


def test_arguments_are_streamed() -> None:
    """Arguments arrive while they are generated, not when they are complete."""
    parser = AnswerParser(PLAIN, tools=TOOLS, is_thinking=False)
    parser.add('<tool_call>{"name": "f", "arguments": {"text": "')
    for word in ("one ", "two "):
        assert [(each.kind, each.text.strip()) for each in parser.add(word)] == [("arguments", word.strip())]


@pytest.mark.parametrize("name", GOLDEN)
def test_damaged(name: str) -> None:
    """Any text has parts, and they do not depend on how it arrives."""
    markup, text, _ = GOLDEN[name]
    seed = random.SystemRandom().randrange(1 << 32)
    for number in range(60):
        rng = random.Random(seed + number)
        damaged = list(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(3)] = rng.choice(NOISE)
            damaged = damaged or ["x"]
        whole = "".join(damaged)
        expected = _parse(markup, [whole])
        assert _parse(markup, _split(whole, rng)) == expected, (seed + number, whole)
        assert _parse(markup, list(whole)) == expected, (seed + number, whole)


def test_a_random_object_is_read_as_json_reads_it() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    for number in range(200):
        rng = random.Random(seed + number)
        given = {rng.choice(['"', "a}", "ä\n", "\\"]): rng.choice([1, None, "}{", ["]", {}], {"name": "x"}])}
        call = {"name": 'f"}', "arguments": given}
        keys = rng.sample(sorted(call), 2)
        text = json.dumps(
            {key: call[key] for key in keys}, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])
        )
        _, content, calls = _parse(PLAIN, _split(f"<tool_call>{text}</tool_call>", rng))
        assert [(name, json.loads(each)) for name, each in calls] == [('f"}', given)], seed + number
        assert content == ""
