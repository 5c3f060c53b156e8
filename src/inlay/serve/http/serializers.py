"""How answers are written: whole and in chunks, in the form of each of the two routes.

A chunk is made for every token, so it is put together from text that was written once.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Protocol

from inlay.runtime.outputs import FinishReason
from inlay.serve.http.schema import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    SampledTokenLogprob,
    TokenLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.outputs import TokenOutput
    from inlay.serve.http.schema import ApiFinishReason, Usage
    from inlay.serve.http.token_text import TokenText

LEAST = -9999.0
"""Stands for a likelihood of 0, whose logarithm JSON cannot hold."""
API_FINISH_REASONS: dict[FinishReason, ApiFinishReason] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class ResponseSerializer(Protocol):
    """How one route writes answers."""

    def first_chunk(self, index: int) -> str:
        """What stands before the first chunk of a choice."""
        ...

    def chunk(self, index: int, piece: TokenOutput) -> str:
        """One piece of a choice; empty if it says nothing."""
        ...

    def usage(self, usage: Usage) -> str:
        """The chunk that says how much was read and written."""
        ...

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        """Whole answers."""
        ...


class _Chunks:
    """What chunks of both routes have in common."""

    def __init__(self, head: dict[str, Any], kind: str, spelling: TokenText | None, usage: bool) -> None:
        self._head, self._token_text = head, spelling
        self._begin = "data: " + json.dumps({**head, "object": kind}, separators=(",", ":"))[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"

    def usage(self, usage: Usage) -> str:
        return f'{self._begin}],"usage":{usage.model_dump_json()}}}\n\n'

    def _chunk(self, index: int, what: str, logprobs: str, finish: str | None) -> str:
        reason = "null" if finish is None else f'"{finish}"'
        choice = f'{{"index":{index},{what},"logprobs":{logprobs},"finish_reason":{reason}}}]'
        return self._begin + choice + self._end


class ChatSerializer(_Chunks):
    """`/v1/chat/completions`"""

    def __init__(self, head: dict[str, Any], spelling: TokenText | None, usage: bool) -> None:
        super().__init__(head, "chat.completion.chunk", spelling, usage)

    def first_chunk(self, index: int) -> str:
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def chunk(self, index: int, piece: TokenOutput) -> str:
        written, logprobs = "", "null"
        if self._token_text is not None and _has_logprobs(piece):
            logprobs = ChatLogprobs(content=[_sampled_logprob(piece, self._token_text)]).model_dump_json()
        if piece.text or logprobs != "null":
            written = self._chunk(index, f'"delta":{{"content":{quoted(piece.text)}}}', logprobs, None)
        if piece.finish_reason is not None:
            written += self._chunk(index, '"delta":{}', "null", API_FINISH_REASONS[piece.finish_reason])
        return written

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        made = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content="".join(piece.text for piece in pieces)),
                logprobs=self._logprobs(pieces),
                finish_reason=_finish_reason(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return ChatResponse(**self._head, choices=made, usage=usage).model_dump_json().encode()

    def _logprobs(self, pieces: Sequence[TokenOutput]) -> ChatLogprobs | None:
        if self._token_text is None:
            return None
        return ChatLogprobs(
            content=[_sampled_logprob(piece, self._token_text) for piece in pieces if _has_logprobs(piece)]
        )


class CompletionSerializer(_Chunks):
    """`/v1/completions`"""

    def __init__(self, head: dict[str, Any], spelling: TokenText | None, usage: bool) -> None:
        super().__init__(head, "text_completion", spelling, usage)
        self._offsets: dict[int, int] = {}

    def first_chunk(self, index: int) -> str:
        return ""

    def chunk(self, index: int, piece: TokenOutput) -> str:
        logprobs = "null"
        if self._token_text is not None and _has_logprobs(piece):
            made, self._offsets[index] = _completion_logprobs([piece], self._token_text, self._offsets.get(index, 0))
            logprobs = made.model_dump_json()
        if not piece.text and piece.finish_reason is None and logprobs == "null":
            return ""
        finish = None if piece.finish_reason is None else API_FINISH_REASONS[piece.finish_reason]
        return self._chunk(index, f'"text":{quoted(piece.text)}', logprobs, finish)

    def full_response(self, choices: Sequence[Sequence[TokenOutput]], usage: Usage) -> bytes:
        made = [
            CompletionChoice(
                index=index,
                text="".join(piece.text for piece in pieces),
                logprobs=None if self._token_text is None else _completion_logprobs(pieces, self._token_text, 0)[0],
                finish_reason=_finish_reason(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return CompletionResponse(**self._head, choices=made, usage=usage).model_dump_json().encode()


def _has_logprobs(piece: TokenOutput) -> bool:
    """Whether the likelihood of a piece is told: that of an end token, which is no part of the text, is not."""
    return piece.logprobs is not None and piece.finish_reason is not FinishReason.EOS


def _finish_reason(pieces: Sequence[TokenOutput]) -> ApiFinishReason:
    finish = pieces[-1].finish_reason
    assert finish is not None  # the answer was read to its end
    return API_FINISH_REASONS[finish]


def _sampled_logprob(piece: TokenOutput, spelling: TokenText) -> SampledTokenLogprob:
    """A token with its likelihood, in the newer form."""
    assert piece.logprobs is not None
    top = [_token_logprob(token, logprob, spelling) for token, logprob in piece.logprobs.top]
    chosen = _token_logprob(piece.token, piece.logprobs.logprob, spelling)
    return SampledTokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)


def _token_logprob(token: int, logprob: float, spelling: TokenText) -> TokenLogprob:
    text, raw = spelling(token)
    return TokenLogprob(token=text, logprob=max(logprob, LEAST), bytes=None if raw is None else list(raw))


def _completion_logprobs(
    pieces: Sequence[TokenOutput], spelling: TokenText, offset: int
) -> tuple[CompletionLogprobs, int]:
    """Tokens with their likelihoods, in the older form, and where the next token would begin."""
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for piece in filter(_has_logprobs, pieces):
        assert piece.logprobs is not None
        text, logprob = spelling(piece.token)[0], max(piece.logprobs.logprob, LEAST)
        others = {spelling(token)[0]: max(each, LEAST) for token, each in piece.logprobs.top}
        made.tokens.append(text)
        made.token_logprobs.append(logprob)
        made.top_logprobs.append({**others, text: logprob})
        made.text_offset.append(offset)
        offset += len(text)
    return made, offset
