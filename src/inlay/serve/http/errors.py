"""Refusals and failures in the form that OpenAI's clients read."""

from __future__ import annotations

import json
from math import ceil

from fastapi import HTTPException

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer that is an error: its status, a sentence, and which parameter is to blame.

    >>> error = ApiError(400, "n is 99, but must be 16 at most.", param="n")
    >>> error.body()
    b'{"error":{"message":"n is 99, but must be 16 at most.","type":"invalid_request_error","param":"n","code":null}}'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(max(1, ceil(retry_after)))}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def kind(self) -> str:
        """What OpenAI calls errors of this status."""
        return KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")

    @property
    def brief(self) -> str:
        """For a log: no word of what the client wrote."""
        return " ".join(filter(None, (self.code or self.kind, self.param)))

    def body(self) -> bytes:
        """The error as JSON."""
        about = {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": about}, separators=(",", ":")).encode()

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as a server sends them."""
        given = {"Content-Type": "application/json", **(self.headers or {})}
        return [(name.lower().encode(), value.encode()) for name, value in given.items()]


def overloaded_error(seconds: float, detail: str = "") -> ApiError:
    """There is no place for a request now."""
    message = f"This server has as many requests as it takes.{detail} Ask again later."
    return ApiError(429, message, code="overloaded", retry_after=seconds)


def draining_error() -> ApiError:
    """The server ends what it has begun, and begins nothing more."""
    return ApiError(503, "This server is shutting down. Ask another one.", code="shutting_down", retry_after=1)
