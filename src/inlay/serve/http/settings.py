"""How a server is set up."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """What a server allows. The engine's own settings are apart from these."""

    name: str
    """What clients call the model."""
    keys: tuple[str, ...] = ()
    max_concurrent: int | None = None
    """Answers in the making, waiting or being sent; by default as many as the engine takes."""
    max_prompt: int | None = None
    """Tokens of a prompt; by default what the package holds."""
    max_tokens: int | None = None
    """Tokens of an answer; by default what the package holds."""
    max_body: int = 1 << 20
    """Bytes of a request."""
    read_seconds: float = 30.0
    """How long the header of a request may take to come in, and its body."""
    write_seconds: float = 60.0
    """How long a reader may take nothing before it is cut off."""
    kv_routes: bool = True
    """Whether the cache can be watched over HTTP: tokens of all requests."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request may call the server by; any, where there are none."""


def resolve_allowed_hosts(host: str, has_keys: bool) -> tuple[str, ...]:
    """What requests may call a server by that listens at a host; anything, if other machines can connect.

    A page in a browser may point a name of its own at this machine, and would read along. It has no key; a proxy before
    the server may use any name. Where there are such names, the cache may be watched too: it shows everybody's tokens.

    >>> [resolve_allowed_hosts(*each) for each in (("127.0.0.1", False), ("127.0.0.1", True), ("0.0.0.0", False))]
    [('127.0.0.1', 'localhost', '::1'), (), ()]
    """
    if has_keys or not is_loopback(host):
        return ()
    return tuple(dict.fromkeys((host, "localhost", "127.0.0.1", "::1")))


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
