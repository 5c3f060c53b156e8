"""The memory of the KV cache: slots in which sequences grow, and places for blocks. All of it is there from the start.

A slot is contiguous, because attention reads it at every step; a block is copied into a slot once, when a sequence
begins with it, and out of it once, when it is full. Reading blocks in place (paged) was measured: docs/serving.md.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inlay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inlay.program.bindings import Binding
    from inlay.runtime.kv.block import Move

_POPULATE_WRITE = 23
"""As Linux numbers it: the pages are there, and what they hold stays."""


@dataclass(frozen=True)
class _Group:
    """States of one shape and number format: all of them in one tensor, so that a block is one copy."""

    slots: torch.Tensor
    """`[state, slot, heads, room, head]`"""
    pools: tuple[torch.Tensor, ...]
    """A tensor a level: `[place, state, heads, block, head]`"""


def bytes_per_token(states: Iterable[Binding]) -> int:
    """What one token takes in a cache."""
    sizes = [
        (heads * head, getattr(torch, row.dtype).itemsize) for row in states for _, heads, _, head in [_shape(row)]
    ]
    return sum(numbers * size for numbers, size in sizes)


class KVMemory:
    """Slots and blocks of a package with these states; `capacities` says how many blocks each level holds."""

    def __init__(self, states: Sequence[Binding], block_size: int, capacities: Sequence[int], slots: int) -> None:
        kinds: dict[tuple[str, int, int, int, int], list[str]] = defaultdict(list)
        for row in states:
            kinds[(row.dtype, *_shape(row))].append(row.name)
        if len({(slots, room) for _, slots, _, room, _ in kinds}) != 1:
            raise UsageError("The states of this package are not one cache of keys and values.", "It cannot be served.")
        self.block_size, self.used = block_size, slots
        self.state: dict[str, torch.Tensor] = {}
        """What the package works on, by name."""
        self._groups = []
        for (dtype, count, heads, room, head), names in kinds.items():
            like = {"dtype": getattr(torch, dtype)}
            whole = torch.empty(len(names), count, heads, room, head, **like)
            levels = tuple(torch.empty(each, len(names), heads, block_size, head, **like) for each in capacities)
            self._groups.append(_Group(whole, levels))
            self.state |= dict(zip(names, whole, strict=True))

    def save(self, slot: int, row: int, index: int) -> None:
        """Copy a block of rows of a slot to a place of the first level."""
        for group in self._groups:
            group.pools[0][index].copy_(group.slots[:, slot, :, row : row + self.block_size])

    def load(self, slot: int, row: int, level: int, index: int) -> None:
        """Copy a block to rows of a slot."""
        for group in self._groups:
            group.slots[:, slot, :, row : row + self.block_size].copy_(group.pools[level][index])

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks from place to place, in this order."""
        for move in moves:
            (level, place), (new_level, new_place) = move.source, move.target
            for group in self._groups:
                group.pools[new_level][new_place].copy_(group.pools[level][place])

    def populate(self) -> threading.Thread | None:
        """Have the system give all of this memory now, beside what else is going on; None where it does not do that."""
        pieces = [
            piece for group in self._groups for piece in (*group.slots[:, : self.used].flatten(0, 1), *group.pools)
        ]
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "madvise"):
            return None

        def touch() -> None:
            for piece in pieces:
                start = -(-piece.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                size = piece.data_ptr() + piece.nbytes - start
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(max(size, 0)), _POPULATE_WRITE)

        thread = threading.Thread(target=touch, name="inlay-memory", daemon=True)
        thread.start()
        return thread


def _shape(row: Binding) -> tuple[int, int, int, int]:
    sizes = [size for size in row.shape if isinstance(size, int)]
    if len(sizes) != len(row.shape) or len(sizes) != 4:
        raise UsageError(f"{row.name} is {row.type_text}, which is no cache of keys or values.", "It cannot be served.")
    slots, heads, room, head = sizes
    return slots, heads, room, head
