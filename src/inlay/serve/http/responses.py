"""Generation responses: full, or as a stream of server-sent events.

When a client disconnects, its sequences are cancelled at once. A client that reads nothing for too long is
disconnected.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from inlay.errors import InlayError, UsageError
from inlay.runtime.outputs import FinishReason
from inlay.runtime.request import EngineUnavailableError, QueueFullError
from inlay.serve.http.errors import ApiError, draining_error, overloaded_error
from inlay.serve.http.response_schema import PromptDetails, Usage
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
"""Logprobs of this many tokens or more are serialized in another thread, to keep the event loop responsive."""
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class HandleGroup:
    """The engine handles of one HTTP request, ordered by prompt, then by choice."""

    handles: Sequence[RequestHandle]
    choices: int
    record: RequestRecord

    def cancel(self) -> None:
        """Cancel all sequences."""
        for answer in self.handles:
            answer.cancel()

    def usage(self, made: int) -> Usage:
        """Return the token counts. A prompt counts once, however many choices it has."""
        first = self.handles[:: self.choices]
        read = sum(len(answer.request.prompt) for answer in first)
        cached = sum(answer.cached_tokens for answer in first)
        self.record.prompt_tokens, self.record.cached_tokens, self.record.tokens = read, cached, made
        details = PromptDetails(cached_tokens=cached)
        return Usage(
            prompt_tokens=read, completion_tokens=made, total_tokens=read + made, prompt_tokens_details=details
        )

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
        """Yield the outputs that are ready, each with the index of its choice."""
        try:
            if len(self.handles) == 1:
                async for batch in self.handles[0].batches():
                    yield [(0, self._record_output(piece)) for piece in batch]
                return
            async for pair in _merge(self.handles):
                yield [(index, self._record_output(piece)) for index, piece in pair]
        except QueueFullError as error:  # engines of a cluster refuse a request later than `submit`
            raise overloaded_error(error.retry_after) from error
        except EngineUnavailableError as error:
            raise ApiError(503, str(error), code="unavailable", retry_after=1) from error
        except UsageError as error:  # found while the answer was generated
            raise ApiError(400, str(error)) from error
        except InlayError as error:
            raise ApiError(500, f"Generation failed. {error}", code="engine_error") from error

    def _record_output(self, piece: TokenOutput) -> TokenOutput:
        if piece.finish_reason in ABORT_REASONS:
            self.record.finish_reason = piece.finish_reason
            raise draining_error()
        self.record.mark_first_token()
        if piece.finish_reason is not None:
            self.record.finish_reason = API_FINISH_REASONS[piece.finish_reason]
        return piece


async def _merge(answers: Sequence[RequestHandle]) -> AsyncIterator[list[tuple[int, TokenOutput]]]:
    """Merge the outputs of several sequences into one stream."""
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
    """A response whose content is generated while it is sent."""

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
                    abort()  # a normal close would wait for the client
            except ApiError:
                if not gone.is_set():
                    raise

    async def _send(self, send: _TimedSender) -> None:
        raise NotImplementedError


class FullResponse(_GenerationResponse):
    """All choices in one JSON document."""

    async def _send(self, send: _TimedSender) -> None:
        pieces: list[list[TokenOutput]] = [[] for _ in self._answers.handles]
        async for batch in self._answers.batches():
            for index, piece in batch:
                pieces[index].append(piece)
        made = sum(map(len, pieces))
        usage = self._answers.usage(made)
        first = [each[0] for each in pieces]
        logprobs = sum(len(each.prompt_logprobs or ()) for each in first) + (made if first[0].logprobs else 0)
        if logprobs < MANY:
            body = self._serializer.full_response(pieces, usage)
        else:
            body = await asyncio.to_thread(self._serializer.full_response, pieces, usage)
        await send.start([(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())])
        await send.body(body, more=True)
        await send.body(b"", more=False)  # waits until the client has read most; the permit is held until then


class EventStreamResponse(_GenerationResponse):
    """Server-sent events, one per token. The status is sent with the first token, so earlier failures set their own."""

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
    """Sends ASGI messages; raises `TimeoutError` if the client reads nothing for `seconds`."""

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
    """Cancel the sequences when the client disconnects or the context ends."""
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
