"""sliding_skip.json: what leaves a window, what hits, what is cached and what is reserved, as in vLLM 0.32.0."""

from __future__ import annotations

from typing import Any

import pytest
from golden_cases import cases
from golden_specs import make_kv_cache_config, make_spec

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_coordinator import KVCacheCoordinator, manager_class
from minivllm.core.single_type_manager import SingleTypeKVCacheManager

FORMS = ("sliding_window", "attention_chunk_size", "mamba_cache_mode")


def manager_of(given: dict[str, Any], pool: BlockPool, **settings: Any) -> SingleTypeKVCacheManager:
    settings = {"max_model_len": 1024, "max_in_flight_tokens": 64, "alignment_tokens": given["block_size"]} | settings
    spec = make_spec(given)
    return manager_class(spec)(spec, pool, 0, **settings)


def take_spec(case: dict[str, Any]) -> dict[str, Any]:
    """The part of a case that describes a spec, taken out of it."""
    spec = {"type": case.pop("manager"), "block_size": case.pop("block_size")}
    return spec | {name: case.pop(name) for name in FORMS if name in case}


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def hash_of(block: int) -> BlockHash:
    return BlockHash(b"%d" % block)


def filled_pool(cached: list[list[int]], block_sizes: list[int], hash_block_size: int) -> BlockPool:
    """A pool in which block i of group g is cached where cached[g][i] says so, as block 10 + 40 g + i."""
    pool = BlockPool(400, enable_caching=True, hash_block_size=hash_block_size)
    for group, (flags, size) in enumerate(zip(cached, block_sizes, strict=True)):
        for index, flag in enumerate(flags):
            if flag:
                last = (index + 1) * size // hash_block_size - 1
                pool.cache_block(pool.blocks[10 + 40 * group + index], hash_of(last), group)
    return pool


def skip(case: dict[str, Any]) -> None:
    spec = take_spec(case)
    # Speculation, which is left out here, keeps more than the window: the same as a longer window.
    extra = case.pop("extra_retained_tokens", 0)
    if extra:
        spec["sliding_window"] += extra
    pool = BlockPool(64, enable_caching=True, hash_block_size=spec["block_size"])
    manager = manager_of(spec, pool)
    manager.allocate_new_blocks("r", case.pop("allocated_tokens"))
    assert ids(manager.req_to_blocks["r"]) == case.pop("initial_blocks")
    for call in case.pop("calls"):
        computed = call["computed_tokens"]
        manager.remove_skipped_blocks("r", computed)
        assert call == {
            "computed_tokens": computed,
            "num_skipped_tokens": manager.get_num_skipped_tokens(computed),
            "blocks": ids(manager.req_to_blocks["r"]),
            "free_blocks": pool.get_num_free_blocks(),
            "free_queue_head": ids(pool.free_block_queue.get_all_free_blocks()[:6]),
        }
        pool.check_integrity()


def mamba_align_steps(case: dict[str, Any]) -> None:
    case |= {"manager": "mamba", "mamba_cache_mode": "align"}
    spec = take_spec(case)
    pool = BlockPool(40, enable_caching=False, hash_block_size=spec["block_size"])
    manager = manager_of(spec, pool)
    assert case.pop("prompt_tokens") in [step["num_tokens"] for step in case["steps"]]
    for step in case.pop("steps"):
        computed, num_tokens = step["computed_tokens"], step["num_tokens"]
        manager.new_step_starts()
        manager.remove_skipped_blocks("r", computed)
        needed = manager.get_num_blocks_to_allocate("r", num_tokens, [])
        returned = manager.allocate_new_blocks("r", num_tokens)
        assert step == {
            "computed_tokens": computed,
            "num_tokens": num_tokens,
            "blocks_needed": needed,
            "returned_blocks": ids(returned),
            "blocks": ids(manager.req_to_blocks["r"]),
            "free_blocks": pool.get_num_free_blocks(),
        }
        pool.check_integrity()


