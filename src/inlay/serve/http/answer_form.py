"""The form of answers to an HTTP request: text, tool calls, or what a grammar states, and how they are split."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inlay.errors import UsageError
from inlay.runtime.answer_parser import AnswerParser
from inlay.runtime.grammar import Grammar
from inlay.runtime.tool_format import END_THINK, ToolFormat, force_calls
from inlay.serve.http.errors import ApiError
from inlay.serve.http.schema import ChatRequest, CompletionRequest, JsonSchemaFormat, NamedTool

if TYPE_CHECKING:
    from inlay.runtime.text_codec import TextCodec
    from inlay.runtime.tool_format import Markup
    from inlay.serve.http.schema import ResponseFormat, StructuredOutputs


@dataclass(frozen=True)
class AnswerForm:
    """How the answers to a request are split into reasoning, content and tool calls."""

    markup: Markup | None = None
    """None: all of an answer is content."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that may be called."""
    must_call: bool = False
    is_thinking: bool = False
    """Whether the prompt ends within the reasoning."""
    shows_reasoning: bool = True
    grammar_start: str = ""
    """The text after which a grammar applies; empty: it applies from the start."""

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest, prompts: list[tuple[int, ...]], text: TextCodec) -> AnswerForm:
        """Return the form of the answers to a request, of which the prompts were encoded."""
        if isinstance(body, CompletionRequest) or text.chat is None:
            return cls()
        markup, tools, choice = text.chat.markup, tools_of(body), body.tool_choice
        if isinstance(choice, NamedTool):
            tools = tuple(each for each in tools if each["name"] == choice.function.name)
        elif choice == "none":
            tools = ()
        must_call = isinstance(choice, NamedTool) or choice == "required"
        if must_call and not tools:
            problem = "tool_choice names no function of tools." if body.tools else "tool_choice requires tools."
            raise ApiError(400, problem, param="tool_choice")
        has_channels, start = markup.tools is ToolFormat.CHANNELS, text.grammar_start(prompts[0])
        is_thinking = start == END_THINK and body.separate_reasoning is not False
        if body.separate_reasoning is False:
            markup = replace(markup, has_reasoning=False)
        if not (tools or markup.has_reasoning or has_channels):
            return cls(grammar_start=start)
        if has_channels and tools:
            start = ""  # the grammar of the calls has the channels
        return cls(markup, tools, must_call, is_thinking, body.include_reasoning is not False, start)

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text of an answer must contain special tokens."""
        return self.markup is not None and self.markup.has_special_tokens

    def parser(self) -> AnswerParser | None:
        """Return a parser for one answer; None if all of it is content."""
        if self.markup is None:
            return None
        names = {each["name"] for each in self.tools}
        return AnswerParser(self.markup, tools=names, is_thinking=self.is_thinking)


def tools_of(body: ChatRequest) -> tuple[dict[str, Any], ...]:
    """Return the functions of a request."""
    found = [each.function.model_dump(exclude_none=True, exclude={"strict"}) for each in body.tools or ()]
    if len({each["name"] for each in found}) < len(found):
        raise ApiError(400, "Two tools have the same name.", param="tools")
    return tuple(
        {**each, "parameters": each.get("parameters") or {"type": "object", "properties": {}}} for each in found
    )


async def read_grammar(body: ChatRequest | CompletionRequest, form: AnswerForm, text: TextCodec) -> Grammar | None:
    """Return what the answer must be, after it was compiled; None if it is free."""
    stated, asked = body.structured_outputs, body.response_format
    if asked is not None and asked.type == "text":
        asked = None
    if stated and asked:
        raise ApiError(400, "Send either structured_outputs or response_format.", param="response_format")
    param = "structured_outputs" if stated else "response_format" if asked else "tools"
    if form.must_call and (stated or asked):
        raise ApiError(400, f"A tool_choice that forces a call and {param} exclude each other.", param=param)
    if form.tools and stated and stated.json_ is None and not stated.json_object:
        raise ApiError(400, "structured_outputs other than JSON and tools exclude each other.", param=param)

    def compile_it() -> Grammar:
        made = _grammar(stated, asked) if stated or asked else None
        if form.markup is not None and form.tools:
            assert isinstance(body, ChatRequest)
            has_many = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
            made = force_calls(form.markup, form.tools, text, has_many=has_many, otherwise=made)
        assert made is not None
        text.grammars.open(made)
        return made

    if not (stated or asked or form.must_call):
        return None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise ApiError(400, f"{name} and {param} exclude each other.", param=name)
    try:
        return await asyncio.to_thread(compile_it)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from error


def _grammar(asked: StructuredOutputs | None, form: ResponseFormat | None) -> Grammar | None:
    if asked is None:
        schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else None
        return Grammar.json_schema(schema or {"type": "object"})
    if asked.regex is not None:
        return Grammar("regex", asked.regex)
    if asked.grammar is not None:
        return Grammar("grammar", asked.grammar)
    if asked.choice is not None:
        return Grammar.choice(asked.choice)
    if isinstance(asked.json_, str):
        return Grammar("json", asked.json_)
    return Grammar.json_schema(asked.json_ or {"type": "object"})
