"""Serialization of responses, full and in chunks, for the two generation routes.

Every token is one chunk, so chunks are assembled from text that is serialized once.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from inlay.runtime.outputs import FinishReason
from inlay.serve.http.response_schema import (
    AnswerToolCall,
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    FunctionCall,
    PromptToken,
    SampledTokenLogprob,
    TokenLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.answer_parser import AnswerParser, Delta
    from inlay.runtime.outputs import TokenLogprobs, TokenOutput
    from inlay.serve.http.answer_form import AnswerForm
    from inlay.serve.http.response_schema import ApiFinishReason, PromptLogprobs, Usage
    from inlay.serve.http.token_text import TokenText

LEAST = -9999.0
"""The logprob of probability 0, because JSON has no infinity."""
API_FINISH_REASONS: dict[FinishReason, ApiFinishReason] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True)
class PromptForm:
    """How the logprobs of prompts are returned: the prompt of each choice, and the number of top logprobs."""

    prompts: Sequence[Sequence[int]]
    spelling: TokenText
    most: int

    def write(self, index: int, pieces: Sequence[TokenOutput]) -> PromptLogprobs:
        """Return the logprobs of the prompt of a choice."""
        made: PromptLogprobs = [None]
        for token, found in zip(self.prompts[index][1:], pieces[0].prompt_logprobs or (), strict=True):
            values = {**dict(found.top[: self.most]), token: found.logprob}
            made.append(
                {
                    str(each): PromptToken(logprob=max(value, LEAST), decoded_token=self.spelling(each)[0])
                    for each, value in values.items()
                }
            )
        return made


class ResponseSerializer:
    """The serializer of one route."""

    prompt_form: PromptForm | None = None
    """Set if the request asks for logprobs of the prompt."""

    def __init__(self, head: dict[str, Any], kind: str, spelling: TokenText | None, usage: bool) -> None:
        self._head, self._token_text = head, spelling
        self._begin = "data: " + json.dumps({**head, "object": kind}, separators=(",", ":"))[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"

    def first_chunk(self, index: int) -> str:
        """Return the chunk that begins a choice; may be empty."""
        return ""

    def chunk(self, index: int, piece: TokenOutput) -> str:
        """Return the chunk of one token; empty if there is nothing to send."""
        raise NotImplementedError

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        """Return the full response as JSON."""
        raise NotImplementedError

    def _prompt_logprobs(self, index: int, pieces: Sequence[TokenOutput]) -> PromptLogprobs | None:
        return None if self.prompt_form is None else self.prompt_form.write(index, pieces)

    def usage(self, usage: Usage) -> str:
        """Return the chunk with the token counts."""
        return f'{self._begin}],"usage":{usage.model_dump_json()}}}\n\n'

    def _chunk(self, index: int, what: str, logprobs: str, finish: str | None) -> str:
        reason = "null" if finish is None else f'"{finish}"'
        choice = f'{{"index":{index},{what},"logprobs":{logprobs},"finish_reason":{reason}}}]'
        return self._begin + choice + self._end


class ChatSerializer(ResponseSerializer):
    """`/v1/chat/completions`"""

    def __init__(self, head: dict[str, Any], spelling: TokenText | None, usage: bool, form: AnswerForm) -> None:
        super().__init__(head, "chat.completion.chunk", spelling, usage)
        self._form = form
        self._parsers: dict[int, AnswerParser | None] = {}
        self._calls: dict[int, int] = {}
        """The number of calls of each choice, as far as it was sent."""

    def first_chunk(self, index: int) -> str:
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def chunk(self, index: int, piece: TokenOutput) -> str:
        written, logprobs = "", "null"
        if self._token_text is not None and _has_logprobs(piece):
            logprobs = ChatLogprobs(content=[_sampled_logprob(piece, self._token_text)]).model_dump_json()
        deltas = self._deltas(index, piece)
        if not deltas and logprobs != "null":
            deltas = ['"content":""']
        for delta in deltas:
            written += self._chunk(index, f'"delta":{{{delta}}}', logprobs, None)
            logprobs = "null"
        if piece.finish_reason is not None:
            finish = _with_calls(API_FINISH_REASONS[piece.finish_reason], index in self._calls)
            written += self._chunk(index, '"delta":{}', "null", finish)
        return written

    def _deltas(self, index: int, piece: TokenOutput) -> list[str]:
        """Return the content of the deltas of a chunk."""
        if index not in self._parsers:
            self._parsers[index] = self._form.parser()
        parser = self._parsers[index]
        if parser is None:
            return [f'"content":{quoted(piece.text)}'] if piece.text else []
        found = parser.add(piece.text) + (parser.finish() if piece.finish_reason is not None else [])
        return [written for each in found if (written := self._delta(index, each))]

    def _delta(self, index: int, delta: Delta) -> str:
        if delta.kind == "content":
            return f'"content":{quoted(delta.text)}'
        if delta.kind == "reasoning":
            return f'"reasoning_content":{quoted(delta.text)}' if self._form.shows_reasoning else ""
        if delta.kind == "name":
            self._calls[index] = self._calls.get(index, 0) + 1
            head = f'"id":"{_call_id()}","type":"function",'
            function = f'{{"name":{quoted(delta.text)},"arguments":""}}'
        else:
            head, function = "", f'{{"arguments":{quoted(delta.text)}}}'
        return f'"tool_calls":[{{"index":{self._calls[index] - 1},{head}"function":{function}}}]'

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        made = [
            ChatChoice(
                index=index,
                prompt_logprobs=self._prompt_logprobs(index, pieces),
                message=(message := self._message("".join(piece.text for piece in pieces))),
                logprobs=self._logprobs(pieces),
                finish_reason=_with_calls(_finish_reason(pieces), bool(message.tool_calls)),
            )
            for index, pieces in enumerate(choices)
        ]
        return ChatResponse(**self._head, choices=made, usage=usage).model_dump_json().encode()

    def _message(self, text: str) -> AssistantMessage:
        parser = self._form.parser()
        if parser is None:
            return AssistantMessage(content=text)
        parts = {"content": "", "reasoning": ""}
        calls: list[AnswerToolCall] = []
        for each in parser.add(text) + parser.finish():
            if each.kind == "name":
                calls.append(AnswerToolCall(id=_call_id(), function=FunctionCall(name=each.text, arguments="")))
            elif each.kind == "arguments":
                calls[-1].function.arguments += each.text
            else:
                parts[each.kind] += each.text
        return AssistantMessage(
            content=parts["content"] if parts["content"] or not calls else None,
            reasoning_content=(parts["reasoning"] or None) if self._form.shows_reasoning else None,
            tool_calls=calls or None,
        )

    def _logprobs(self, pieces: Sequence[TokenOutput]) -> ChatLogprobs | None:
        if self._token_text is None:
            return None
        return ChatLogprobs(
            content=[_sampled_logprob(piece, self._token_text) for piece in pieces if _has_logprobs(piece)]
        )


class CompletionSerializer(ResponseSerializer):
    """`/v1/completions`. `echo`: the prompt of each choice as text and as tokens, which begins its text."""

    def __init__(
        self,
        head: dict[str, Any],
        spelling: TokenText | None,
        usage: bool,
        echo: Sequence[tuple[str, Sequence[int]]] | None,
    ) -> None:
        super().__init__(head, "text_completion", spelling, usage)
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def first_chunk(self, index: int) -> str:
        return "" if self._echo is None else self._chunk(index, f'"text":{quoted(self._prompt(index))}', "null", None)

    def _prompt(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index][0]

    def chunk(self, index: int, piece: TokenOutput) -> str:
        logprobs = "null"
        if self._token_text is not None and _has_logprobs(piece):
            assert piece.logprobs is not None
            made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
            offset = self._offsets.get(index, 0)
            self._offsets[index] = _add_logprobs(made, piece.token, piece.logprobs, self._token_text, offset)
            logprobs = made.model_dump_json()
        if not piece.text and piece.finish_reason is None and logprobs == "null":
            return ""
        finish = None if piece.finish_reason is None else API_FINISH_REASONS[piece.finish_reason]
        return self._chunk(index, f'"text":{quoted(piece.text)}', logprobs, finish)

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        made = [
            CompletionChoice(
                index=index,
                prompt_logprobs=self._prompt_logprobs(index, pieces),
                text=self._prompt(index) + "".join(piece.text for piece in pieces),
                logprobs=None if self._token_text is None else self._logprobs(index, pieces, self._token_text),
                finish_reason=_finish_reason(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return CompletionResponse(**self._head, choices=made, usage=usage).model_dump_json().encode()

    def _logprobs(self, index: int, pieces: Sequence[TokenOutput], spelling: TokenText) -> CompletionLogprobs:
        head, offset = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[]), 0
        if self._echo is not None:
            first, *others = self._echo[index][1]
            head.tokens.append(spelling(first)[0])
            head.token_logprobs.append(None)
            head.top_logprobs.append(None)
            head.text_offset.append(0)
            offset = len(head.tokens[0])
            for token, each in zip(others, pieces[0].prompt_logprobs or (), strict=True):
                offset = _add_logprobs(head, token, each, spelling, offset)
        for piece in filter(_has_logprobs, pieces):
            assert piece.logprobs is not None
            offset = _add_logprobs(head, piece.token, piece.logprobs, spelling, offset)
        return head


def _call_id() -> str:
    """Return the id of a call: nine letters and digits, because some chat templates accept no other."""
    return secrets.token_hex(5)[:9]


def _with_calls(finish: ApiFinishReason, has_calls: bool) -> ApiFinishReason:
    return "tool_calls" if has_calls and finish == "stop" else finish


def _has_logprobs(piece: TokenOutput) -> bool:
    """Whether to report the logprobs of a token. End tokens are not part of the text, so theirs are left out."""
    return piece.logprobs is not None and piece.finish_reason is not FinishReason.EOS


def _finish_reason(pieces: Sequence[TokenOutput]) -> ApiFinishReason:
    finish = pieces[-1].finish_reason
    assert finish is not None  # the last output of a sequence always has one
    return API_FINISH_REASONS[finish]


def _sampled_logprob(piece: TokenOutput, spelling: TokenText) -> SampledTokenLogprob:
    """Return a token and its logprobs in chat format."""
    assert piece.logprobs is not None
    top = [_token_logprob(token, logprob, spelling) for token, logprob in piece.logprobs.top]
    chosen = _token_logprob(piece.token, piece.logprobs.logprob, spelling)
    return SampledTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)


def _token_logprob(token: int, logprob: float, spelling: TokenText) -> TokenLogprob:
    text, raw = spelling(token)
    return TokenLogprob(token=text, logprob=max(logprob, LEAST), bytes=None if raw is None else list(raw))


def _add_logprobs(made: CompletionLogprobs, token: int, found: TokenLogprobs, spelling: TokenText, offset: int) -> int:
    """Add a token in the format of `/v1/completions`; return the text offset of the next token."""
    text, logprob = spelling(token)[0], max(found.logprob, LEAST)
    made.tokens.append(text)
    made.token_logprobs.append(logprob)
    made.top_logprobs.append({**{spelling(each)[0]: max(value, LEAST) for each, value in found.top}, text: logprob})
    made.text_offset.append(offset)
    return offset + len(text)
