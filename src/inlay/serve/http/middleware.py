"""ASGI middleware: request ids, authentication, body limits, admission control and the request log.

It is plain ASGI because every token passes through it, so it must be cheap.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import TYPE_CHECKING, Any

from inlay.serve.http.errors import ApiError, draining_error, overloaded_error
from inlay.serve.http.request_log import RequestRecord
from inlay.serve.http.router_routes import INFO_ROUTES, TOKENIZER_ROUTES
from inlay.serve.http.settings import is_loopback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from inlay.serve.http.admission import Permit
    from inlay.serve.http.server_context import ServerContext

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

PUBLIC_ROUTES = frozenset({"/healthz", "/readyz", "/health"})
"""Routes that require no API key."""
GENERATION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
BODY_ROUTES = GENERATION_ROUTES | TOKENIZER_ROUTES | {"/v1/embeddings"}
"""Routes that require a permit of admission control."""
KNOWN_ROUTES = (
    PUBLIC_ROUTES
    | BODY_ROUTES
    | INFO_ROUTES
    | {"/metrics", "/v1/models", "/v1/kv_cache/events", "/v1/kv_cache/snapshot"}
)
"""Routes that have their own label in metrics."""
MAX_PENDING_BODIES = 64
"""Limit of memory for incomplete request bodies, as a multiple of the maximum body size."""
SMALL = 1 << 16
"""Bodies up to this many bytes are exempt from that limit: the connection buffers as many bytes anyway."""
CLIENT_CLOSED_REQUEST = 499
"""The status in logs when a client disconnects before the response, as in nginx."""
ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: App, context: ServerContext) -> None:
        self._app, self._context = app, context
        self._pending_bytes = 0
        """Bytes of incomplete request bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, from its headers to its line in the log."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        record = RequestRecord(_id(headers), _route(scope), scope["client"][0] if scope.get("client") else "")

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                own = [(b"x-request-id", record.id.encode())] if self._context.settings.sends_request_id else []
                message["headers"] = [*message.get("headers", ()), *own]
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
            record.status = record.status or CLIENT_CLOSED_REQUEST
            self._context.log_request(record)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        serving, path = self._context, scope["path"]
        state = scope.setdefault("state", {})
        state["record"] = record
        if (
            serving.settings.allowed_hosts
            and parse_host(headers.get(b"host", b"")) not in serving.settings.allowed_hosts
        ):
            message = f"The Host header must be {' or '.join(serving.settings.allowed_hosts)}."
            raise ApiError(421, message, code="wrong_host")
        if serving.settings.allowed_hosts and record.client and not is_loopback(record.client):
            raise ApiError(403, "Without API keys, only this machine is answered.", code="remote_client")
        if path not in PUBLIC_ROUTES and not (path == "/metrics" and serving.settings.public_metrics):
            state["tenant"] = serving.keys.authenticate(headers.get(b"authorization", b""))
            if state["tenant"] is None:
                message = "The API key is missing or invalid. Send a valid key as a bearer token."
                raise ApiError(401, message, code="invalid_api_key")
        if scope["method"] != "POST" or path not in BODY_ROUTES:
            await self._app(scope, receive, send)
            return
        if serving.is_draining:
            raise draining_error()
        body = await self._read(receive, headers)
        if body is None:
            return
        if serving.is_draining:
            raise draining_error()
        # After the body, so that slow uploads hold no permits. A single key is not limited to a share.
        place: Permit = serving.admission.admit(state["tenant"] if len(serving.keys) > 1 else "")
        state["place"] = place
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            place.release(is_completed=record.status == 200 and path in GENERATION_ROUTES)

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the body, or None if the client disconnects before it is complete."""
        most, seconds = self._context.settings.max_body, self._context.settings.read_seconds
        too_large = ApiError(413, f"The request body is larger than {most} bytes.", code="request_too_large")
        length = headers.get(b"content-length", b"")
        if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            raise ApiError(415, "Compressed requests are not supported. Send the body without Content-Encoding.")
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
                    self._pending_bytes += len(part)
                    if len(body) > most:
                        raise too_large
                    if self._pending_bytes > MAX_PENDING_BODIES * most and len(body) > SMALL:
                        raise overloaded_error(seconds)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            problem = f"No complete request body was received within {seconds:.0f} s."
            raise ApiError(408, problem, code="timeout") from None
        finally:
            self._pending_bytes -= len(body)


async def refuse(error: ApiError, send: Send) -> None:
    """Send an error response."""
    body = error.body()
    headers = [*error.raw_headers(), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body that was read, then forwards (to report a disconnect)."""
    given: bytes | None = body

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given is None:
            return await receive()
        message, given = {"type": "http.request", "body": given, "more_body": False}, None
        return message

    return again


def parse_host(header: bytes) -> str:
    """Return the host name of a Host header, without its port.

    >>> parse_host(b"localhost:8000"), parse_host(b"127.0.0.1"), parse_host(b"[::1]:80"), parse_host(b"")
    ('localhost', '127.0.0.1', '::1', '')
    """
    text = header.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _id(headers: dict[bytes, bytes]) -> str:
    """Return the client's X-Request-ID if it is well formed, else a new id."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """Return method and path; unknown ones become "other", so that clients cannot create metric labels."""
    path = scope["path"] if scope["path"] in KNOWN_ROUTES else "other"
    return f"{scope['method']} {path}" if scope["method"] in ("GET", "POST", "HEAD") else "other"
