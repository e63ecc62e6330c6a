"""The KV-cache manager by small cases: hits, windows, refusals, groups, retention, and the faults of other engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from minivllm.core.block_hash import make_block_hasher
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    cdiv,
)
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

BLOCK = 4
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(block_size: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def sliding(window: int, block_size: int = BLOCK) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=window, **SHAPE)


def chunked(chunk: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=BLOCK, attention_chunk_size=chunk, **SHAPE)


def mamba(mode: Any = "align") -> KVCacheSpec:
    return MambaSpec(block_size=BLOCK, shapes=((2,),), dtypes=("float32",), mamba_cache_mode=mode)


def make_manager(num_blocks: int, *specs: KVCacheSpec, retention: int | None = None, **settings: Any) -> KVCacheManager:
    """`num_blocks` counts the null block."""
    groups = tuple(KVCacheGroupSpec(layer_names=(f"{i}",), kv_cache_spec=s) for i, s in enumerate(specs or (full(),)))
    sizes = [group.kv_cache_spec.block_size for group in groups]
    settings = {
        "max_model_len": 128,
        "max_in_flight_tokens": 128,
        "scheduler_block_size": math.lcm(*sizes),
        "hash_block_size": math.gcd(*sizes),
    } | settings
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=groups)
    return KVCacheManager(config, prefix_cache_retention_interval=retention, **settings)


def make_request(name: str, prompt: Sequence[int] | int, **sampling: Any) -> Request:
    """A prompt given as a number n is n tokens that only requests of this name have."""
    tokens = [1000 * (1 + sum(name.encode())) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(name, tokens, SamplingParams(**sampling), block_hasher=make_block_hasher(BLOCK))


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None, **settings: Any) -> int | None:
    """Look up, allocate and compute; returns the hit in tokens, None for a refusal."""
    manager.new_step_starts()
    hit, length, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    if manager.allocate_slots(request, end - length, length, hit, **settings) is None:
        return None
    request.num_computed_tokens = end
    manager.check_integrity()
    return length


def go_on(manager: KVCacheManager, request: Request, num_tokens: int = 1) -> bool:
    """A step of `num_tokens` more tokens, which are sampled first where the request has none left to compute."""
    manager.new_step_starts()
    missing = request.num_computed_tokens + num_tokens - request.num_tokens
    request.append_output_token_ids([7] * max(0, missing))
    if manager.allocate_slots(request, num_tokens) is None:
        return False
    request.num_computed_tokens += num_tokens
    manager.check_integrity()
    return True


def table(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    return list(manager.get_block_ids(request.request_id)[group])


def cached(manager: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    """Which blocks of a request's table can be found, by their place in it."""
    blocks = manager.coordinator.get_blocks(request.request_id)[group]
    return [index for index, block in enumerate(blocks) if block.block_hash is not None]


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_pool_can_be_filled_to_the_last_block() -> None:
    """vLLM #47272, #48724: the null block is no room, and all others are."""
    manager = make_manager(4)
    request = make_request("a", 12)
    assert admit(manager, request, full_sequence_must_fit=True) == 0
    assert (manager.num_free_blocks, manager.usage) == (0, 1.0)
    assert not go_on(manager, request)
    assert table(manager, request) == [1, 2, 3]
    assert admit(make_manager(4), make_request("b", 13)) is None


@pytest.mark.parametrize("length", range(1, 14))
def test_a_block_more_exactly_at_the_border(length: int) -> None:
    """MinivLLM #76: wrong slot when length % block_size == 0."""
    manager = make_manager(8)
    request = make_request("a", length)
    admit(manager, request)
    assert len(table(manager, request)) == cdiv(length, BLOCK)
    assert go_on(manager, request)
    assert len(table(manager, request)) == cdiv(length + 1, BLOCK)
    manager.free(request)
    assert manager.num_free_blocks == 7


def test_slots_end_at_max_model_len() -> None:
    manager = make_manager(10, max_model_len=9)
    request = make_request("a", 8)
    admit(manager, request)
    assert go_on(manager, request, 4)
    assert len(table(manager, request)) == 3


@pytest.mark.parametrize(("spec", "fits"), [(full(), False), (sliding(5), True), (sliding(6), False)])
def test_admission_asks_for_the_whole_sequence_or_a_whole_window(spec: KVCacheSpec, fits: bool) -> None:
    """With 8 tokens in flight a window of 5 holds 12 of them, in at most 4 blocks; a window of 6 needs 5."""
    manager = make_manager(5, spec, max_in_flight_tokens=8)
    request = make_request("a", 40)
    assert (admit(manager, request, 8, full_sequence_must_fit=True) == 0) is fits
    while fits and request.num_computed_tokens < 40:
        assert go_on(manager, request, 8), "what was admitted goes on to its end"
    assert admit(make_manager(5), make_request("a", 40), 8) == 0, "the first chunk alone fits"


