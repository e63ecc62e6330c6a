"""The block pool: order of the free queue, reference counts, hashes that come and go, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock
from minivllm.core.kv_cache_interface import BlockId


def make_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, enable_caching=True, hash_block_size=4)


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def take(pool: BlockPool, hashes: str) -> list[KVCacheBlock]:
    """One new block a letter, cached under it; a dot is a block without a hash."""
    blocks = pool.get_new_blocks(len(hashes))
    for block, letter in zip(blocks, hashes, strict=True):
        if letter != ".":
            pool.cache_block(block, name(letter), 0)
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    """vLLM #47272, #48724: it does not count as room."""
    pool = make_pool(4)
    assert pool.get_num_free_blocks() == 3
    assert [block.block_id for block in pool.get_new_blocks(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks are asked for, but only 0 are free"):
        pool.get_new_blocks(1)
    assert pool.get_usage() == 1.0
    pool.free_blocks([pool.null_block])
    pool.touch([pool.null_block])
    assert pool.get_num_free_blocks() == 0
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_room_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_gpu_blocks={num_blocks}"):
        make_pool(num_blocks)


def test_refused_requests_take_nothing() -> None:
    pool = make_pool(4)
    with pytest.raises(ValueError, match="4 blocks are asked for"):
        pool.get_new_blocks(4)
    assert free_ids(pool) == [1, 2, 3]


def test_uncached_blocks_go_first_and_tails_before_heads() -> None:
    pool = make_pool()
    blocks = take(pool, "ab..")
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [4, 3, 5, 6, 7, 2, 1]
    pool.check_integrity()


def test_a_block_is_free_when_its_last_user_has_gone() -> None:
    pool = make_pool()
    blocks = take(pool, "ab")
    pool.touch(blocks)
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [3, 4, 5, 6, 7]
    pool.free_blocks(reversed(blocks))
    assert free_ids(pool) == [3, 4, 5, 6, 7, 2, 1]


def test_a_block_is_not_freed_twice() -> None:
    """vLLM #1556."""
    pool = make_pool()
    (block,) = take(pool, ".")
    pool.free_blocks([block])
    with pytest.raises(RuntimeError, match="freed more often than it was handed out"):
        pool.free_blocks([block])


def test_a_hit_takes_a_block_out_of_the_queue() -> None:
    pool = make_pool(6)
    pool.free_blocks(take(pool, "abc"))
    hit = pool.get_cached_block(name("b"), [0])
    assert hit is not None
    pool.touch(hit)
    assert free_ids(pool) == [4, 5, 1, 3]
    with pytest.raises(RuntimeError, match="is not in the free queue"):
        pool.free_block_queue.remove(hit[0])
    pool.check_integrity()


def test_a_reused_block_is_not_found_by_its_old_hash() -> None:
    """nano-vllm #163: the map must forget a block that is handed out again."""
    pool = make_pool(4)
    pool.free_blocks(take(pool, "abc"))
    assert pool.get_cached_block(name("a"), [0]) is not None
    (block,) = pool.get_new_blocks(1)
    assert block.block_hash is None
    assert pool.get_cached_block(name("a"), [0]) is None
    assert pool.get_cached_block(name("b"), [0]) is not None
    pool.check_integrity()


def test_the_oldest_of_equal_blocks_is_found_until_it_goes() -> None:
    pool = make_pool(4)
    first, second, third = take(pool, "aaa")
    assert pool.get_cached_block(name("a"), [0]) == [first]
    pool.free_blocks([first])
    pool.get_new_blocks(1)
    assert pool.get_cached_block(name("a"), [0]) == [second]
    pool.free_blocks([third, second])
    pool.get_new_blocks(1)  # the third
    assert pool.get_cached_block(name("a"), [0]) == [second]
    pool.check_integrity()


def test_groups_have_their_own_blocks() -> None:
    pool = make_pool()
    here, there = pool.get_new_blocks(2)
    pool.cache_block(here, name("a"), 0)
    assert pool.get_cached_block(name("a"), [0, 1]) is None
    pool.cache_block(there, name("a"), 1)
    assert pool.get_cached_block(name("a"), [1, 0]) == [there, here]


def test_a_block_has_one_hash_and_the_null_block_none() -> None:
    pool = make_pool()
    (block,) = take(pool, "a")
    for refused in (block, pool.null_block):
        with pytest.raises(RuntimeError, match="cannot be given a hash"):
            pool.cache_block(refused, name("b"), 0)


def test_evicted_blocks_keep_their_places() -> None:
    pool = make_pool(5)
    used, free = take(pool, "ab")
    pool.free_blocks([free])
    pool.evict_blocks([used.block_id, free.block_id, BlockId(0), BlockId(4)])
    assert pool.get_cached_block(name("a"), [0]) is None
    assert pool.get_cached_block(name("b"), [0]) is None
    assert free_ids(pool) == [3, 4, 2]
    pool.check_integrity()


def test_the_cache_is_reset_only_when_nobody_uses_it() -> None:
    pool = make_pool()
    blocks = take(pool, "ab")
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(name("a"), [0]) is not None
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(name("a"), [0]) is None
    assert all(block.block_hash is None for block in pool.blocks)
    pool.check_integrity()


def break_count(pool: BlockPool) -> None:
    pool.free_block_queue.num_free_blocks += 1


def break_link(pool: BlockPool) -> None:
    pool.blocks[5].next_free_block = pool.blocks[4]


def break_owner(pool: BlockPool) -> None:
    pool.blocks[5].ref_cnt = 1


def break_hash(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = None


def break_null(pool: BlockPool) -> None:
    pool.null_block.ref_cnt = 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (break_count, "free queue"),
        (break_link, "free queue"),
        (break_owner, "blocks in use in the free queue"),
        (break_hash, "hashes in the map and on the blocks differ"),
        (break_null, "null block"),
    ],
)
def test_integrity_names_what_is_broken(harm: Callable[[BlockPool], None], words: str) -> None:
    pool = make_pool()
    take(pool, "a")
    pool.check_integrity()
    harm(pool)
    with pytest.raises(RuntimeError, match=words):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_the_queue_is_a_list_with_quick_removal(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [KVCacheBlock(BlockId(index)) for index in range(20)]
    queue, expected = FreeKVCacheBlockQueue(blocks), list(blocks)
    for _ in range(200):
        outside = [block for block in blocks if block not in expected]
        rng.shuffle(outside)
        match rng.randrange(4):
            case 0 if expected:
                count = rng.randint(0, len(expected))
                assert queue.popleft_n(count) == expected[:count]
                del expected[:count]
            case 1 if expected:
                chosen = rng.choice(expected)
                queue.remove(chosen)
                expected.remove(chosen)
            case 2:
                queue.append_n(outside[:3])
                expected += outside[:3]
            case 3:
                queue.prepend_n(outside[:3])
                expected = outside[:3] + expected
        assert queue.get_all_free_blocks() == expected
        assert queue.num_free_blocks == len(expected)
