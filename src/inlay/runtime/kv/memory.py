"""The memory of the KV cache: slots of sequences and pools of blocks, allocated at the start.

A slot is contiguous, because attention reads it at every step. A block is copied into a slot when a sequence starts
with it, and out of a slot once it is full. docs/dev/decisions.md compares this with paged attention.
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
"""MADV_POPULATE_WRITE of Linux: allocate the pages and keep their content."""


@dataclass(frozen=True)
class _Group:
    """States of one shape and dtype in one tensor, so that a block is one copy."""

    slots: torch.Tensor
    """`[state, slot, heads, room, head]`"""
    pools: tuple[torch.Tensor, ...]
    """One tensor per level: `[index, state, heads, block, head]`"""

    def rows(self, position: int, count: int) -> slice | torch.Tensor:
        """Return where the rows of positions are in a slot, which may be a ring."""
        room = self.slots.shape[3]
        first = position % room
        return slice(first, first + count) if first + count <= room else torch.arange(first, first + count) % room


def bytes_per_token(states: Iterable[Binding]) -> int:
    """Return the bytes of one token in the KV cache."""
    sizes = [
        (heads * head, getattr(torch, row.dtype).itemsize) for row in states for _, heads, _, head in [_shape(row)]
    ]
    return sum(numbers * size for numbers, size in sizes)


class KVMemory:
    """Slots and block pools for these states. `capacities` is the number of blocks on each level."""

    def __init__(self, states: Sequence[Binding], block_size: int, capacities: Sequence[int], slots: int) -> None:
        kinds: dict[tuple[str, int, int, int, int], list[str]] = defaultdict(list)
        for row in states:
            kinds[(row.dtype, *_shape(row))].append(row.name)
        if len({count for _, count, _, _, _ in kinds}) != 1:
            raise UsageError("The states of this package are not one KV cache.", "Build it from a language model.")
        self.block_size, self.used = block_size, slots
        self.state: dict[str, torch.Tensor] = {}
        """The state tensors of the package, by name."""
        self._groups = []
        for (dtype, count, heads, room, head), names in kinds.items():
            like = {"dtype": getattr(torch, dtype)}
            whole = torch.empty(len(names), count, heads, room, head, **like)
            levels = tuple(torch.empty(each, len(names), heads, block_size, head, **like) for each in capacities)
            self._groups.append(_Group(whole, levels))
            self.state |= dict(zip(names, whole, strict=True))

    def save(self, slot: int, row: int, index: int) -> None:
        """Copy the block that starts at position `row` from a slot to the first level."""
        for group in self._groups:
            group.pools[0][index].copy_(group.slots[:, slot, :, group.rows(row, self.block_size)])

    def load(self, slot: int, row: int, level: int, index: int) -> None:
        """Copy a block to a slot, from position `row` on."""
        for group in self._groups:
            group.slots[:, slot, :, group.rows(row, self.block_size)] = group.pools[level][index]

    def move(self, moves: Iterable[Move]) -> None:
        """Copy blocks between locations, in this order."""
        for move in moves:
            (level, place), (new_level, new_place) = move.source, move.target
            for group in self._groups:
                group.pools[new_level][new_place].copy_(group.pools[level][place])

    @property
    def block_bytes(self) -> int:
        """The bytes of a block."""
        return sum(group.pools[0][0].nbytes for group in self._groups)

    def pack(self, level: int, index: int) -> torch.Tensor:
        """Return a copy of a block as bytes."""
        return torch.cat([group.pools[level][index].flatten().view(torch.uint8) for group in self._groups]).cpu()

    def unpack(self, index: int, data: torch.Tensor) -> None:
        """Copy a block that was packed to the first level."""
        start = 0
        for group in self._groups:
            place = group.pools[0][index].flatten().view(torch.uint8)
            place.copy_(data[start : start + place.nbytes])
            start += place.nbytes

    def populate(self) -> threading.Thread | None:
        """Allocate all pages in a background thread; return it, or None if the system does not support that."""
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
        problem = f"The state {row.name} is {row.type_text}, which is not a KV cache."
        raise UsageError(problem, "Build the package from a language model.")
    slots, heads, room, head = sizes
    return slots, heads, room, head
