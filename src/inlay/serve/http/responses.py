"""Answers on their way to a client: whole, or as a stream of server-sent events.

Who asked is watched all the time: when he goes away the engine is told at once. A reader that takes nothing for a while
is cut off.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from inlay.errors import InlayError
from inlay.runtime.outputs import FinishReason
from inlay.serve.http.errors import ApiError, draining_error
from inlay.serve.http.schema import PromptDetails, Usage
from inlay.serve.http.serializers import API_FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from inlay.runtime.outputs import TokenOutput
    from inlay.runtime.request import RequestHandle
    from inlay.serve.http.middleware import Receive, Scope, Send
    from inlay.serve.http.request_log import RequestRecord
    from inlay.serve.http.serializers import ResponseSerializer

ABORT_REASONS = (FinishReason.CANCELLED, FinishReason.TIMEOUT)
MANY = 256
"""Tokens from which on their likelihoods are written in another thread: others wait for the event loop."""
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class HandleGroup:
    """All answers to one request: as many of the first prompt as there are choices, then those of the next."""

    handles: Sequence[RequestHandle]
    choices: int
    record: RequestRecord

    def cancel(self) -> None:
        """Nobody wants them any more."""
        for answer in self.handles:
            answer.cancel()

    def usage(self, made: int) -> Usage:
        """How much was read and written. A prompt counts once, however many choices it has."""
        first = self.handles[:: self.choices]
        read = sum(len(answer.request.prompt) for answer in first)
        cached = sum(answer.cached_tokens for answer in first)
        self.record.prompt_tokens, self.record.cached_tokens, self.record.tokens = read, cached, made
        details = PromptDetails(cached_tokens=cached)
        return Usage(
            prompt_tokens=read, completion_tokens=made, total_tokens=read + made, prompt_tokens_details=details
        )

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
        """What is ready, whenever something is: the number of the choice, and a piece."""
        try:
            if len(self.handles) == 1:
                async for batch in self.handles[0].batches():
                    yield [(0, self._record_output(piece)) for piece in batch]
                return
            async for pair in _merge(self.handles):
                yield [(index, self._record_output(piece)) for index, piece in pair]
        except InlayError as error:
            raise ApiError(500, f"The answer could not be made. {error}", code="engine_error") from error

    def _record_output(self, piece: TokenOutput) -> TokenOutput:
        if piece.finish_reason in ABORT_REASONS:
            self.record.finish_reason = piece.finish_reason
            raise draining_error()
        self.record.mark_first_token()
        if piece.finish_reason is not None:
            self.record.finish_reason = API_FINISH_REASONS[piece.finish_reason]
        return piece


async def _merge(answers: Sequence[RequestHandle]) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
    """Several answers as one stream."""
    ready: asyncio.Queue[tuple[int, list[TokenOutput] | InlayError | None]] = asyncio.Queue()

    async def pump(index: int, answer: RequestHandle) -> None:
        try:
            async for batch in answer.batches():
                ready.put_nowait((index, batch))
            ready.put_nowait((index, None))
        except InlayError as error:
            ready.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    left = len(answers)
    try:
        while left:
            found: list[tuple[int, TokenOutput]] = []
            waiting = [await ready.get()]
            while not ready.empty():
                waiting.append(ready.get_nowait())
            for index, batch in waiting:
                if isinstance(batch, InlayError):
                    raise batch
                left -= batch is None
                found += [(index, piece) for piece in batch or ()]
            yield found
    finally:
        for each in pumps:
            each.cancel()


class _GenerationResponse(Response):
    """An ASGI application that sends answers."""

    def __init__(self, answers: HandleGroup, form: ResponseSerializer, write_seconds: float) -> None:
        super().__init__()
        self._answers, self._serializer, self._seconds = answers, form, write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watch_disconnect(receive, self._answers) as gone:
            try:
                await self._send(_TimedSender(send, self._seconds))
            except TimeoutError:
                self._answers.record.error = "slow_reader"
                if (abort := scope.get("state", {}).get("abort")) is not None:
                    abort()  # closing would wait for the reader
            except ApiError:
                if not gone.is_set():  # who is not there cannot be told
                    raise

    async def _send(self, send: _TimedSender) -> None:
        raise NotImplementedError


class FullResponse(_GenerationResponse):
    """All answers in one JSON document."""

    async def _send(self, send: _TimedSender) -> None:
        pieces: list[list[TokenOutput]] = [[] for _ in self._answers.handles]
        async for batch in self._answers.batches():
            for index, piece in batch:
                pieces[index].append(piece)
        made = sum(map(len, pieces))
        usage = self._answers.usage(made)
        if made < MANY or pieces[0][0].logprobs is None:
            body = self._serializer.full_response(pieces, usage)
        else:
            body = await asyncio.to_thread(self._serializer.full_response, pieces, usage)
        await send.start([(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())])
        await send.body(body, more=True)
        await send.body(b"", more=False)  # waits until the reader has taken most of it: as long it holds its place


class EventStreamResponse(_GenerationResponse):
    """Server-sent events, one a token. Nothing is sent before the first token: until then a failure has a status."""

    def __init__(self, answers: HandleGroup, form: ResponseSerializer, write_seconds: float, with_usage: bool) -> None:
        super().__init__(answers, form, write_seconds)
        self._with_usage = with_usage

    async def _send(self, send: _TimedSender) -> None:
        made, form, opened = 0, self._serializer, set[int]()
        try:
            async for batch in self._answers.batches():
                written = ""
                for index, piece in batch:
                    if index not in opened:
                        opened.add(index)
                        written += form.first_chunk(index)
                    written += form.chunk(index, piece)
                made += len(batch)
                if written:
                    await self._write(send, written)
            usage = self._answers.usage(made)
            await self._write(send, (form.usage(usage) if self._with_usage else "") + DONE, more=False)
        except ApiError as error:
            if not send.started:
                raise
            self._answers.usage(made)
            self._answers.record.error = error.brief
            await self._write(send, f"data: {error.body().decode()}\n\n", more=False)

    async def _write(self, send: _TimedSender, text: str, more: bool = True) -> None:
        if not send.started:
            await send.start([(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])
        await send.body(text.encode(), more)


class _TimedSender:
    """Sends; a reader that takes nothing for so many seconds is a `TimeoutError`."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds, self.started = send, seconds, False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._out({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, body: bytes, more: bool) -> None:
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    async def _out(self, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._seconds):
            await self._send(message)


@asynccontextmanager
async def _watch_disconnect(receive: Receive, answers: HandleGroup) -> AsyncIterator[asyncio.Event]:
    """Cancels the answers when the client goes, or when this ends before they do."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        answers.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watching.cancel()
        answers.cancel()