def test_the_watermark_counts_only_beside_others() -> None:
    manager = make_manager(6, watermark_blocks=2)
    assert admit(manager, make_request("a", 16), has_scheduled_reqs=True) is None
    assert admit(manager, make_request("a", 16), has_scheduled_reqs=False) == 0


def test_a_refused_request_takes_nothing() -> None:
    manager = make_manager(6)
    first = make_request("a", range(8))
    admit(manager, first)
    manager.free(first)
    other = make_request("b", [*range(8), *range(50, 70)])
    before = manager.block_pool.free_block_queue.get_all_free_blocks()
    assert admit(manager, other) is None
    assert manager.block_pool.free_block_queue.get_all_free_blocks() == before
    assert table(manager, other) == []
    manager.check_integrity()


def test_bad_calls_are_refused() -> None:
    manager = make_manager(8)
    request = make_request("a", range(8))
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        manager.allocate_slots(request, 0)
    admit(manager, request)
    hit, length, _ = manager.get_computed_blocks(make_request("b", [*range(8), 9]))
    assert length == 8
    with pytest.raises(RuntimeError, match="'a' runs already and cannot take a prefix-cache hit"):
        manager.allocate_slots(request, 1, 8, hit)


# --- prefix cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(full(),), (sliding(6),), (full(), sliding(6)), (full(), mamba())])
def test_a_prompt_cached_in_full_leaves_a_token_to_compute(specs: tuple[KVCacheSpec, ...]) -> None:
    """vLLM #11186, #17999, nano-vllm #144."""
    manager = make_manager(40, *specs)
    for name in "ab":
        request = make_request(name, range(12))
        for end in (8, 12):  # a Mamba state is cached only where a step ends
            if end == 8:
                length = admit(manager, request, max(8, manager.get_computed_blocks(request)[1] + 1))
            else:
                go_on(manager, request, 12 - request.num_computed_tokens)
        assert length == (0 if name == "a" else 8)
        manager.free(request)


def test_a_request_that_wants_prompt_logprobs_hits_nothing() -> None:
    manager = make_manager(20)
    admit(manager, make_request("a", range(12)))
    assert admit(manager, make_request("b", range(12), prompt_logprobs=1)) == 0
    assert admit(manager, make_request("c", range(12))) == 8


def test_without_caching_nothing_is_found_or_shared() -> None:
    manager = make_manager(20, enable_caching=False)
    first, second = make_request("a", range(12)), make_request("b", range(12))
    assert (admit(manager, first), admit(manager, second)) == (0, 0)
    assert not set(table(manager, first)) & set(table(manager, second))
    assert cached(manager, first) == []


def test_generated_tokens_are_hit_after_a_preemption() -> None:
    manager = make_manager(20)
    request = make_request("a", 6)
    admit(manager, request)
    for _ in range(4):
        go_on(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    assert admit(manager, request) == 8


def test_a_reused_block_is_no_hit() -> None:
    """nano-vllm #163: a stale hash that still points to a block serves another request's K and V."""
    manager = make_manager(4)
    first = make_request("a", range(12))
    admit(manager, first)
    manager.free(first)
    other = make_request("b", 5)
    admit(manager, other)  # takes the last two of a's blocks, the tail first
    again = make_request("c", range(12))
    assert manager.get_computed_blocks(again)[1] == BLOCK
    assert admit(manager, again, 8) is None


def test_hit_blocks_that_nobody_uses_count_as_taken() -> None:
    manager = make_manager(5)
    first = make_request("a", range(16))
    admit(manager, first)
    manager.free(first)
    assert manager.num_free_blocks == 4
    assert admit(manager, make_request("b", [*range(12), *range(90, 96)])) is None  # 3 hit, 2 new: one too many
    assert admit(manager, make_request("b", [*range(12), *range(90, 94)])) == 12


def test_one_groups_new_blocks_do_not_evict_another_groups_hit() -> None:
    """vLLM #44409: in a tiny pool the hit of the last group stands where the first group takes new blocks."""
    manager = make_manager(10, full(), sliding(9))
    first = make_request("a", range(16))
    admit(manager, first)
    manager.free(first)
    second = make_request("b", [*range(16), *range(90, 93)])
    hit, length, _ = manager.get_computed_blocks(second)
    assert length == 16
    ids = [[block.block_id for block in group] for group in hit.blocks]
    assert admit(manager, second) == 16
    assert [table(manager, second, group)[:4] for group in (0, 1)] == ids
    assert set(table(manager, second, 0)[4:] + table(manager, second, 1)[4:]).isdisjoint(ids[0] + ids[1])


def test_the_cache_is_reset_only_when_nothing_runs() -> None:
    manager = make_manager(20)
    request = make_request("a", range(12))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert admit(manager, make_request("b", range(12))) == 0


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [sliding(6), sliding(1), sliding(4), chunked(8), chunked(6)])
@pytest.mark.parametrize("caching", [True, False])
def test_a_block_leaves_the_window_once(spec: KVCacheSpec, caching: bool) -> None:
    """vLLM #1556: a window freed a block twice. Here freeing twice raises, and `go_on` checks all counts."""
    manager = make_manager(9, spec, enable_caching=caching)
    request = make_request("a", 7)
    admit(manager, request)
    for _ in range(60):
        assert go_on(manager, request), "a window needs the same few blocks for ever"
    manager.free(request)
    manager.free(request)  # one that holds nothing
    assert manager.num_free_blocks == 8
    manager.check_integrity()


