"""The KV-cache manager: which blocks are held where, who relies on them, and which goes when room is needed.

It keeps books and moves nothing: what has to be copied is returned as moves, in the order in which to do it. All places are
there from the start; their number never changes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from inlay.errors import UsageError
from inlay.runtime.kv.blocks import Block, Move, Tokens, chained
from inlay.runtime.kv.events import Cleared, Created, Removed, Stored, Updated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from inlay.runtime.kv.events import Event


class Placed(NamedTuple):
    """A block that was stored: what to copy before it is written, and whether it has to be."""

    block: Block
    moves: list[Move]
    new: bool


class Manager:
    """Blocks on one or more levels of memory.

    >>> seen = []
    >>> manager = Manager([2, 4], block_size=2, tell=seen.append)
    >>> first, moves, new = manager.store(None, (1, 2))
    >>> [block.hash == first.hash for block in manager.lookup([1, 2, 3])]
    [True]
    >>> manager.lookup([1, 2, 3], salt="another tenant")
    []
    >>> [type(event).__name__ for event in seen]
    ['Created', 'Stored']
    """

    def __init__(
        self, places: Sequence[int], block_size: int, tell: Callable[[Event], None] = lambda event: None
    ) -> None:
        if not places or min(places) < 0 or not places[0] or block_size < 1:
            raise UsageError("A cache needs at least one place on its first level, and blocks of at least one token.")
        self.block_size = block_size
        self.places = tuple(places)
        self._tell = tell
        self._free = [list(range(count))[::-1] for count in places]
        self._blocks: dict[int, Block] = {}
        self._order: list[dict[int, OrderedDict[int, Block]]] = [{} for _ in places]
        self._tick = 0
        tell(Created(self.places, block_size))

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def free(self, level: int = 0) -> int:
        """Places of a level that hold nothing."""
        return len(self._free[level])

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[Block]:
        """The longest run of whole blocks that these tokens begin with, from the first on. It counts as use."""
        found: list[Block] = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            block = self._find(found[-1] if found else None, tuple(tokens[start : start + self.block_size]), salt)
            if block is None:
                break
            found.append(block)
        for block in reversed(found):  # what others build on was used last, so that it goes last
            self._use(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Rely on blocks until they are dropped as often."""
        for block in blocks:
            self._known(block)
            block.holders += 1

    def drop(self, blocks: Sequence[Block]) -> None:
        """Rely on them no longer."""
        for block in blocks:
            if not block.holders:
                raise UsageError(f"Block {block.hash:x} is dropped more often than it is held.")
            block.holders -= 1

    def store(self, parent: Block | None, tokens: Tokens, salt: str = "", priority: int = 0) -> Placed | None:
        """A block for tokens that follow `parent`, on the first level; None when everything there is relied upon.

        A block that is there already is returned as it is. `moves` come before what is written to the new place.
        """
        if len(tokens) != self.block_size:
            raise UsageError(f"A block has {self.block_size} tokens, not {len(tokens)}.")
        if parent is not None:
            self._known(parent)
            salt = parent.salt
        known = self._find(parent, tokens, salt)
        if known is not None:
            self._use(known)
            return Placed(known, [], new=False)
        key = chained(parent.hash if parent else None, tokens, salt)
        if key in self._blocks:
            return None  # two different prefixes of one hash: the first one stays
        with_parent = [parent] if parent else []
        self.hold(with_parent)
        moves = self._make_room(0)
        self.drop(with_parent)
        if moves is None:
            return None
        block = Block(key, parent, tokens, salt, 0, self._free[0].pop(), priority, self._tick)
        self._blocks[key] = block
        if parent is not None:
            parent.children.add(key)
        self._use(block)
        self._tell(Stored(parent.hash if parent else None, key, tokens, salt, 0, priority))
        return Placed(block, moves, new=True)

    def raise_up(self, block: Block) -> list[Move] | None:
        """Bring a block to the first level; None when there is no room for it."""
        self._known(block)
        if block.level == 0:
            return []
        self.hold([block])
        moves = self._make_room(0)
        self.drop([block])
        return None if moves is None else [*moves, self._move(block, 0)]

    def set_priority(self, block: Block, priority: int) -> None:
        """Blocks of lower priority go first, whenever they were used."""
        self._known(block)
        if block.priority != priority:
            old = block.priority
            self._forget_order(block)
            block.priority = priority
            self._remember_order(block)
            self._tell(Updated(block.hash, priority=(old, priority)))

    def clear(self) -> None:
        """Remove all that nobody relies on, and what does not follow from it."""
        kept = {key for block in self for key in _line(block) if block.holders}
        if not kept:
            self._blocks.clear()
            self._order = [{} for _ in self.places]
            self._free = [list(range(count))[::-1] for count in self.places]
            self._tell(Cleared())
            return
        for block in sorted((each for each in self if each.hash not in kept), key=_depth, reverse=True):
            self._remove(block)

    def _known(self, block: Block) -> None:
        if self._blocks.get(block.hash) is not block:
            raise UsageError(f"Block {block.hash:x} is not in this cache any more.", "Hold what is relied upon.")

    def _find(self, parent: Block | None, tokens: Tokens, salt: str) -> Block | None:
        block = self._blocks.get(chained(parent.hash if parent else None, tokens, salt))
        return block if block is not None and block.is_one_of(parent, tokens, salt) else None

    def _use(self, block: Block) -> None:
        self._tick += 1
        block.used = self._tick
        self._forget_order(block)
        self._remember_order(block)

    def _remember_order(self, block: Block) -> None:
        self._order[block.level].setdefault(block.priority, OrderedDict())[block.hash] = block

    def _forget_order(self, block: Block) -> None:
        rows = self._order[block.level].get(block.priority)
        if rows is not None:
            rows.pop(block.hash, None)

    def _by_age(self, level: int) -> Iterator[Block]:
        """Blocks of a level that nobody relies on: lowest priority first, then least recently used."""
        for priority in sorted(self._order[level]):
            yield from (block for block in self._order[level][priority].values() if not block.holders)

    def _make_room(self, level: int) -> list[Move] | None:
        """At least one free place on a level; what has to be moved for it, or None if that cannot be."""
        if self._free[level]:
            return []
        if level + 1 < len(self.places):
            oldest = next(self._by_age(level), None)
            if oldest is not None:
                self.hold([oldest])
                moves = self._make_room(level + 1)
                self.drop([oldest])
                if moves is not None:
                    return [*moves, self._move(oldest, level + 1)]
        leaf = next((block for block in self._by_age(level) if not block.children), None)
        if leaf is None:
            return None
        self._remove(leaf)
        return []

    def _move(self, block: Block, level: int) -> Move:
        source = (block.level, block.place)
        self._forget_order(block)
        self._free[block.level].append(block.place)
        block.level, block.place = level, self._free[level].pop()
        self._remember_order(block)
        self._tell(Updated(block.hash, level=(source[0], level)))
        return Move(source, (block.level, block.place))

    def _remove(self, block: Block) -> None:
        self._forget_order(block)
        del self._blocks[block.hash]
        self._free[block.level].append(block.place)
        if block.parent is not None:
            block.parent.children.discard(block.hash)
        self._tell(Removed(block.hash, block.level))


def _line(block: Block | None) -> Iterator[int]:
    while block is not None:
        yield block.hash
        block = block.parent


def _depth(block: Block) -> int:
    return sum(1 for _ in _line(block))
