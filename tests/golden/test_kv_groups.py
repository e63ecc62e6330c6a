"""kv_groups.json: layer specs and memory in, groups, placements, sizes and errors out, as vLLM 0.32.0 gave them."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from typing import Any

import pytest
from golden_cases import cases

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core import kv_cache_groups as sizing
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

MAKERS: dict[str, Callable[..., KVCacheSpec]] = {
    "full": FullAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "chunked_local": ChunkedLocalAttentionSpec,
    "mla": MLAAttentionSpec,
}


def make_spec(given: dict[str, Any]) -> KVCacheSpec:
    given = dict(given)
    kind = given.pop("type")
    if kind == "mamba":
        assert given.pop("num_speculative_blocks") == 0, "speculation is left out"
        return MambaSpec(
            shapes=tuple(tuple(shape) for shape in given.pop("state_shapes")),
            dtypes=tuple(given.pop("state_dtypes")),
            **given,
        )
    return MAKERS[kind](**given)


def make_config(given: dict[str, Any]) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model="golden", hf_config=None, dtype="float32", max_model_len=given["max_model_len"]),
        cache_config=CacheConfig(
            block_size=given["cache_block_size"],
            num_gpu_blocks_override=given["num_gpu_blocks_override"],
            disable_hybrid_kv_cache_manager=given["disable_hybrid"],
            mamba_cache_mode=given["mamba_cache_mode"],
        ),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=given["max_num_batched_tokens"], max_num_seqs=1),
    )


def describe_spec(spec: KVCacheSpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cls": type(spec).__name__,
        "kind": spec.kind,
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
    }
    if isinstance(spec, UniformTypeKVCacheSpecs):
        found["per_layer_page_size_bytes"] = {n: s.page_size_bytes for n, s in spec.kv_cache_specs.items()}
        found["per_layer_block_size"] = {n: s.block_size for n, s in spec.kv_cache_specs.items()}
        return found
    found["unpadded_page_size_bytes"] = spec.real_page_size_bytes
    if spec.page_size_padded is not None:
        found["page_size_padded"] = spec.page_size_padded
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, name, None) is not None:
            found[name] = getattr(spec, name)
    return found


def describe(config: KVCacheConfig) -> dict[str, Any]:
    starts: dict[tuple[int, int], list[str]] = {}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            start = tensor.offset + index * tensor.layer_stride
            starts.setdefault((start, tensor.block_stride), []).append(name)
    return {
        "num_blocks": config.num_blocks,
        "groups": [
            {"layer_names": list(g.layer_names), "spec": describe_spec(g.kv_cache_spec)} for g in config.kv_cache_groups
        ],
        "tensors": [
            {
                "size": t.size,
                "layers": list(t.layers),
                "layer_stride": t.layer_stride,
                "block_stride": t.block_stride,
                "offset": t.offset,
            }
            for t in config.kv_cache_tensors
        ],
        "same_start": [[start, stride, names] for (start, stride), names in sorted(starts.items())],
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What our functions say, in the fields of the case."""
    vllm_config = make_config(case["config"])
    layout = case["config"]["layout"]
    specs = {letter: make_spec(spec) for letter, spec in case["specs"].items()}
    workers = [{name: specs[letter] for name, letter in worker} for worker in case["workers"]]
    memory = case["available_memory"]
    found: dict[str, Any] = {}
    if case["config"]["auto_fit_max_model_len"]:
        fitted = sizing.estimate_max_model_len(vllm_config, workers, memory, layout=layout)
        found["fitted_max_model_len"] = fitted
        vllm_config = make_config({**case["config"], "max_model_len": fitted})
    configs = sizing.get_kv_cache_configs(vllm_config, workers, memory, layout=layout)
    found["result"] = [describe(config) for config in configs]
    if configs[0].kv_cache_groups:
        for config, described in zip(configs, found["result"], strict=True):
            block = sizing.bytes_per_block(config.kv_cache_groups)
            blocks = sizing.blocks_per_request(
                vllm_config, config.kv_cache_groups, vllm_config.model_config.max_model_len
            )
            described |= {"bytes_per_block": block, "bytes_for_one_max_len_request": block * blocks}
        scheduler = sizing.generate_scheduler_kv_cache_config(configs)
        tokens, concurrency = sizing.get_kv_cache_capacity(vllm_config, scheduler)
        sizes = sizing.resolve_kv_cache_block_sizes(scheduler, vllm_config)
        found |= {
            "scheduler_group_specs": [describe_spec(g.kv_cache_spec) for g in scheduler.kv_cache_groups],
            "scheduler_block_size": sizes[0],
            "hash_block_size": sizes[1],
            "capacity_tokens": tokens,
            "max_concurrency_x1000_floor": int(concurrency * 1000),
        }
    return found | {"needs_zeroing": configs[0].needs_kv_cache_zeroing}


INPUTS = {"id", "family", "config", "specs", "workers", "available_memory"}


@pytest.mark.parametrize("case", cases("kv_groups"))
def test_kv_groups(case: dict[str, Any]) -> None:
    if "error" in case:
        expected = getattr(builtins, case["error"]["cls"])
        with pytest.raises(expected, match="^" + re.escape(case["error"]["message"])) as caught:
            run(case)
        assert caught.type is expected
    else:
        assert run(case) == {key: value for key, value in case.items() if key not in INPUTS}
