"""Sizes as people read them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """A number of bytes.

    >>> bytes_text(512), bytes_text(2_000_000), bytes_text(5 * 10**9)
    ('512 B', '2.0 MB', '5.0 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
