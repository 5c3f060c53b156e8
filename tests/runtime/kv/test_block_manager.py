"""The KV-cache manager's rules, one by one: who goes and who stays, what is no hit, what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.errors import UsageError
from inlay.runtime.kv.block import Move, hash_block
from inlay.runtime.kv.block_manager import BlockManager

pytestmark = pytest.mark.fast


def test_what_is_least_used_goes_first_and_leaves_before_parents() -> None:
    manager = BlockManager([3], 1)
    first, *_ = manager.store(None, (1,))  # type: ignore[misc]
    second, *_ = manager.store(first, (2,))  # type: ignore[misc]
    manager.store(None, (9,))
    manager.lookup([9])
    manager.store(None, (7,))
    assert [block.tokens for block in manager] == [(1,), (9,), (7,)], "the leaf of the oldest line"
    assert manager.lookup([1, 2]) == [first]
    with pytest.raises(UsageError, match="no longer in this cache"):
        manager.acquire([second])


@pytest.mark.parametrize("saved_by", ["use", "priority"])
def test_what_was_used_since_or_matters_more_stays(saved_by: str) -> None:
    manager = BlockManager([2], 1)
    first = manager.store(None, (1,))
    manager.store(None, (2,))
    assert first is not None
    if saved_by == "use":
        manager.lookup([1])
    else:
        manager.set_priority(first.block, 1)
    manager.store(None, (3,))
    assert [block.tokens for block in manager] == [(1,), (3,)]


def test_the_oldest_goes_from_level_to_level_and_out() -> None:
    manager = BlockManager([1, 1], 1)
    for token in (1, 2, 3):
        manager.store(None, (token,))
    assert {block.tokens: block.level for block in manager} == {(2,): 1, (3,): 0}


def test_one_that_could_not_be_followed_can_go() -> None:
    manager = BlockManager([1], 1)
    first = manager.store(None, (1,))
    assert first is not None
    assert manager.store(first.block, (2,)) is None, "there is no place but that of its parent"
    assert manager.store(None, (3,)) is not None
    assert [block.tokens for block in manager] == [(3,)]


def test_what_is_raised_does_not_push_out_itself_or_what_it_follows() -> None:
    manager = BlockManager([1, 1], 1)
    first = manager.store(None, (1,))
    manager.store(None, (2,))
    assert first is not None
    assert manager.promote(first.block) == [Move((1, 0), (0, 0))]
    assert [block.tokens for block in manager] == [(1,)]

    manager = BlockManager([2, 2], 1)
    first = manager.store(None, (1,))
    assert first is not None
    second = manager.store(first.block, (2,))
    assert second is not None
    manager.store(None, (3,))
    assert {block.tokens: block.level for block in manager} == {(1,): 0, (2,): 1, (3,): 0}
    manager.promote(second.block)
    assert {block.tokens: block.level for block in manager} == {(1,): 0, (2,): 0, (3,): 1}


def test_what_somebody_relies_on_further_away_keeps_what_it_follows() -> None:
    manager = BlockManager([2, 1], 1)
    first = manager.store(None, (1,))
    assert first is not None
    second = manager.store(first.block, (2,))
    assert second is not None
    manager.store(None, (3,))
    manager.acquire([second.block])
    manager.store(None, (4,))
    assert {block.tokens: block.level for block in manager} == {(1,): 0, (2,): 1, (4,): 0}, "3 went, though 1 is older"
    manager.release([second.block])
    manager.store(None, (5,))
    assert {block.tokens: block.level for block in manager} == {(1,): 1, (4,): 0, (5,): 0}, "1 has its turn again"


def test_what_matters_little_but_is_followed_moves_on() -> None:
    """It cannot be removed, so something of the next level is, though that matters more: not what matters most."""
    manager = BlockManager([2, 1], 1)
    first = manager.store(None, (1,), priority=0)
    assert first is not None
    second = manager.store(first.block, (2,), priority=5)
    manager.store(None, (3,), priority=9)
    assert second is not None
    assert second.block.level == 1
    manager.store(None, (4,), priority=9)
    assert {block.tokens: block.level for block in manager} == {(1,): 1, (3,): 0, (4,): 0}


def test_what_was_relied_upon_was_used_until_it_was_dropped() -> None:
    manager = BlockManager([3], 1)
    blocks = [manager.store(None, (token,)).block for token in (1, 2, 3)]  # type: ignore[union-attr]
    manager.acquire(blocks[:1])
    manager.lookup([2])
    manager.lookup([3])
    manager.release(blocks[:1])
    manager.store(None, (4,))
    assert sorted(block.tokens for block in manager) == [(1,), (3,), (4,)]


def test_who_relies_on_a_block_relies_on_what_it_follows() -> None:
    manager = BlockManager([2, 2], 1)
    first = manager.store(None, (1,))
    assert first is not None
    second = manager.store(first.block, (2,))
    assert second is not None
    manager.acquire([second.block])
    assert manager.store(None, (3,)) is None
    manager.release([second.block])
    moved = manager.store(None, (3,))
    assert moved is not None
    assert second.block.level == 1, "what follows goes before what it follows"
    assert first.block.level == 0


def test_what_matters_less_than_all_of_the_next_level_does_not_push_it_out() -> None:
    manager = BlockManager([1, 1], 1)
    manager.store(None, (1,), priority=5)
    manager.store(None, (2,), priority=0)
    assert {block.tokens: block.level for block in manager} == {(1,): 1, (2,): 0}
    placed = manager.store(None, (3,), priority=0)
    assert placed is not None
    assert placed.moves == []
    assert {block.tokens: block.level for block in manager} == {(1,): 1, (3,): 0}, "2 went, and 1 stayed"


def test_nothing_is_held_when_one_of_several_is_not_there() -> None:
    manager = BlockManager([1], 1)
    gone = manager.store(None, (1,))
    there = manager.store(None, (2,))
    assert gone is not None
    assert there is not None
    with pytest.raises(UsageError, match="no longer in this cache"):
        manager.acquire([there.block, gone.block])
    assert there.block.ref_count == 0
    with pytest.raises(UsageError, match="released more often than it was acquired"):
        manager.release([there.block])


def test_what_follows_has_the_salt_of_what_it_follows() -> None:
    manager = BlockManager([4], 1)
    first = manager.store(None, (1,), salt="mine")
    assert first is not None
    manager.store(first.block, (2,), salt="yours")
    assert len(manager.lookup([1, 2], salt="mine")) == 2
    assert manager.lookup([1, 2], salt="yours") == []


def test_what_is_remembered_of_uses_is_bounded() -> None:
    manager = BlockManager([100], 1)
    manager.store(None, (1,))
    manager.store(None, (2,))
    for _ in range(1_000):
        manager.lookup([2])
    assert len(manager._eviction_queues[0]) <= 2 * 100 + 64
    for token in range(3, 102):
        manager.store(None, (token,))
    assert manager.lookup([1]) == []
    assert len(manager.lookup([2])) == 1


def test_room_costs_the_same_in_a_large_cache() -> None:
    """Half of all blocks are held. Steps are counted, not time: what is looked at until a block is found."""
    looked = []
    for places in (200, 20_000):
        manager = BlockManager([places], 1)
        looked_at = 0

        def holds(entry: Any, level: int, manager: Any = manager) -> bool:
            nonlocal looked_at
            looked_at += 1
            return bool(BlockManager._is_valid(manager, entry, level))

        parent = None
        for token in range(places):
            placed = manager.store(parent, (token,))
            assert placed is not None
            parent = placed.block if token % 50 else None
            if token < places // 2:
                manager.acquire([placed.block])
        manager._is_valid = holds  # type: ignore[method-assign]
        for token in range(50):
            assert manager.store(None, (places + token,)) is not None
        looked.append(looked_at)
    assert looked[1] <= 2 * looked[0]


def test_a_hash_that_two_have_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.runtime.kv.block_manager.hash_block", lambda parent, tokens, salt: 5)
    manager = BlockManager([4], 1)
    manager.store(None, (1,))
    assert manager.store(None, (2,)) is None
    assert manager.lookup([2]) == []
    assert len(manager.lookup([1])) == 1


def test_hashes_are_the_same_everywhere() -> None:
    assert hash_block(None, [1, 2, 3]) == 360767772400219849
    assert len({hash_block(None, [1]), hash_block(None, [1], "a"), hash_block(None, [1, 0]), hash_block(1, [1])}) == 4


def test_a_hash_that_does_not_see_the_parent_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.runtime.kv.block_manager.hash_block", lambda parent, tokens, salt: tokens[0])
    manager = BlockManager([4], 1)
    one, two = manager.store(None, (1,)), manager.store(None, (2,))
    assert one is not None
    assert two is not None
    manager.store(one.block, (5,))
    assert manager.lookup([2, 5]) == [two.block]
