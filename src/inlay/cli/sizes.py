"""Sizes as people read them."""

from __future__ import annotations

import re

from inlay.errors import UsageError

_PREFIXES = "KMGT"


def bytes_text(count: float) -> str:
    """A number of bytes.

    >>> bytes_text(512), bytes_text(2_000_000), bytes_text(5 * 10**9)
    ('512 B', '2.0 MB', '5.0 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def bytes_of(text: str) -> int:
    """Bytes from what people write: GB are thousands, G and GiB are powers of two, as dd and numfmt have it.

    >>> bytes_of("8GB"), bytes_of("500 mb"), bytes_of("512M"), bytes_of("2GiB"), bytes_of("100"), bytes_of("1.5k")
    (8000000000, 500000000, 536870912, 2147483648, 100, 1536)
    """
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*(?:([{_PREFIXES}])(IB|B|)|B|)", text.strip().upper())
    if found is None:
        raise UsageError(f"{text!r} is not a size.", "Write 500MB, 8GB (8,000,000,000 bytes), 8G or 8GiB (8 x 2^30).")
    base = 1000 if found[3] == "B" else 1024
    return int(float(found[1]) * base ** (_PREFIXES.index(found[2]) + 1 if found[2] else 0))