@pytest.mark.parametrize(
    ("spec", "first_freed_at"),
    [
        (sliding(1), 4),
        (sliding(4), 7),
        (sliding(5), 8),
        (sliding(6), 9),
        (chunked(4), 4),
        (chunked(6), 6),
        (full(), 99),
    ],
)
def test_a_block_is_kept_while_its_last_token_is_read(spec: KVCacheSpec, first_freed_at: int) -> None:
    """The token at position n reads n - window + 1 and later ones, or those of its own chunk."""
    manager = make_manager(9, spec)
    request = make_request("a", 1)
    admit(manager, request)
    for computed in range(1, 14):
        go_on(manager, request)  # the token at position `computed`
        assert (table(manager, request)[0] == 0) is (computed >= first_freed_at), computed


def test_what_leaves_the_window_makes_room_even_for_a_refusal() -> None:
    manager = make_manager(5, sliding(5))
    request = make_request("a", 40)
    assert admit(manager, request, 16) == 0
    assert not go_on(manager, request, 20)
    assert table(manager, request) == [0, 0, 0, 4]
    assert manager.num_free_blocks == 3
    assert go_on(manager, request, 12)


def test_a_window_hits_without_what_is_below_it() -> None:
    manager = make_manager(30, sliding(6), full())
    first = make_request("a", range(20))
    admit(manager, first)
    second = make_request("b", [*range(20), 99])
    hit, length, boundary = manager.get_computed_blocks(second)
    assert (length, boundary) == (20, 0)
    assert [[block.block_id for block in group] for group in hit.blocks] == [[0, 0, 0, 4, 5], [6, 7, 8, 9, 10]]


def test_earlier_chunks_are_computed_for_whoever_asks() -> None:
    manager = make_manager(30, chunked(8))
    assert admit(manager, make_request("a", 21)) == 16


# --- retention and shared prefixes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention", "expected"),
    [(None, [0, 1, 2, 3, 4, 5, 6, 7, 8]), (0, [7, 8]), (16, [2, 3, 6, 7, 8]), (8, [0, 1, 2, 3, 4, 5, 6, 7, 8])],
)
def test_retention_decides_which_windows_are_cached(retention: int | None, expected: list[int]) -> None:
    manager = make_manager(40, full(), sliding(6), retention=retention)
    request = make_request("a", 38)
    admit(manager, request)
    assert cached(manager, request, 0) == list(range(9))
    assert cached(manager, request, 1) == expected
    assert manager.get_computed_blocks(make_request("a", 38))[1] == 36


def test_blocks_of_different_sizes_are_cached_where_all_groups_can_hit() -> None:
    manager = make_manager(60, full(16), sliding(6), retention=None)
    request = make_request("a", 38)
    admit(manager, request)
    assert cached(manager, request, 0) == [0, 1]
    assert cached(manager, request, 1) == [2, 3, 6, 7]
    assert manager.get_computed_blocks(make_request("a", 38))[1] == 32


def test_what_another_group_can_never_hit_is_not_cached() -> None:
    manager = make_manager(60, full(16), chunked(64))
    request = make_request("a", 38)
    admit(manager, request)
    assert cached(manager, request, 1) == list(range(8))


@pytest.mark.parametrize("other", [sliding(6), mamba()])
def test_a_prefix_that_turns_out_to_be_shared_is_kept(other: KVCacheSpec) -> None:
    """With retention 0 nobody keeps a window in the middle of a prompt, until a second prompt shares it."""
    manager = make_manager(60, full(), other, retention=0)
    boundaries, hits = [], []
    for index in range(3):
        request = make_request("abc"[index], [*range(17), *range(100 * (index + 1), 100 * (index + 1) + 14)])
        manager.new_step_starts()
        _, length, boundary = manager.get_computed_blocks(request)
        hits.append(admit(manager, request, max(16, length + 1)))
        go_on(manager, request, request.num_tokens - request.num_computed_tokens)
        boundaries.append(boundary)
        manager.free(request)
    assert boundaries == [0, 16, 0]
    assert hits == [0, 0, 16]


