"""Grouping, sizing and placement beyond the golden cases: invariants on random models, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.kv_cache_groups import (
    blocks_per_request,
    bytes_per_block,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_config,
    get_kv_cache_configs,
    resolve_kv_cache_block_sizes,
)
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from minivllm.core.layer_grouping import KVCacheLayout, get_kv_cache_groups, unify_kv_cache_spec_page_size

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
PAGE = 16 * 2 * 16 * 2
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=32)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=32)
MAMBA = MambaSpec(block_size=64, shapes=((3, 7),), dtypes=("float32",))


def config(max_model_len: int = 256, max_num_batched_tokens: int = 64, **cache: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model="m", hf_config=None, dtype="float32", max_model_len=max_model_len),
        cache_config=CacheConfig(**cache),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1),
    )


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{index}": spec for index, spec in enumerate(specs)}


def names(groups: list[KVCacheGroupSpec]) -> list[str]:
    """Layer numbers of each group, as "0 2 4"."""
    return [" ".join(name.removeprefix("layers.") for name in group.layer_names) for group in groups]


def test_layers_are_dealt_out_in_strides() -> None:
    assert names(get_kv_cache_groups(layers(*[FULL] * 3))) == ["0 1 2"]
    assert names(get_kv_cache_groups(layers(*[SLIDING, SLIDING, FULL] * 2))) == ["0 3", "1 4", "2 5"]
    # 3 full and 4 sliding layers: 4 is under 1.5 times 3, so neither is split.
    assert names(get_kv_cache_groups(layers(*[FULL] * 3, *[SLIDING] * 4))) == ["0 1 2", "3 4 5 6"]
    # 2 and 3: 3 is not under 1.5 times 2.
    assert names(get_kv_cache_groups(layers(*[FULL] * 2, *[SLIDING] * 3))) == ["0 1", "2 4", "3"]
    assert get_kv_cache_groups({}) == []


def test_full_layers_with_and_without_a_window_share_a_bucket() -> None:
    windowed = FullAttentionSpec(**SHAPE, sliding_window=8)
    groups = get_kv_cache_groups(layers(FULL, SLIDING, windowed, SLIDING))
    assert names(groups) == ["0 2", "1 3"]
    assert groups[0].kv_cache_spec == windowed


def test_hybrid_off_allocates_windows_as_full_attention() -> None:
    groups = get_kv_cache_groups(layers(FULL, SLIDING, SLIDING), disable_hybrid=True)
    assert [group.kv_cache_spec for group in groups] == [FullAttentionSpec(**SHAPE, sliding_window=32)]
    (group,) = get_kv_cache_groups(layers(SLIDING, CHUNKED, FULL), disable_hybrid=True)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert [s.page_size_bytes for s in group.kv_cache_spec.kv_cache_specs.values()] == [PAGE] * 3
    padded = SlidingWindowSpec(**{**SHAPE, "block_size": 32}, sliding_window=32, page_size_padded=2 * PAGE + 64)
    (group,) = get_kv_cache_groups(layers(FULL, padded), disable_hybrid=True)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    promoted = group.kv_cache_spec.kv_cache_specs["layers.1"]
    assert (promoted.block_size, promoted.page_size_padded) == (16, 2 * PAGE + 64)
    with pytest.raises(ValueError, match=r"Failed to promote .* share one group.*'mamba, block size 64': 1"):
        get_kv_cache_groups(layers(FULL, SLIDING, MAMBA), disable_hybrid=True)
    other = SlidingWindowSpec(**SHAPE, sliding_window=64)
    with pytest.raises(ValueError, match=r"must have the same window size.*disable_hybrid_kv_cache_manager=False"):
        get_kv_cache_groups(layers(FULL, SLIDING, other), disable_hybrid=True)
    # Nothing to stand in for: windows alone are not promoted.
    with pytest.raises(ValueError, match="Failed to promote"):
        get_kv_cache_groups(layers(SLIDING, other), disable_hybrid=True)


def test_pages_are_unified_by_block_size_then_by_padding() -> None:
    def spec(heads: int, cls: type[Any] = FullAttentionSpec, **changes: Any) -> Any:
        return cls(**{**SHAPE, "num_kv_heads": heads, **changes})

    grown = unify_kv_cache_spec_page_size({"a": spec(2), "b": spec(8)})
    assert (grown["a"].block_size, grown["a"].page_size_padded) == (64, None)
    padded = unify_kv_cache_spec_page_size({"a": spec(3), "b": spec(8)})
    assert (padded["a"].block_size, padded["a"].page_size_bytes) == (16, padded["b"].page_size_bytes)
    # A state of 84 bytes divides a page of 1,008, but a state never grows with the block.
    state = unify_kv_cache_spec_page_size({"m": MAMBA, "a": spec(1, head_size=63, block_size=4)})
    assert (state["m"].block_size, state["m"].page_size_padded) == (64, 1008)
    mla = spec(1, MLAAttentionSpec, head_size=32)  # 1,024 bytes
    assert unify_kv_cache_spec_page_size({"m": mla, "a": spec(4)})["m"].block_size == 32
    with pytest.raises(NotImplementedError, match=r"Layer m: .*1024 bytes, the largest 1536"):
        unify_kv_cache_spec_page_size({"m": mla, "a": spec(3)})


def test_an_mla_page_that_cannot_grow_falls_back_to_one_group_beside_sliding_layers_only() -> None:
    mla = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1, "head_size": 36})
    larger = SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 3}, sliding_window=32)
    (group,) = get_kv_cache_groups(layers(mla, larger))
    assert group.kv_cache_spec.kind == "full_attention"
    chunked = ChunkedLocalAttentionSpec(**{**SHAPE, "num_kv_heads": 3}, attention_chunk_size=32)
    for others in (
        [chunked],
        [larger, chunked],
        [larger, MAMBA],
        [MambaSpec(block_size=64, shapes=((999,),), dtypes=("float32",))],
    ):
        with pytest.raises(NotImplementedError, match=r"Layer layers.0: page size is not divisible"):
            get_kv_cache_groups(layers(mla, *others))


def test_not_even_one_request_or_block_is_refused_with_bytes_and_remedy() -> None:
    specs = layers(FULL, FULL)
    needed = 16 * 2 * PAGE  # 256 tokens
    block = 2 * PAGE
    assert get_kv_cache_config(config(), specs, needed + block).num_blocks == 17
    with pytest.raises(ValueError, match="max seq len") as caught:
        get_kv_cache_config(config(), specs, needed + block - 1)
    message = str(caught.value)
    for part in (str(needed), str(needed - 1), "estimated maximum model length is 240", "gpu_memory_utilization",
                 "`max_model_len`"):  # fmt: skip
        assert part in message
    for memory in (0, -1, block):
        with pytest.raises(
            ValueError, match=rf"No available memory.*\({memory} bytes are given.*null block takes {block}"
        ):
            get_kv_cache_config(config(), specs, memory)
    with pytest.raises(ValueError, match="max seq len") as caught:
        get_kv_cache_config(config(), specs, 2 * block - 1)
    assert "estimated" not in str(caught.value)
    with pytest.raises(ValueError, match=r"max seq len \(256\)"):
        get_kv_cache_config(config(num_gpu_blocks_override=16), specs, 10 * needed)
    assert get_kv_cache_config(config(num_gpu_blocks_override=17), specs, 1).num_blocks == 17


def test_workers_agree_on_blocks_and_group_ids() -> None:
    first, second = {"a": FULL, "b": SLIDING}, {"c": FULL, "d": SLIDING, "e": SLIDING}
    one, two = get_kv_cache_configs(config(), [first, second], [100_000, 60_000])
    assert one.num_blocks == two.num_blocks == 60_000 // PAGE
    assert [g.layer_names for g in one.kv_cache_groups] == [("a",), ("b",), ()]
    assert [g.layer_names for g in two.kv_cache_groups] == [("c",), ("e",), ("d",)]
    with pytest.raises(AssertionError, match=r"different across workers.*Layer a has"):
        get_kv_cache_configs(config(), [{"a": FULL}, {"a": SLIDING}], [10**6] * 2)
    with pytest.raises(ValueError, match="a worker has no layer"):
        get_kv_cache_configs(config(), [{"a": FULL}, {}], [10**6] * 2)
    with pytest.raises(TypeError, match="layer a: its KV cache spec must be a KVCacheSpec, got 'full'"):
        get_kv_cache_configs(config(), [{"a": "full"}], [10**6])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"layout must be one of .* got 'HBLNC'"):
        get_kv_cache_configs(config(), [{"a": FULL}], [10**6], layout="HBLNC")  # type: ignore[arg-type]


def test_a_model_without_attention_has_only_the_null_block() -> None:
    empty = get_kv_cache_config(config(block_size=8), {}, 0)
    assert empty == KVCacheConfig(num_blocks=1, kv_cache_tensors=(), kv_cache_groups=())
    assert resolve_kv_cache_block_sizes(empty, config(block_size=8)) == (8, 8)
    assert estimate_max_model_len(config(), [{}], [0]) == 256


def test_auto_fit_gives_the_longest_length_that_is_accepted() -> None:
    specs = [layers(FULL, SLIDING)]
    # A step holds at most 64 tokens of a sliding layer: 1 token needs 1 + 2 blocks, and one more is the null block.
    for memory in (0, PAGE, 4 * PAGE - 1):
        with pytest.raises(
            ValueError, match=rf"not enough GPU memory available to serve even a single token.*\[{memory}\] bytes"
        ):
            estimate_max_model_len(config(), specs, [memory])
        with pytest.raises(ValueError, match="memory"):
            get_kv_cache_configs(config(1), specs, [memory])
    for memory in range(4 * PAGE, 30 * PAGE, PAGE // 2):
        fitted = estimate_max_model_len(config(), specs, [memory])
        get_kv_cache_configs(config(fitted), specs, [memory])
        if fitted < 256:
            with pytest.raises(ValueError, match=f"estimated maximum model length is {fitted}"):
                get_kv_cache_configs(config(fitted + 1), specs, [memory])


def test_scheduler_and_hash_block_sizes() -> None:
    def sizes(*specs: KVCacheSpec, caching: bool = True) -> tuple[int, int]:
        groups = tuple(KVCacheGroupSpec(layer_names=(str(i),), kv_cache_spec=s) for i, s in enumerate(specs))
        found = KVCacheConfig(num_blocks=9, kv_cache_tensors=(), kv_cache_groups=groups)
        return resolve_kv_cache_block_sizes(found, config(enable_prefix_caching=caching))

    wide = FULL.copy_with_new_block_size(24)
    assert sizes(FULL) == (16, 16)
    assert sizes(FULL, wide) == (48, 8)
    assert sizes(FULL, wide, caching=False) == (48, 48)
    assert sizes(FULL, MAMBA) == (64, 64)
    assert sizes(FULL, MambaSpec(block_size=64, shapes=((3,),), dtypes=("float32",), mamba_cache_mode="align")) == (
        64,
        16,
    )


SPECS = st.sampled_from(
    [
        FULL,
        SLIDING,
        CHUNKED,
        MAMBA,
        FullAttentionSpec(**{**SHAPE, "num_kv_heads": 4}),
        FullAttentionSpec(**{**SHAPE, "num_kv_heads": 3}, head_size_v=4),
        FullAttentionSpec(**{**SHAPE, "dtype": "float32"}),
        SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 1}, sliding_window=100),
        MambaSpec(block_size=32, shapes=((40, 40), (7,)), dtypes=("float16", "float32"), mamba_cache_mode="align"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=14),
    layout=st.sampled_from(["LBNHC", "BLHNC"]),
    spare=st.integers(0, 5000),
)
def test_any_mixture_of_layers_gets_a_sound_plan(specs: list[KVCacheSpec], layout: KVCacheLayout, spare: int) -> None:
    model = layers(*specs)
    vllm_config = config()
    groups = get_kv_cache_groups(model, layout=layout)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(model)
    block = bytes_per_block(groups)
    memory = block * (1 + blocks_per_request(vllm_config, groups, 256)) + spare
    found = get_kv_cache_config(vllm_config, model, memory) if layout == "LBNHC" else get_kv_cache_configs(
        vllm_config, [model], [memory], layout=layout
    )[0]  # fmt: skip
    assert found.num_blocks == memory // block
    check_placement(found, memory)
    own = found.layer_specs()
    for name, spec in model.items():
        assert own[name].page_size_bytes >= spec.page_size_bytes
        assert own[name].kind == spec.kind
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(found, vllm_config)
    for group in generate_scheduler_kv_cache_config([found]).kv_cache_groups:
        assert not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        assert scheduler_block_size % group.kv_cache_spec.block_size == 0
        assert math.gcd(hash_block_size, group.kv_cache_spec.block_size) in (
            hash_block_size,
            group.kv_cache_spec.block_size,
        )
    tokens, concurrency = get_kv_cache_capacity(vllm_config, found)
    assert concurrency >= 1
    assert tokens == int(concurrency * 256)


def check_placement(found: KVCacheConfig, memory: int) -> None:
    """Within the allocation; and no two pages of blocks that can be in use at once share a byte."""
    own: Mapping[str, KVCacheSpec] = found.layer_specs()
    group_of = {name: index for index, group in enumerate(found.kv_cache_groups) for name in group.layer_names}
    taken: dict[int, list[tuple[int, int, int]]] = {}
    for tensor in found.kv_cache_tensors:
        assert tensor.size <= memory
        assert tensor.size == found.kv_cache_tensors[0].size
        for index, name in enumerate(tensor.layers):
            for block in range(found.num_blocks):
                start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                end = start + own[name].page_size_bytes
                assert 0 <= start < end <= tensor.size
                taken.setdefault(group_of[name], []).append((start, end, block))
    for pages in taken.values():
        pages.sort()
        for (_, end, _), (start, _, _) in itertools.pairwise(pages):
            assert end <= start
