"""Formatting and parsing of sizes in bytes."""

from __future__ import annotations

import re

from inlay.errors import UsageError

_PREFIXES = "KMGT"


def format_bytes(count: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(512), format_bytes(2_000_000), format_bytes(5 * 10**9)
    ('512 B', '2.0 MB', '5.0 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def parse_bytes(text: str) -> int:
    """Parse a size in bytes. GB is a power of 1000; G and GiB are powers of 1024, as in dd and numfmt.

    >>> [parse_bytes(text) for text in ("8GB", "500 mb", "512M", "2GiB", "100", "1.5k")]
    [8000000000, 500000000, 536870912, 2147483648, 100, 1536]
    """
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*(?:([{_PREFIXES}])(IB|B|)|B|)", text.strip().upper())
    if found is None:
        raise UsageError(f"{text!r} is not a size.", "Write 500MB, 8GB (8,000,000,000 bytes), 8G or 8GiB (8 x 2^30).")
    base = 1000 if found[3] == "B" else 1024
    return int(float(found[1]) * base ** (_PREFIXES.index(found[2]) + 1 if found[2] else 0))
