"""Tools are shown to models as their templates do it, and forced calls are calls that fit the functions."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy as np
import pytest

from inlay.errors import UsageError
from inlay.runtime.answer_parser import AnswerParser
from inlay.runtime.chat_template import ChatTemplate
from inlay.runtime.grammar import Grammar
from inlay.runtime.tool_format import Markup, ToolFormat, force_calls
from tests.text_models import byte_tokenizer, text_of

if TYPE_CHECKING:
    from inlay.runtime.text_codec import TextCodec

SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
)
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["city"],
        "$defs": {"city": {"enum": ["Paris", "Köln", 'the "City"']}},
    },
}
NOW: dict[str, Any] = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Sunny?"}]
CALL = {"id": "123456789", "type": "function", "function": {"name": "now", "arguments": {"a": "ü"}}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *TALK,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "12:00", "tool_call_id": "123456789"},
    {"role": "tool", "content": "12:01", "tool_call_id": "123456789"},
]
BLIND = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATES = {
    ToolFormat.TAGS: "{% if tools %}{{ tools | tojson }}Write <tool_call>{% endif %}",
    ToolFormat.OBJECTS: '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}',
    ToolFormat.LIST: "{% for t in tools %}{% endfor %}[TOOL_CALLS]",
    ToolFormat.NAMES: "{% for t in tools %}{% endfor %}[TOOL_CALLS]name[ARGS]",
    ToolFormat.CHANNELS: "{% for t in tools %}{% endfor %}<|channel|>{{ reasoning_effort }}",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return text_of(tokenizer, tmp_path_factory.mktemp("tokenizer"))


def _random_answer(text: TextCodec, grammar: Grammar, rng: random.Random) -> str:
    """Return an answer of random tokens that the grammar allows."""
    matcher, tokens = text.grammars.open(grammar), list[int]()
    for _ in range(4000):
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        special = [token for token in allowed if text.decode([token], with_special=True) in SPECIAL]
        if (token := rng.choice(special if special and rng.random() < 0.3 else allowed)) in text.eos:
            break
        tokens.append(token)
        if matcher.add(token):
            break
    else:
        raise AssertionError("no end")
    return text.decode(tokens, with_special=True)


def _calls(style: ToolFormat, answer: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = AnswerParser(Markup(style), tools={"get_weather", "now"}, is_thinking=False)
    content, calls = "", list[list[str]]()
    for each in parser.add(answer) + parser.finish():
        if each.kind == "name":
            calls.append([each.text, ""])
        elif each.kind == "arguments":
            calls[-1][1] += each.text
        elif each.kind == "content":
            content += each.text
    return content, [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("style", list(ToolFormat))
@pytest.mark.parametrize("has_many", [True, False])
def test_forced_calls(text: TextCodec, style: ToolFormat, has_many: bool) -> None:
    """Every answer that the grammar allows is read as calls whose arguments fit."""
    grammar = force_calls(Markup(style), [WEATHER, NOW], text, has_many=has_many)
    seed, counts, names = random.SystemRandom().randrange(1 << 32), set[int](), set[str]()
    for number in range(30):
        answer = _random_answer(text, grammar, random.Random(seed + number))
        content, calls = _calls(style, answer)
        assert content == "", (seed + number, answer)
        assert calls, (seed + number, answer)
        for name, given in calls:
            wanted = WEATHER if name == "get_weather" else NOW
            assert name == wanted["name"]
            assert jsonschema_rs.is_valid(wanted["parameters"], given), (seed + number, answer)
            assert name != "now" or given == {}, "a function without parameters gets none"
        counts.add(len(calls))
        names |= {name for name, _ in calls}
    assert names == {"get_weather", "now"}
    assert (max(counts) > 1) == (has_many and style is not ToolFormat.CHANNELS)


@pytest.mark.parametrize("style", [each for each in ToolFormat if each is not ToolFormat.OBJECTS])
def test_a_call_or_json(text: TextCodec, style: ToolFormat) -> None:
    """With a schema for the answer, it is a call or JSON of the schema."""
    schema = {"type": "object", "properties": {"answer": {"enum": [1, 2]}}, "required": ["answer"]}
    grammar = force_calls(Markup(style), [NOW], text, has_many=False, otherwise=Grammar.json_schema(schema))
    found = set()
    for number in range(40):
        content, calls = _calls(style, _random_answer(text, grammar, random.Random(number)))
        if content:
            jsonschema_rs.validate(schema, json.loads(content))
        assert bool(content) != bool(calls)
        found.add(bool(calls))
    assert found == {True, False}
    with pytest.raises(UsageError, match="writes calls as JSON objects"):
        force_calls(Markup(ToolFormat.OBJECTS), [NOW], text, has_many=False, otherwise=Grammar.json_schema(schema))


@pytest.mark.parametrize("style", list(ToolFormat))
def test_the_format_is_found_in_the_template(style: ToolFormat) -> None:
    markup = ChatTemplate(TEMPLATES[style], {}).markup
    assert (markup.tools, markup.shows_tools) == (style, True)
    assert not markup.has_reasoning


def test_other_templates() -> None:
    assert ChatTemplate(BLIND, {}).markup == Markup()
    unknown = ChatTemplate(
        "{{ tools }}<tool_call><function=name>{% if enable_thinking %}<think></think>{% endif %}", {}
    )
    assert unknown.markup == Markup(ToolFormat.TAGS, shows_tools=False, has_reasoning=True), "calls in no known form"


def test_templates_get_tools_and_options() -> None:
    source = "{% for t in tools or () %}{{ t.type }}:{{ t.function.name }}{% endfor %}<tool_call>{{ enable_thinking }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(TALK, [NOW], {"enable_thinking": False}) == "function:now<tool_call>False"
    assert template.render(TALK) == "<tool_call>"
    for name in ("enable_thinkin", "messages", "tools", "bos_token", "self", "range", "namespace"):
        with pytest.raises(UsageError, match=rf"has no option {name}. Its options: enable_thinking."):
            template.render(TALK, (), {name: 1})


def test_a_template_that_shows_no_tools() -> None:
    """Tools, calls and results are text."""
    template = ChatTemplate(BLIND, {})
    made = template.render(TURNS, [NOW])
    assert made.startswith("<system>Be brief.\n\n# Tools")
    assert json.dumps(NOW) in made
    call = '<tool_call>\n{"name": "now", "arguments": {"a": "ü"}}\n</tool_call>'
    results = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in ("12:00", "12:01"))
    assert made.endswith(f"<user>Sunny?<assistant>{call}\n{call}<user>{results}")
    assert template.render(TALK, [NOW]).startswith("<system># Tools")
    assert template.render(TALK) == "<user>Sunny?"
    assert "<tool_response>" in template.render(TURNS), "earlier calls are shown without tools too"


@pytest.mark.parametrize("system", ["{{ raise_exception('no system message') }}", ""], ids=["an error", "left out"])
def test_a_template_without_system_messages(system: str) -> None:
    """The first message of the user explains the tools."""
    template = ChatTemplate(
        BLIND.replace("<{{", "{% if m.role == 'system' %}" + system + "{% else %}<{{", 1).replace(
            "{% endfor", "{% endif %}{% endfor"
        ),
        {},
    )
    made = template.render(TURNS[1:], [NOW])
    assert made.startswith("<user># Tools")
    assert "</tool_call>\n\nSunny?<assistant>" in made
    assert template.render(TALK) == "<user>Sunny?"


def test_a_template_that_rejects_long_ids() -> None:
    """Mistral's do. The id of a call is that of its result."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or () %}"
        "{% if c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}[TOOL_CALLS]{{ c.id }}{% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}{{ tools }}"
    )
    given = json.loads(json.dumps(TURNS).replace('"123456789"', '"call_8fd5"'))
    template = ChatTemplate(source, {})
    first, second, *results = re.findall(r"[0-9a-f]{9}", template.render(given, [NOW]))
    assert [first, second] == results
    assert template.render(TURNS).count("123456789") == 4, "such an id stays"
