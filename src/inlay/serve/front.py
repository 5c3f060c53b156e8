"""The front door: before a request is read it has an id, a key and a place, and what is read of it is bounded.

Plain ASGI, as what every token passes through has to be cheap.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import TYPE_CHECKING, Any

from inlay.serve.errors import ApiError, draining, overloaded
from inlay.serve.logs import Record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from inlay.serve.places import Place
    from inlay.serve.serving import Serving

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/healthz", "/readyz"})
"""Routes that need no key."""
ANSWERING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Routes that need a place."""
KNOWN = OPEN | ANSWERING | {"/metrics", "/v1/models", "/v1/kv_cache/events", "/v1/kv_cache/snapshot"}
"""Routes that are counted apart."""
COMING = 64
"""Requests of the largest size that may be on their way at once: what is not complete is in memory."""
SMALL = 1 << 16
"""Bytes of a request that are read whatever others send: the connection has room for as many anyway."""
GONE = 499
"""What logs call it when a client goes before it is answered, as nginx does."""
ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Front:
    """Stands before the application."""

    def __init__(self, app: App, serving: Serving) -> None:
        self._app, self._serving = app, serving
        self._coming = 0
        """Bytes of requests that are not complete."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its headers to its line in the log."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        record = Record(_id(headers), _route(scope), scope["client"][0] if scope.get("client") else "")

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._admit(scope, headers, record, receive, sending)
        except ApiError as error:
            record.error = error.brief
            await refuse(error, sending)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            record.status = record.status or GONE
            self._serving.done(record)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], record: Record, receive: Receive, send: Send
    ) -> None:
        serving, path = self._serving, scope["path"]
        state = scope.setdefault("state", {})
        state["record"] = record
        if serving.settings.hosts and host_of(headers.get(b"host", b"")) not in serving.settings.hosts:
            message = f"This server is {' or '.join(serving.settings.hosts)}. Ask for it by that name."
            raise ApiError(421, message, code="wrong_host")
        if path not in OPEN:
            state["tenant"] = serving.keys.tenant(headers.get(b"authorization", b""))
            if state["tenant"] is None:
                raise ApiError(401, "Send an API key that is known here, as a bearer token.", code="invalid_api_key")
        if scope["method"] != "POST" or path not in ANSWERING:
            await self._app(scope, receive, send)
            return
        if serving.draining:
            raise draining()
        body = await self._read(receive, headers)
        if body is None:
            return
        if serving.draining:
            raise draining()
        # After the body: who sends it slowly keeps nobody out. One key alone has nobody to share with.
        place: Place = serving.places.take(state["tenant"] if len(serving.keys) > 1 else "")
        state["place"] = place
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            place.give_back(answered=record.status == 200)

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes | None:
        """The body, or None if the client goes away before it is whole."""
        most, seconds = self._serving.settings.max_body, self._serving.settings.read_seconds
        too_large = ApiError(413, f"The request is larger than {most} bytes.", code="request_too_large")
        length = headers.get(b"content-length", b"")
        if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            raise ApiError(415, "The request is compressed. Send it as it is, without Content-Encoding.")
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    body += part
                    self._coming += len(part)
                    if len(body) > most:
                        raise too_large
                    if self._coming > COMING * most and len(body) > SMALL:
                        raise overloaded(seconds)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"The request did not come in within {seconds:.0f} s.", code="timeout") from None
        finally:
            self._coming -= len(body)


async def refuse(error: ApiError, send: Send) -> None:
    """Send an error."""
    body = error.body()
    headers = [*error.raw_headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """What was read, once; then what comes, which is that the client goes away."""
    given: bytes | None = body

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given is None:
            return await receive()
        message, given = {"type": "http.request", "body": given, "more_body": False}, None
        return message

    return again


def host_of(header: bytes) -> str:
    """The name of a server in a Host header, without its port.

    >>> host_of(b"localhost:8000"), host_of(b"127.0.0.1"), host_of(b"[::1]:80"), host_of(b"")
    ('localhost', '127.0.0.1', '::1', '')
    """
    text = header.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _id(headers: dict[bytes, bytes]) -> str:
    """The client's own name for a request, if it is a decent one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """Method and path, short of what a client can make up at will."""
    path = scope["path"] if scope["path"] in KNOWN else "other"
    return f"{scope['method']} {path}" if scope["method"] in ("GET", "POST", "HEAD") else "other"
