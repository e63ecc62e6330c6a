"""Specs: bytes of a page, blocks of a request, merging, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from minivllm.config import ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SpecsDifferError,
    UniformTypeKVCacheSpecs,
)

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
CONFIG = VllmConfig(
    model_config=ModelConfig(model="m", hf_config=None, dtype="float32", max_model_len=100),
    scheduler_config=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
)


def mamba(**changes: Any) -> MambaSpec:
    given: dict[str, Any] = {"block_size": 64, "shapes": ((3, 4), (2, 2, 2)), "dtypes": ("float16", "float32")}
    return MambaSpec(**{**given, **changes})


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**SHAPE, **changes})


@pytest.mark.parametrize(
    ("spec", "page", "blocks"),
    [
        (full(), 16 * 2 * (8 + 8) * 2, 7),
        (full(head_size_v=4), 16 * 2 * (8 + 4) * 2, 7),
        (full(dtype="float32"), 16 * 2 * 16 * 4, 7),
        (full(page_size_padded=2000), 2000, 7),
        (MLAAttentionSpec(**SHAPE), 16 * 2 * 8 * 2, 7),
        (SlidingWindowSpec(**SHAPE, sliding_window=17), 1024, 3 + 1),
        (SlidingWindowSpec(**SHAPE, sliding_window=1), 1024, 2 + 1),
        (SlidingWindowSpec(**SHAPE, sliding_window=500), 1024, 7 + 1),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32), 1024, 4),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=500), 1024, 7),
        (mamba(), 3 * 4 * 2 + 8 * 4, 1),
        (mamba(mamba_cache_mode="align"), 56, 2),
        (mamba(mamba_cache_mode="all"), 56, 2),
        (mamba(mamba_cache_mode="all", block_size=16), 56, 7),
    ],
)
def test_page_bytes_and_blocks_of_one_request(spec: KVCacheSpec, page: int, blocks: int) -> None:
    assert spec.page_size_bytes == page
    assert spec.max_blocks_per_request(100, 32) == blocks
    assert spec.max_memory_usage_bytes(CONFIG) == page * blocks


def test_specs_are_frozen_hashable_values() -> None:
    assert full() == full()
    assert len({full(), full(), full(head_size=16), MLAAttentionSpec(**SHAPE)}) == 3
    assert hash(full(head_size_v=8)) == hash(full())
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": full(head_size=16)})
    assert len({group, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(group.kv_cache_specs))}) == 1
    with pytest.raises(FrozenInstanceError):
        full().block_size = 32  # type: ignore[misc]
    with pytest.raises(TypeError):
        FullAttentionSpec(16, 2, 8, "float16")  # type: ignore[misc]
    with pytest.raises(TypeError, match="window"):
        full(window=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: full(block_size=0), r"FullAttentionSpec.block_size must be an integer of at least 1, got 0"),
        (lambda: full(block_size=None), r"block_size must be .* got None"),
        (lambda: full(num_kv_heads=-1), r"num_kv_heads .* got -1"),
        (lambda: full(head_size=2.5), r"head_size .* got 2.5"),
        (lambda: full(sliding_window=0), r"sliding_window .* got 0"),
        (lambda: full(attention_chunk_size=0), r"attention_chunk_size .* got 0"),
        (lambda: SlidingWindowSpec(**SHAPE, sliding_window=0), r"SlidingWindowSpec.sliding_window .* got 0"),
        (lambda: SlidingWindowSpec(**SHAPE, sliding_window=None), r"SlidingWindowSpec.sliding_window .* got None"),  # type: ignore[arg-type]
        (lambda: ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=-4), r"attention_chunk_size .* got -4"),
        (lambda: full(dtype="bf16"), r"dtype 'bf16' is not known"),
        (lambda: full(page_size_padded=1000), r"page_size_padded=1000 is below the page's own 1024 bytes"),
        (lambda: mamba(page_size_padded=55), r"page_size_padded=55 is below the page's own 56"),
        (lambda: mamba(dtypes=("float16",)), r"a dtype for each state"),
        (lambda: mamba(shapes=(), dtypes=()), r"a dtype for each state"),
        (lambda: mamba(mamba_cache_mode="some"), r"mamba_cache_mode must be .* got 'some'"),
    ],
)
def test_bad_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_new_block_size_scales_pages_and_padding() -> None:
    assert full().copy_with_new_block_size(64).page_size_bytes == 4 * 1024
    assert full(page_size_padded=2048).copy_with_new_block_size(32).page_size_padded == 4096
    assert mamba().copy_with_new_block_size(8).page_size_bytes == 56


def test_merge_keeps_one_window_and_refuses_differences() -> None:
    merged = FullAttentionSpec.merge([full(), full(sliding_window=32), full()])
    assert merged == full(sliding_window=32)
    assert FullAttentionSpec.merge([full(attention_chunk_size=8)]).attention_chunk_size == 8
    window = SlidingWindowSpec(**SHAPE, sliding_window=32)
    assert SlidingWindowSpec.merge([window, window]) == window
    for specs in (
        [full(), full(head_size=16)],
        [full(), full(head_size_v=4)],
        [full(), MLAAttentionSpec(**SHAPE)],
        [full(), window],
        [full(sliding_window=8), full(attention_chunk_size=8)],
    ):
        with pytest.raises(SpecsDifferError):
            FullAttentionSpec.merge(specs)  # type: ignore[arg-type]
    with pytest.raises(SpecsDifferError):
        SlidingWindowSpec.merge([window, SlidingWindowSpec(**SHAPE, sliding_window=64)])
    for specs in ([full(sliding_window=8), full(sliding_window=9)], [full(attention_chunk_size=n) for n in (1, 2)]):
        with pytest.raises(ValueError, match="must have the same window size") as caught:
            FullAttentionSpec.merge(specs)
        assert not isinstance(caught.value, SpecsDifferError)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (full(), full(head_size=64), True),
        (full(), MLAAttentionSpec(**SHAPE), True),
        (MLAAttentionSpec(**SHAPE), full(), True),
        (full(), full(block_size=32), False),
        (full(), SlidingWindowSpec(**SHAPE, sliding_window=4), False),
        (SlidingWindowSpec(**SHAPE, sliding_window=4), full(), False),
        (SlidingWindowSpec(**SHAPE, sliding_window=4), SlidingWindowSpec(**SHAPE, sliding_window=5), False),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=4), full(attention_chunk_size=4), False),
        (mamba(), mamba(shapes=((6, 2), (4, 2))), True),
        (mamba(), mamba(shapes=((9, 4), (2, 2, 2))), False),
    ],
)
def test_same_type_means_the_same_blocks(a: KVCacheSpec, b: KVCacheSpec, same: bool) -> None:
    assert a.is_same_type(b) is same
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": a, "b": b}) is same


def test_uniform_type_group_sums_pages_and_takes_the_most_blocks() -> None:
    specs: dict[str, KVCacheSpec] = {"a": full(), "b": full(head_size=32), "c": MLAAttentionSpec(**SHAPE)}
    group = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    assert group.page_size_bytes == 1024 + 4096 + 512
    assert group.max_memory_usage_bytes(CONFIG) == 7 * (1024 + 4096 + 512)
    assert group.kind == "full_attention"
    assert group.first_spec is specs["a"]
    with pytest.raises(SpecsDifferError, match="do not have one type"):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": mamba()})
    with pytest.raises(SpecsDifferError):
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={})


def test_zeroing_is_needed_for_states_and_for_mixed_dtypes() -> None:
    def needs(*specs: KVCacheSpec) -> bool:
        groups = tuple(KVCacheGroupSpec(layer_names=(str(i),), kv_cache_spec=s) for i, s in enumerate(specs))
        return KVCacheConfig(num_blocks=2, kv_cache_tensors=(), kv_cache_groups=groups).needs_kv_cache_zeroing

    assert not needs(full(), SlidingWindowSpec(**SHAPE, sliding_window=4))
    assert needs(full(), mamba())
    assert needs(full(), full(dtype="float32"))
    assert not needs()
