"""How a server is set up."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from inlay.errors import UsageError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Settings:
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
    body_seconds: float = 30.0
    """How long a request may take to come in."""
    write_seconds: float = 60.0
    """How long a reader may take nothing before it is cut off."""
    kv_routes: bool = True
    """Whether the cache can be watched over HTTP: tokens of all requests."""


def bytes_of(text: str) -> int:
    """A size as people write it.

    >>> bytes_of("512M"), bytes_of("2GiB"), bytes_of("100")
    (536870912, 2147483648, 100)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size.", "Such as 512M or 2G.")
    return int(float(match[1]) * UNITS[match[2].upper()])


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
