"""Tool calls and reasoning as models write them: formats, found in the chat template, and grammars that force calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.runtime.grammar import JSON_OPTIONS, Grammar
from inlay.runtime.json_schema import prepare_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.runtime.text_codec import TextCodec

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CODE = "<|python_tag|>"
CHANNEL, MESSAGE, START, END, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"
FUNCTIONS = "functions."
FINAL = f"{CHANNEL}final{MESSAGE}"


class ToolFormat(Enum):
    """How calls are written."""

    TAGS = "tags"
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, once for each call"""
    OBJECTS = "objects"
    """`{"name": ..., "parameters": ...}`, separated by semicolons, instead of a text"""
    LIST = "list"
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`"""
    NAMES = "names"
    """`[TOOL_CALLS]name[ARGS]{...}`, once for each call"""
    CHANNELS = "channels"
    """`<|channel|>commentary to=functions.name<|message|>{...}`; reasoning and text have channels too"""


@dataclass(frozen=True)
class Markup:
    """What a chat template shows of the answers of its model."""

    tools: ToolFormat = ToolFormat.TAGS
    shows_tools: bool = False
    """Whether the template tells the model about tools. Otherwise a system message does."""
    has_reasoning: bool = False
    """Whether answers may begin with reasoning in `<think>` tags."""
    has_short_ids: bool = False
    """Whether the template rejects ids of calls that are not nine letters and digits."""

    @classmethod
    def of(cls, source: str, variables: frozenset[str]) -> Markup:
        """Return the markup of a template that uses these variables."""
        found = None
        if CHANNEL in source:
            found = ToolFormat.CHANNELS
        elif CALLS in source:
            found = ToolFormat.NAMES if ARGS in source else ToolFormat.LIST
        elif "<function=" in source or "<arg_key>" in source:
            found = None  # calls that are no JSON
        elif CALL in source:
            found = ToolFormat.TAGS
        elif CODE in source or '{"name": function name, "parameters":' in source:
            found = ToolFormat.OBJECTS
        known = "tools" in variables and found is not None
        return cls(
            found if found is not None and (known or found is ToolFormat.CHANNELS) else ToolFormat.TAGS,
            known,
            END_THINK in source and found is not ToolFormat.CHANNELS,
            re.search(r"id\s*\|\s*length\s*!=\s*9\b", source) is not None,
        )

    def grammar_start(self, prompt: str) -> str:
        """Return the text after which a grammar applies to the answer to a prompt; empty: from the start."""
        if self.tools is ToolFormat.CHANNELS:
            return FINAL if prompt.endswith(f"{START}assistant") else ""
        return END_THINK if self.has_reasoning and prompt.endswith(THINK) else ""

    @property
    def has_special_tokens(self) -> bool:
        """Whether special tokens of the model are a part of the format."""
        return self.tools is not ToolFormat.TAGS


def force_calls(
    markup: Markup,
    tools: Sequence[Mapping[str, Any]],
    text: TextCodec,
    *,
    has_many: bool,
    otherwise: Grammar | None = None,
) -> Grammar:
    """Return the grammar of an answer that calls at least one of these functions, and only one unless `has_many`.

    Instead of calls, the answer may be JSON as `otherwise` states.
    """
    style, literal = markup.tools, _Literals(text)
    if otherwise is not None and style is ToolFormat.OBJECTS:
        problem = "This model writes calls as JSON objects, which a schema for the answer excludes."
        raise UsageError(problem, "Leave the schema or the tools out.")
    calls, rules = [], []
    for place, tool in enumerate(tools):
        name = json.dumps(tool["name"])
        schema = prepare_schema({"type": "object", **(tool.get("parameters") or {})})
        if not schema.get("properties") and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        rules.append(f"arguments_{place}: {_json(schema)}")
        key = "parameters" if style is ToolFormat.OBJECTS else "arguments"
        whole = [f'{{"name": {name}, "{key}": ', f"@arguments_{place}", "}"]
        parts = {
            ToolFormat.TAGS: [CALL, "\n", *whole, "\n", END_CALL],
            ToolFormat.OBJECTS: whole,
            ToolFormat.LIST: whole,
            ToolFormat.NAMES: [CALLS, tool["name"], ARGS, f"@arguments_{place}"],
            ToolFormat.CHANNELS: [
                *(CHANNEL, f"commentary to={FUNCTIONS}{tool['name']} ", CONSTRAIN, "json", MESSAGE),
                f"@arguments_{place}",
            ],
        }[style]
        calls.append(f"call_{place}")
        rules.append(f"call_{place}: {literal.join(parts)}")
    separator = {ToolFormat.TAGS: "\n", ToolFormat.OBJECTS: "; ", ToolFormat.LIST: ", "}.get(style, "")
    more = f"({literal.join([separator]) if separator else ''} call)*"
    several = f"call {more}" if has_many and style is not ToolFormat.CHANNELS else "call"
    before, after = "", ""
    if style is ToolFormat.LIST:
        before, after = literal.join([CALLS, "["]), literal.join(["]"])
    elif style is ToolFormat.CHANNELS:
        rules.append("THOUGHT: /(.|\\n)*/")
        thought = literal.join([CHANNEL, "analysis", MESSAGE]), literal.join([END, START, "assistant"])
        before = f"({thought[0]} THOUGHT {thought[1]})?"
    if otherwise is not None:
        final = [CHANNEL, "final", MESSAGE] if style is ToolFormat.CHANNELS else []
        rules.append(f"answer: {literal.join([*final, '@json'])}")
        rules.append(f"json: {_json(prepare_schema(json.loads(otherwise.text)))}")
        several, before, after = f"({before} {several} {after} | answer)", "", ""
    lines = ["%llguidance {}", f"start: {before} {several} {after}", f"call: {' | '.join(calls)}", *rules]
    return Grammar("grammar", "\n".join(lines))


def _json(schema: Any) -> str:
    """Return JSON of a schema as a rule."""
    options = {"x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(options | schema if isinstance(schema, dict) else options | {'allOf': [schema]})}"


class _Literals:
    """Writes texts as terminals: special tokens by number, because no text matches them."""

    def __init__(self, text: TextCodec) -> None:
        added = text.tokenizer.get_added_tokens_decoder()
        self._special = {each.content: number for number, each in added.items() if each.special}

    def join(self, parts: Sequence[str]) -> str:
        """Return parts one after the other. `@name` is a rule."""
        return " ".join(
            part[1:]
            if part.startswith("@")
            else f"<[{self._special[part]}]>"
            if part in self._special
            else json.dumps(part)
            for part in parts
        )


_EXPLANATION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-json-object>}}
</tool_call>"""


def shorten_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which the ids of calls are nine letters and digits. Equal ids stay equal.

    >>> shorten_ids([{"role": "tool", "tool_call_id": "call_abcdefgh"}, {"role": "tool", "tool_call_id": "a1b2c3d4e"}])
    [{'role': 'tool', 'tool_call_id': '36f471eda'}, {'role': 'tool', 'tool_call_id': 'a1b2c3d4e'}]
    """

    def short(id_: str) -> str:
        return id_ if re.fullmatch("[A-Za-z0-9]{9}", id_) else sha256(id_.encode()).hexdigest()[:9]

    made = []
    for message in map(dict, messages):
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = short(message["tool_call_id"])
        if message.get("tool_calls"):
            message["tool_calls"] = [{**each, "id": short(str(each.get("id", "")))} for each in message["tool_calls"]]
        made.append(message)
    return made


def explain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[dict[str, Any]]:
    """Return messages for a template that shows no tools: calls and results are text, and a message lists the tools.

    That is the system message, or the first one of the user if there cannot be a system message.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls") or ():
            written = json.dumps(dict(call["function"]), ensure_ascii=False)
            content = f"{content}\n{CALL}\n{written}\n{END_CALL}".lstrip("\n")
        if made and role == made[-1]["role"] == "user":
            made[-1]["content"] += "\n" + content
        else:
            made.append({"role": role, "content": content})
    if tools:
        said = _EXPLANATION.format(tools="\n".join(json.dumps(dict(each), ensure_ascii=False) for each in tools))
        role = "system" if has_system else "user"
        if made[0]["role"] != role:
            made.insert(0, {"role": role, "content": said})
        elif has_system:
            made[0]["content"] = f"{made[0]['content']}\n\n{said}"
        else:
            made[0]["content"] = f"{said}\n\n{made[0]['content']}"
    return made