@pytest.mark.parametrize("retention", [-4, 2, 6])
def test_a_retention_interval_ends_where_a_hit_may_end(retention: int) -> None:
    words = f"prefix_cache_retention_interval={retention} must be None, 0 or a multiple of the scheduler block size 4"
    with pytest.raises(ValueError, match=words):
        make_manager(20, full(), sliding(6), retention=retention)


# --- Mamba -----------------------------------------------------------------------------------------------------------


def test_one_state_a_request_without_a_cache() -> None:
    spec = MambaSpec(block_size=128, shapes=((2,),), dtypes=("float32",))
    manager = make_manager(2, spec, enable_caching=False)
    request = make_request("a", 100)
    admit(manager, request)
    for _ in range(20):
        assert go_on(manager, request)
    assert table(manager, request) == [1]


def test_aligned_states_are_handed_on_from_block_to_block() -> None:
    manager = make_manager(4, mamba(), enable_caching=False)
    request = make_request("a", 8)
    admit(manager, request)
    assert table(manager, request) == [0, 1]
    for step in [*[12] * 6, *[1] * 30]:  # long steps leave null blocks between the states
        assert go_on(manager, request, step)
        assert sum(block != 0 for block in table(manager, request)) <= 2


def test_a_state_that_is_written_in_this_step_is_no_hit_yet() -> None:
    manager = make_manager(30, mamba(), full())
    first, second = make_request("a", range(8)), make_request("b", range(9))
    admit(manager, first)
    hit, length, _ = manager.get_computed_blocks(second)
    assert length == 8
    assert manager.allocate_slots(second, 1, length, hit) is None
    assert admit(manager, second) == 8  # a step later


@pytest.mark.parametrize(("specs", "zeroed"), [((full(), mamba()), True), ((full(), sliding(6)), False)])
def test_states_are_zeroed_before_they_are_used(specs: tuple[KVCacheSpec, ...], zeroed: bool) -> None:
    manager = make_manager(30, *specs)
    request = make_request("a", 10)
    admit(manager, request)
    new = {block for group in (0, 1) for block in table(manager, request, group) if block}
    assert set(manager.take_new_block_ids()) == (new if zeroed else set())
    assert manager.take_new_block_ids() == []


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_latent_layer_is_full_attention_and_unknown_layers_are_refused() -> None:
    latent = MLAAttentionSpec(block_size=BLOCK, **SHAPE)
    assert admit(make_manager(10, latent), make_request("a", 9)) == 0
    with pytest.raises(ValueError, match="no manager knows a KV-cache group of AttentionSpec"):
        make_manager(10, AttentionSpec(block_size=BLOCK, **SHAPE))


def test_block_sizes_must_fit_the_hashes_and_the_scheduler() -> None:
    for sizes in ({"hash_block_size": 3}, {"scheduler_block_size": 6}):
        with pytest.raises(ValueError, match=r"block sizes \[4, 8\] must be multiples of hash_block_size"):
            make_manager(20, full(8), sliding(6), **sizes)


def test_ids_of_no_blocks_may_be_none() -> None:
    manager = make_manager(20, full(), sliding(6))
    request = make_request("a", 6)
    admit(manager, request)
    request.append_output_token_ids(1)
    blocks = manager.allocate_slots(request, 1)
    assert blocks is not None
    assert (blocks.get_block_ids(), blocks.get_block_ids(allow_none=True)) == (([], []), None)
    assert manager.get_block_ids("nobody") == ([], [])


# --- the check itself ------------------------------------------------------------------------------------------------


def lose_a_reference(pool: BlockPool, tables: list[list[Any]]) -> None:
    tables[0][0].ref_cnt += 1


def hold_twice(pool: BlockPool, tables: list[list[Any]]) -> None:
    tables[0][1] = tables[0][0]


def hold_another_groups(pool: BlockPool, tables: list[list[Any]]) -> None:
    tables[1][0] = tables[0][0]


def hold_too_little(pool: BlockPool, tables: list[list[Any]]) -> None:
    del tables[0][1:]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_a_reference, "is referred to by 1 tables"),
        (hold_twice, "holds a block twice"),
        (hold_another_groups, "belongs to another group"),
        (hold_too_little, "cached 2 of 1 blocks"),
    ],
)
def test_integrity_names_what_is_broken(harm: Any, words: str) -> None:
    manager = make_manager(20, full(), sliding(9))
    request = make_request("a", 9)
    admit(manager, request)
    harm(manager.block_pool, list(manager.coordinator.get_blocks(request.request_id)))
    with pytest.raises(RuntimeError, match=words):
        manager.check_integrity()
