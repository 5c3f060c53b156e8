"""Blocks of the prefix cache: runs of tokens whose keys and values are stored. They form a tree.

A block is identified by a hash over its tokens and all tokens before them, so equal prefixes share blocks. A salt
separates tenants: it changes every hash. A lookup by hash also compares the tokens, so hash collisions cause no false
hits.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Tokens = tuple[int, ...]


def hash_block(parent: int | None, tokens: Sequence[int], salt: str = "") -> int:
    """Return the hash of a block: 63 bits, equal in all processes.

    >>> hash_block(None, [1, 2]) == hash_block(None, [1, 2]) != hash_block(None, [1, 2], "tenant")
    True
    >>> hash_block(hash_block(None, [1, 2]), [3, 4]) != hash_block(None, [3, 4])
    True
    """
    start = b"root" + salt.encode() + b"\0" if parent is None else parent.to_bytes(8, "big")
    made = hashlib.blake2b(start + struct.pack(f">{len(tokens)}Q", *tokens), digest_size=8)
    return int.from_bytes(made.digest(), "big") >> 1


def digest_block(parent: bytes | None, tokens: Sequence[int], salt: str = "") -> bytes:
    """Return a hash of a block that no two blocks share: for blocks that are not at hand to be compared.

    >>> digest_block(None, [1, 2]) == digest_block(None, [1, 2]) != digest_block(None, [1, 2], "tenant")
    True
    """
    start = hashlib.blake2b(salt.encode(), digest_size=32, person=b"salt").digest() if parent is None else parent
    return hashlib.blake2b(start + struct.pack(f">{len(tokens)}Q", *tokens), digest_size=32).digest()


@dataclass(eq=False)
class Block:
    """A run of tokens whose keys and values are stored."""

    hash: int
    parent: Block | None
    tokens: Tokens
    salt: str
    level: int
    """0: next to the slots; 1: the second level."""
    index: int
    """Its index in the pool of its level."""
    priority: int
    last_used: int
    """Time of the last use, in ticks of the manager."""
    ref_count: int = 0
    """How many sequences use it. A block in use is neither demoted nor evicted, and its ancestors are not evicted."""
    children: dict[int, int] = field(default_factory=dict)
    """The number of its child blocks on each level that has any."""

    @cached_property
    def digest(self) -> bytes:
        """Its `digest_block`. Ask for that of its parent first: a chain may be too long for a recursion."""
        return digest_block(self.parent.digest if self.parent else None, self.tokens, self.salt)

    @property
    def is_evictable(self) -> bool:
        """Whether it is unused and all its children are on higher-numbered levels."""
        return not self.ref_count and all(level > self.level for level in self.children)

    def matches(self, parent: Block | None, tokens: Tokens, salt: str) -> bool:
        """Whether it has this parent, these tokens and this salt."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


@dataclass(frozen=True)
class Move:
    """A copy of keys and values between two (level, index) locations, due before the target is written otherwise."""

    source: tuple[int, int]
    target: tuple[int, int]