def longest_hit(case: dict[str, Any]) -> None:
    spec, cached = take_spec(case), case.pop("cached")
    if spec["type"] == "mamba":
        spec["mamba_cache_mode"] = "all"
    size = spec["block_size"]
    pool = filled_pool(cached, [size] * len(cached), size)
    manager = manager_of(spec, pool, alignment_tokens=case.pop("alignment_tokens"))
    hashes = [hash_of(index) for index in range(len(cached[0]))]
    groups = range(len(cached))
    found = manager.find_longest_cache_hit(hashes, case.pop("max_length"), groups, case.pop("drop_eagle_block"))
    assert [ids(blocks) for blocks in found] == case.pop("hit_blocks")
    assert len(found[0]) * size == case.pop("hit_length")


def coordinator_hit(case: dict[str, Any]) -> None:
    groups, cached, hash_size = case.pop("groups"), case.pop("cached"), case.pop("hash_block_size")
    assert case.pop("family") in {
        "full_sliding", "full_chunked", "two_windows_full", "sliding_sliding", "full_sliding_same_window_twice",
        "full8_sliding4",
    }  # fmt: skip
    pool = filled_pool(cached, [group["block_size"] for group in groups], hash_size)
    coordinator = KVCacheCoordinator(
        make_kv_cache_config(groups, 400),
        pool,
        max_model_len=1024,
        max_in_flight_tokens=64,
        scheduler_block_size=case.pop("scheduler_block_size"),
        retention_interval=None,
    )
    max_length = case.pop("max_length")
    hashes = [hash_of(index) for index in range(max_length // hash_size + 2)]
    found, length, uncached = coordinator.find_longest_cache_hit(hashes, max_length)
    assert [ids(blocks) for blocks in found] == case.pop("hit_blocks")
    assert length == case.pop("hit_length")
    assert uncached == case.pop("num_uncached_common_prefix_tokens")


def sliding_cache_mask(case: dict[str, Any]) -> None:
    spec = take_spec(case | {"manager": "sliding_window"})
    for name in spec:
        case.pop(name, None)
    settings = {name: case.pop(name) for name in ("alignment_tokens", "retention_interval")}
    manager = manager_of(spec, BlockPool(2, enable_caching=True, hash_block_size=1), **settings)
    start, end = case.pop("start_block"), case.pop("end_block")
    mask = manager.reachable_block_mask(start, end, case.pop("reachable_boundaries"))
    assert mask == case.pop("mask")


def admission_cap(case: dict[str, Any]) -> None:
    form = {"sliding_window": "sliding_window", "chunked_local": "attention_chunk_size"}[case["manager"]]
    case[form] = case.pop("window_or_chunk")
    settings = {name: case.pop(name) for name in ("max_in_flight_tokens", "max_model_len")}
    spec = take_spec(case)
    manager = manager_of(spec, BlockPool(64, enable_caching=True, hash_block_size=1), **settings)
    most = case.pop("max_blocks")
    assert manager.max_blocks == most
    # It counts on admission only, however long the sequence is.
    assert manager.get_num_blocks_to_allocate("r", 10**6, [], admission=True) == most
    assert manager.get_num_blocks_to_allocate("r", 10**6, []) == 10**6 // spec["block_size"]


CHECKS = {
    "skip": skip,
    "mamba_align_steps": mamba_align_steps,
    "longest_hit": longest_hit,
    "coordinator_hit": coordinator_hit,
    "sliding_cache_mask": sliding_cache_mask,
    "admission_cap": admission_cap,
}


@pytest.mark.parametrize("case", cases("sliding_skip"))
def test_sliding_skip(case: dict[str, Any]) -> None:
    case = dict(case)
    check = CHECKS[case.pop("kind")]
    case.pop("id")
    check(case)
    assert not case, f"unread fields {set(case)}"
