from __future__ import annotations

import pytest
from llmopt.engine.scheduling.block_pool import BlockPool


def test_blocks_come_in_order_and_never_the_null_block():
    pool = BlockPool(6)
    assert pool.num_usable == 5
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_freed_blocks_come_back_tail_last():
    pool = BlockPool(6)
    table = pool.allocate(3)
    pool.free(table)
    # Without content they go to the front, the tail of the sequence first: 1 ends up first of all.
    assert pool.allocate(5) == [1, 2, 3, 4, 5]


def test_blocks_with_content_are_reused_last_and_the_oldest_first():
    pool = BlockPool(6)
    reused: list[int] = []
    pool.on_reuse = reused.append
    table = pool.allocate(3)
    for block_id in table:
        pool.cached_ids.add(block_id)
    pool.free(table)
    assert pool.allocate(2) == [4, 5]
    assert reused == []
    assert pool.allocate(3) == [3, 2, 1], "the end of a prefix goes before its beginning"
    assert reused == [3, 2, 1]


def test_sharing_revives_a_block_from_the_middle_of_the_free_list():
    pool = BlockPool(6)
    table = pool.allocate(3)
    for block_id in table:
        pool.cached_ids.add(block_id)
    pool.free(table)
    pool.share([table[1]])
    assert pool.num_free == 4
    pool.check_integrity([[table[1]]])
    assert table[1] not in pool.allocate(4)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4)
    table = pool.allocate(1)
    pool.share(table)
    pool.free(table)
    assert pool.num_free == 2
    pool.free(table)
    assert pool.num_free == 3


def test_freeing_twice_is_caught():
    pool = BlockPool(4)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_integrity_check_finds_a_lost_block():
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity([table[:1]])


def test_a_pool_needs_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(1)
