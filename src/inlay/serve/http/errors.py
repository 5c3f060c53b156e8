"""Error responses in OpenAI's format."""

from __future__ import annotations

import json
from math import ceil

from fastapi import HTTPException

LONGEST_ECHO = 128
"""The most characters of client text in an error message."""
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error response: HTTP status, message, and the parameter that caused it.

    >>> error = ApiError(400, "n is 99, but must be at most 16.", param="n")
    >>> error.body()
    b'{"error":{"message":"n is 99, but must be at most 16.","type":"invalid_request_error","param":"n","code":null}}'
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
        """OpenAI's error type for this status."""
        return KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")

    @property
    def brief(self) -> str:
        """A short form for logs, without any client text."""
        return " ".join(filter(None, (self.code or self.kind, self.param)))

    def body(self) -> bytes:
        """Return the error as JSON."""
        about = {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": about}, separators=(",", ":")).encode()

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers in ASGI form."""
        given = {"Content-Type": "application/json", **(self.headers or {})}
        return [(name.lower().encode(), value.encode()) for name, value in given.items()]


def overloaded_error(seconds: float, detail: str = "") -> ApiError:
    """Return the 429 error for a request that exceeds a limit."""
    message = f"This server is at its request limit.{detail} Retry later."
    return ApiError(429, message, code="overloaded", retry_after=seconds)


def draining_error() -> ApiError:
    """Return the 503 error of a server that finishes its requests in flight and accepts no new ones."""
    return ApiError(503, "This server is shutting down. Use another server.", code="shutting_down", retry_after=1)
