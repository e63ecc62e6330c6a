"""Memory of the KV cache: how many bytes there are, one allocation for all of it, and its pages bound to the layers.

Mirrors `vllm/v1/worker/gpu_worker.py` (determine_available_memory) and the allocation half of
`vllm/v1/worker/gpu_model_runner.py`. The runner keeps no list of caches: a page is reached through its layer alone.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minivllm.attention.layer_base import AttentionLayerBase
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import AttentionSpec, KVCacheConfig

GiB = 1 << 30
# A CPU's memory belongs to the user's other programs too, so without kv_cache_memory_bytes the cache stays below this.
CPU_KV_CACHE_LIMIT = 4 * GiB


def determine_available_memory(vllm_config: VllmConfig, profile_run: Callable[[], None]) -> int:
    """Bytes left for the KV cache after the largest step the engine may run.

    profile_run runs that step with no cache and no metadata, so it can be measured before num_blocks is known.
    """
    device = torch.device(vllm_config.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        profile_run()
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        reserved, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
        used = peak + (total - free - reserved)  # ours at the peak, and whatever is not torch's
    else:
        profile_run()
        total, used = _cpu_memory_bytes(), _peak_resident_bytes()
    if (fixed := vllm_config.cache_config.kv_cache_memory_bytes) is not None:
        return fixed
    utilization = vllm_config.cache_config.gpu_memory_utilization
    available = int(total * utilization) - used
    if available <= 0:
        raise ValueError(
            f"no memory is left for the KV cache: gpu_memory_utilization={utilization} of {total / GiB:.2f} GiB is"
            f" {total * utilization / GiB:.2f} GiB, and weights and workspace take {used / GiB:.2f} GiB. Raise"
            " gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        )
    return min(available, CPU_KV_CACHE_LIMIT) if device.type == "cpu" else available


def _cpu_memory_bytes() -> int:
    """The machine's memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def find_kv_sharing(layers: Mapping[str, AttentionLayerBase], vllm_config: VllmConfig) -> dict[str, str]:
    """Each layer that reads another's pages, and that other: an earlier layer of the same kind with pages of its own.

    Mirrors: vllm/v1/worker/utils.py add_kv_sharing_layers_to_kv_cache_groups and the checks before it.
    """
    found = {name: each.kv_sharing_target_layer_name for name, each in layers.items()}
    sharing = {name: target for name, target in found.items() if target is not None}
    for name, target in sharing.items():
        if target not in layers:
            why = f"the model has no such layer, only {list(layers)}"
        elif list(layers).index(target) >= list(layers).index(name):
            why = "it does not come before, so its pages are not written yet"
        elif target in sharing:
            why = f"it has no pages of its own, but shares those of {sharing[target]!r}"
        else:
            ours, theirs = (layers[each].get_page_spec(vllm_config) for each in (name, target))
            reader, writer = (layers[each].get_attn_backend() for each in (name, target))
            # Backends whose pages have one layout inherit one function.
            if ours == theirs and reader.get_kv_cache_shape is writer.get_kv_cache_shape:
                continue
            why = f"its pages are {theirs} of {writer.get_name()}, this layer reads {ours} by {reader.get_name()}"
        raise ValueError(
            f"layer {name!r} cannot share the KV cache of {target!r}: {why}. Set kv_sharing_target_layer_name to an"
            " earlier layer of the same kind that does not share, or to None"
        )
    return sharing


def allocate_kv_cache(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, AttentionLayerBase], device: torch.device
) -> dict[str, Tensor]:
    """One allocation for every page of every layer; returns each layer's strided view of it.

    A view is (num_blocks, ...) in the spec's dtype, shaped by the layer's backend. Views of layers of different groups
    overlap: a block belongs to one group at a time. Memory is not touched here: a page of the CPU's memory is only
    taken when a token is first written to it.
    """
    if not kv_cache_config.kv_cache_tensors:
        return {}
    specs = kv_cache_config.layer_specs()
    backing = torch.empty(kv_cache_config.kv_cache_tensors[0].size, dtype=torch.uint8, device=device)
    views: dict[str, Tensor] = {}
    for placement in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(placement.layers):
            spec = specs[name]
            if not isinstance(spec, AttentionSpec):
                raise NotImplementedError(f"layer {name}: pages of {type(spec).__name__} cannot be allocated yet")
            dtype: torch.dtype = getattr(torch, spec.dtype)
            make_shape, num_blocks = layers[name].get_attn_backend().get_kv_cache_shape, kv_cache_config.num_blocks
            shape = make_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
            if shape[0] != num_blocks:
                raise ValueError(f"layer {name}: its backend's cache shape {shape} does not begin with num_blocks")
            places = (placement.offset, placement.layer_stride, placement.block_stride)
            if any(place % dtype.itemsize for place in places):
                raise ValueError(
                    f"layer {name}: pages at (offset, layer stride, block stride) {places} bytes are not aligned to"
                    f" {spec.dtype}: choose an even block_size, or one dtype for all layers"
                )
            typed = backing.view(dtype)
            inner = torch.empty(shape[1:], device="meta").stride()
            stride = (placement.block_stride // dtype.itemsize, *inner)
            offset = (placement.offset + index * placement.layer_stride) // dtype.itemsize
            views[name] = typed.as_strided(shape, stride, offset)
    return views


def bind_kv_cache(views: Mapping[str, Tensor], layers: Mapping[str, AttentionLayerBase]) -> None:
    """Give each layer its pages, by name. Mirrors vllm/v1/worker/utils.py bind_kv_cache."""
    missing = [name for name in views if name not in layers]
    if missing:
        raise KeyError(f"caches were allocated for layers that the model does not have: {missing}")
    for name, view in views.items():
        layers[name].kv_cache = view
