"""How many blocks there are and where each layer's pages lie: from groups and bytes to a KVCacheConfig.

The number of blocks is the memory divided by a block's bytes; one of them is the null block, so every check of what
fits leaves it out. All groups overlay one allocation, of which layers are strided views. No torch here.

Mirrors the sizing half of vllm/v1/core/kv_cache_utils.py (0.32.0). Left out: context parallelism, layouts other than
LBNHC and BLHNC.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from minivllm.core.layer_grouping import (
    KVCacheLayout,
    LayerSpecs,
    get_kv_cache_groups,
    names_by_spec,
    uniform_type_group,
)


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[LayerSpecs],
    available_memory: Sequence[int],
    *,
    layout: KVCacheLayout = "LBNHC",
) -> list[KVCacheConfig]:
    """One config a worker, with one number of blocks: that of the worker which affords the fewest.

    kv_cache_specs: each worker's layers by name, in registration order. available_memory: bytes of each worker.
    Raises ValueError, naming the bytes, where a request of max_model_len tokens does not fit beside the null block.
    """
    workers = _plan(vllm_config, kv_cache_specs, available_memory, layout)
    for groups, memory in workers:
        _check_enough_memory(vllm_config, groups, memory)
    num_blocks = min((memory // bytes_per_block(groups) for groups, memory in workers if groups), default=1)
    return [
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=_place_layers(groups, num_blocks, layout),
            kv_cache_groups=tuple(groups),
        )
        for groups, _ in workers
    ]


def get_kv_cache_config(vllm_config: VllmConfig, kv_cache_specs: LayerSpecs, available_memory: int) -> KVCacheConfig:
    """`get_kv_cache_configs` for a single worker."""
    return get_kv_cache_configs(vllm_config, [kv_cache_specs], [available_memory])[0]


def estimate_max_model_len(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[LayerSpecs],
    available_memory: Sequence[int],
    *,
    layout: KVCacheLayout = "LBNHC",
) -> int:
    """The longest max_model_len, at most the configured one, of which every worker holds one request.

    Mirrors vLLM's auto-fit (`max_model_len=-1`). Raises ValueError where not even one token fits.
    """
    workers = _plan(vllm_config, kv_cache_specs, available_memory, layout)
    longest = vllm_config.model_config.max_model_len
    fitted = min((_longest_that_fits(vllm_config, *worker) for worker in workers if worker[0]), default=longest)
    if fitted < 1:
        raise ValueError(
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try"
            f" increasing `gpu_memory_utilization`. Given are {list(available_memory)} bytes; a block takes"
            f" {[bytes_per_block(groups) for groups, _ in workers if groups]}, and one is reserved as null block"
        )
    return fitted


def _plan(
    vllm_config: VllmConfig,
    kv_cache_specs: Sequence[LayerSpecs],
    available_memory: Sequence[int],
    layout: KVCacheLayout,
) -> list[tuple[list[KVCacheGroupSpec], int]]:
    """Each worker's share of the groups of the whole model, and the bytes it may fill."""
    if layout not in get_args(KVCacheLayout):
        raise ValueError(f"KV cache layout must be one of {list(get_args(KVCacheLayout))}, got {layout!r}")
    merged: dict[str, KVCacheSpec] = {}
    for worker_specs in kv_cache_specs:
        for name, spec in worker_specs.items():
            if not isinstance(spec, KVCacheSpec):
                raise TypeError(f"layer {name}: its KV cache spec must be a KVCacheSpec, got {spec!r}")
            if merged.setdefault(name, spec) != spec:
                raise AssertionError(
                    "The KV cache specs for the same layer are different across workers. This is not supported yet."
                    f" Layer {name} has {merged[name]} and {spec}"
                )
    cache_config = vllm_config.cache_config
    groups = get_kv_cache_groups(merged, disable_hybrid=cache_config.disable_hybrid_kv_cache_manager, layout=layout)
    workers = []
    for worker_specs, memory in zip(kv_cache_specs, available_memory, strict=True):
        mine = [_project(group, worker_specs) for group in groups]
        if mine and not worker_specs:
            raise ValueError("a worker has no layer with a KV cache while others have: give it some, or leave it out")
        if mine and cache_config.num_gpu_blocks_override is not None:
            memory = cache_config.num_gpu_blocks_override * bytes_per_block(mine)
        workers.append((mine, memory))
    return workers


