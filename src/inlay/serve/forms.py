"""How answers are written: whole and in chunks, in the form of each of the two routes.

A chunk is made for every token, so it is put together from text that was written once.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, Protocol

from inlay.runtime.pieces import Finish
from inlay.serve.schema import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChosenLikelihood,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenLikelihood,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.runtime.pieces import Piece
    from inlay.serve.schema import Finished, Usage
    from inlay.serve.spelling import Spelling

LEAST = -9999.0
"""Stands for a likelihood of 0, whose logarithm JSON cannot hold."""
FINISHED: dict[Finish, Finished] = {Finish.EOS: "stop", Finish.STOP: "stop", Finish.LENGTH: "length"}


class Form(Protocol):
    """How one route writes answers."""

    def opening(self, index: int) -> str:
        """What stands before the first chunk of a choice."""
        ...

    def chunk(self, index: int, piece: Piece) -> str:
        """One piece of a choice; empty if it says nothing."""
        ...

    def usage(self, usage: Usage) -> str:
        """The chunk that says how much was read and written."""
        ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """Whole answers."""
        ...


class _Chunks:
    """What chunks of both routes have in common."""

    def __init__(self, head: dict[str, Any], kind: str, spelling: Spelling | None, usage: bool) -> None:
        self._head, self._spelling = head, spelling
        self._begin = "data: " + json.dumps({**head, "object": kind}, separators=(",", ":"))[:-1] + ',"choices":['
        self._end = ',"usage":null}\n\n' if usage else "}\n\n"

    def usage(self, usage: Usage) -> str:
        return f'{self._begin}],"usage":{usage.model_dump_json()}}}\n\n'

    def _chunk(self, index: int, what: str, logprobs: str, finish: str | None) -> str:
        reason = "null" if finish is None else f'"{finish}"'
        choice = f'{{"index":{index},{what},"logprobs":{logprobs},"finish_reason":{reason}}}]'
        return self._begin + choice + self._end


class ChatForm(_Chunks):
    """`/v1/chat/completions`"""

    def __init__(self, head: dict[str, Any], spelling: Spelling | None, usage: bool) -> None:
        super().__init__(head, "chat.completion.chunk", spelling, usage)

    def opening(self, index: int) -> str:
        return self._chunk(index, '"delta":{"role":"assistant","content":""}', "null", None)

    def chunk(self, index: int, piece: Piece) -> str:
        written, logprobs = "", "null"
        if self._spelling is not None and _told(piece):
            logprobs = ChatLogprobs(content=[_chosen(piece, self._spelling)]).model_dump_json()
        if piece.text or logprobs != "null":
            written = self._chunk(index, f'"delta":{{"content":{quoted(piece.text)}}}', logprobs, None)
        if piece.finish is not None:
            written += self._chunk(index, '"delta":{}', "null", FINISHED[piece.finish])
        return written

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        made = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content="".join(piece.text for piece in pieces)),
                logprobs=self._logprobs(pieces),
                finish_reason=_finished(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return ChatCompletion(**self._head, choices=made, usage=usage).model_dump_json().encode()

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        if self._spelling is None:
            return None
        return ChatLogprobs(content=[_chosen(piece, self._spelling) for piece in pieces if _told(piece)])


class CompletionForm(_Chunks):
    """`/v1/completions`"""

    def __init__(self, head: dict[str, Any], spelling: Spelling | None, usage: bool) -> None:
        super().__init__(head, "text_completion", spelling, usage)
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> str:
        return ""

    def chunk(self, index: int, piece: Piece) -> str:
        logprobs = "null"
        if self._spelling is not None and _told(piece):
            made, self._offsets[index] = _listed([piece], self._spelling, self._offsets.get(index, 0))
            logprobs = made.model_dump_json()
        if not piece.text and piece.finish is None and logprobs == "null":
            return ""
        finish = None if piece.finish is None else FINISHED[piece.finish]
        return self._chunk(index, f'"text":{quoted(piece.text)}', logprobs, finish)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        made = [
            CompletionChoice(
                index=index,
                text="".join(piece.text for piece in pieces),
                logprobs=None if self._spelling is None else _listed(pieces, self._spelling, 0)[0],
                finish_reason=_finished(pieces),
            )
            for index, pieces in enumerate(choices)
        ]
        return Completion(**self._head, choices=made, usage=usage).model_dump_json().encode()


def _told(piece: Piece) -> bool:
    """Whether the likelihood of a piece is told: that of an end token, which is no part of the text, is not."""
    return piece.likelihood is not None and piece.finish is not Finish.EOS


def _finished(pieces: Sequence[Piece]) -> Finished:
    finish = pieces[-1].finish
    assert finish is not None  # the answer was read to its end
    return FINISHED[finish]


def _chosen(piece: Piece, spelling: Spelling) -> ChosenLikelihood:
    """A token with its likelihood, in the newer form."""
    assert piece.likelihood is not None
    top = [_likelihood(token, logprob, spelling) for token, logprob in piece.likelihood.top]
    chosen = _likelihood(piece.token, piece.likelihood.logprob, spelling)
    return ChosenLikelihood(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)


def _likelihood(token: int, logprob: float, spelling: Spelling) -> TokenLikelihood:
    text, raw = spelling(token)
    return TokenLikelihood(token=text, logprob=max(logprob, LEAST), bytes=None if raw is None else list(raw))


def _listed(pieces: Sequence[Piece], spelling: Spelling, offset: int) -> tuple[CompletionLogprobs, int]:
    """Tokens with their likelihoods, in the older form, and where the next token would begin."""
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for piece in filter(_told, pieces):
        assert piece.likelihood is not None
        text, logprob = spelling(piece.token)[0], max(piece.likelihood.logprob, LEAST)
        others = {spelling(token)[0]: max(each, LEAST) for token, each in piece.likelihood.top}
        made.tokens.append(text)
        made.token_logprobs.append(logprob)
        made.top_logprobs.append({**others, text: logprob})
        made.text_offset.append(offset)
        offset += len(text)
    return made, offset
