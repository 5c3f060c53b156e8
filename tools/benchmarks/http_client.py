"""A lightweight streaming HTTP client that uses little CPU time of the measured server's machine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence


@dataclass
class ClientResult:
    """The result of one request."""

    status: int = 0
    start_time: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """Arrival time of each chunk of text."""
    text: str = ""
    finish: str | None = None
    error: str = ""
    """The message of an error that ended the stream."""
    fingerprint: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    end_time: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds to the first chunk."""
        return self.chunk_times[0] - self.start_time

    @property
    def inter_token_times(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


async def send_request(
    port: int, body: Mapping[str, Any], *, path: str = "/v1/completions", key: str | None = None
) -> ClientResult:
    """Send one streamed request to a local server and time it."""
    told = ClientResult(start_time=time.perf_counter())
    async for line in _lines(port, path, body, key, told):
        if line == b"[DONE]":
            break
        found = json.loads(line)
        told.error = (found.get("error") or {}).get("message", told.error)
        told.fingerprint = found.get("system_fingerprint", told.fingerprint)
        usage = found.get("usage") or {}
        told.prompt_tokens = usage.get("prompt_tokens", told.prompt_tokens)
        told.tokens = usage.get("completion_tokens", told.tokens)
        told.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", told.cached)
        for choice in found.get("choices", ()):
            text = choice.get("text") if "text" in choice else choice["delta"].get("content")
            told.finish = choice.get("finish_reason") or told.finish
            if text:
                told.chunk_times.append(time.perf_counter())
                told.text += text
    told.end_time = time.perf_counter()
    return told


async def _lines(
    port: int, path: str, body: Mapping[str, Any], key: str | None, told: ClientResult
) -> AsyncIterator[bytes]:
    data = json.dumps({"model": "model", **body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    heads = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    heads += [f"Authorization: Bearer {key}"] if key else []
    try:
        writer.write("\r\n".join([*heads, "Connection: close", "", ""]).encode() + data)
        told.status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            told.headers[name.lower()] = value.strip()
        while told.status == 200 and (line := await reader.readline()):
            if line.startswith(b"data: "):
                yield line[6:].strip()
    finally:
        writer.close()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value such that this share of all values is not above it.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile(range(100), 0.99)
    (2.0, 98)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
