"""Blocks: runs of tokens whose keys and values are kept, and the tree that they form.

A block is known by a hash over its tokens and over all that come before them, so equal prefixes are equal blocks. A
salt keeps tenants apart: with another salt every hash is another one. A hash only finds; what is found is compared
token by token, so a hit is never an accident.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Tokens = tuple[int, ...]


def hash_block(parent: int | None, tokens: Sequence[int], salt: str = "") -> int:
    """The hash of a block: 63 bits, the same in every process.

    >>> hash_block(None, [1, 2]) == hash_block(None, [1, 2]) != hash_block(None, [1, 2], "tenant")
    True
    >>> hash_block(hash_block(None, [1, 2]), [3, 4]) != hash_block(None, [3, 4])
    True
    """
    start = b"root" + salt.encode() + b"\0" if parent is None else parent.to_bytes(8, "big")
    made = hashlib.blake2b(start + struct.pack(f">{len(tokens)}Q", *tokens), digest_size=8)
    return int.from_bytes(made.digest(), "big") >> 1


@dataclass(eq=False)
class Block:
    """A run of tokens that is held somewhere."""

    hash: int
    parent: Block | None
    tokens: Tokens
    salt: str
    level: int
    """0: where sequences are computed; 1: further away."""
    index: int
    """Which of its level's places it lies in."""
    priority: int
    last_used: int
    """When it was last asked for: ticks of the manager."""
    ref_count: int = 0
    """How many sequences rely on it. Such a block is neither moved away nor removed; what it follows is not removed."""
    children: dict[int, int] = field(default_factory=dict)
    """How many blocks follow it, on each level where there are any."""

    @property
    def is_evictable(self) -> bool:
        """Whether nobody relies on it, and nothing that lies as near follows it."""
        return not self.ref_count and all(level > self.level for level in self.children)

    def matches(self, parent: Block | None, tokens: Tokens, salt: str) -> bool:
        """Whether it really holds these tokens, after these."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


@dataclass(frozen=True)
class Move:
    """Keys and values to be copied from one place to another, before anything else is written there."""

    source: tuple[int, int]
    target: tuple[int, int]