def _project(group: KVCacheGroupSpec, worker_specs: LayerSpecs) -> KVCacheGroupSpec:
    """The part of a group that one worker holds; it may be empty, as group ids must agree between workers."""
    own = {name: spec for name, spec in group.layer_specs().items() if name in worker_specs}
    if own and isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return uniform_type_group(own)
    return replace(group, layer_names=tuple(own))


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block of the pool: one page of each layer of the widest group."""
    return max(sum(spec.page_size_bytes for spec in group.layer_specs().values()) for group in groups)


def blocks_per_request(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], max_model_len: int) -> int:
    """The most blocks, of all groups together, that one request of max_model_len tokens holds at once."""
    in_flight = vllm_config.scheduler_config.max_num_batched_tokens
    return sum(group.kv_cache_spec.max_blocks_per_request(max_model_len, in_flight) for group in groups)


def _longest_that_fits(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], memory: int) -> int:
    """The largest max_model_len of which one request fits beside the null block; 0 if none does."""
    lengths = range(1, vllm_config.model_config.max_model_len + 1)
    usable_blocks = memory // bytes_per_block(groups) - 1
    return bisect_right(lengths, usable_blocks, key=lambda length: blocks_per_request(vllm_config, groups, length))


def _check_enough_memory(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], memory: int) -> None:
    if not groups:
        return
    block = bytes_per_block(groups)
    available = memory - block
    note = f"({memory} bytes are given, of which the null block takes {block})"
    if available <= 0:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the"
            " engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). See"
            f" https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details. {note}"
        )
    max_model_len = vllm_config.model_config.max_model_len
    needed = block * blocks_per_request(vllm_config, groups, max_model_len)
    if needed > available:
        fitting = _longest_that_fits(vllm_config, groups, memory)
        estimate = (
            f"Based on the available memory, the estimated maximum model length is {fitting}. " if fitting else ""
        )
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({max_model_len}), ({_gib(needed)} GiB KV"
            " cache is needed, which is larger than the available KV cache memory"
            f" ({_gib(available)} GiB). {estimate}Try increasing `gpu_memory_utilization` (which also controls CPU"
            " memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. In bytes:"
            f" {needed} needed, {available} available {note}"
        )


def _gib(size: int) -> str:
    return str(round(size / 2**30, 2))


def _place_layers(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, layout: KVCacheLayout
) -> tuple[KVCacheTensor, ...]:
    """Every group begins at byte 0 of the one allocation, so groups overlap; within a group no two pages do."""
    tensors = []
    width = bytes_per_block(groups) if groups else 0
    for group in groups:
        start = 0  # bytes that the layers placed so far take of one block
        for spec, names in names_by_spec(group.layer_specs()).items():
            page = spec.page_size_bytes
            # LBNHC: a layer's pages are contiguous. BLHNC: a block's pages are.
            tensors.append(
                KVCacheTensor(
                    size=width * num_blocks,
                    layers=tuple(names),
                    layer_stride=page * num_blocks if layout == "LBNHC" else page,
                    block_stride=page if layout == "LBNHC" else width,
                    offset=start * num_blocks if layout == "LBNHC" else start,
                )
            )
            start += page * len(names)
    return tuple(tensors)


def generate_scheduler_kv_cache_config(kv_cache_configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """The config as the scheduler sees it: a group of several page sizes is known by its first layer's spec."""
    groups = []
    for group in kv_cache_configs[0].kv_cache_groups:
        spec = group.kv_cache_spec
        first = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        groups.append(replace(group, kv_cache_spec=first))
    return replace(kv_cache_configs[0], kv_cache_groups=tuple(groups))


def get_kv_cache_capacity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, float]:
    """Tokens that the pool holds in requests of max_model_len, and how many such requests run at once."""
    max_model_len = vllm_config.model_config.max_model_len
    needed = blocks_per_request(vllm_config, kv_cache_config.kv_cache_groups, max_model_len)
    concurrency = kv_cache_config.num_blocks / needed
    return int(concurrency * max_model_len), concurrency


def resolve_kv_cache_block_sizes(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> tuple[int, int]:
    """(scheduler block size, hash block size) in tokens.

    Hits of several groups agree only at multiples of every group's block size, the LCM; hashes are made per GCD, so
    that each group can look up its own blocks. A Mamba group that keeps one state only hits nothing in between, so it
    gets the LCM for both, as does a cache without prefix caching.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [spec.block_size for spec in specs] or [vllm_config.cache_config.block_size]
    scheduler_block_size = math.lcm(*sizes)
    coarse = any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align" for spec in specs)
    if coarse or not vllm_config.cache_config.enable_prefix_caching:
        return scheduler_block_size, scheduler_block_size
    return scheduler_block_size, math.gcd(*sizes)
