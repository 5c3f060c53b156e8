"""Settings of the HTTP server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits and options of the HTTP server. The engine has its own settings (`EngineSettings`)."""

    name: str
    """The model name that clients send."""
    keys: tuple[str, ...] = ()
    max_concurrent: int | None = None
    """Maximum requests in flight: waiting, running or being sent. Default: what the engine accepts."""
    max_prompt: int | None = None
    """Maximum tokens of a prompt. Default: the sequence length of the package."""
    max_tokens: int | None = None
    """Maximum generated tokens. Default: the sequence length of the package."""
    max_body: int = 1 << 20
    """Maximum bytes of a request body."""
    read_seconds: float = 30.0
    """Timeout for receiving the header of a request, and again for its body."""
    write_seconds: float = 60.0
    """Timeout after which a client that reads nothing is disconnected."""
    public_metrics: bool = False
    """Whether `/metrics` needs no API key."""
    kv_routes: bool = True
    """Whether KV events are served over HTTP. They contain the tokens of all requests."""
    sends_request_id: bool = True
    """Whether responses have the header X-Request-ID. In a cluster, Serve's proxy adds it."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header. Empty: any name."""


def resolve_allowed_hosts(host: str, has_keys: bool) -> tuple[str, ...]:
    """Return the accepted Host names of a server that listens on `host`. Empty: any name.

    On loopback without API keys, the check prevents DNS rebinding: a web page in a local browser could point its own
    domain at this machine and read responses. With keys no check is needed: the page has no key, and a reverse proxy
    may use any name. By default `inlay serve` enables KV event routes, which expose all tokens, only with this check.

    >>> [resolve_allowed_hosts(*each) for each in (("127.0.0.1", False), ("127.0.0.1", True), ("0.0.0.0", False))]
    [('127.0.0.1', 'localhost', '::1'), (), ()]
    """
    if has_keys or not is_loopback(host):
        return ()
    return tuple(dict.fromkeys((host, "localhost", "127.0.0.1", "::1")))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
