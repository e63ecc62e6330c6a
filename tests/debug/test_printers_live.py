"""The printers inside a real model's forward: called from a hook, in the profile run and in the steps of a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from models.tiny import save_tiny, tiny_vllm_config

from minivllm.config import CacheConfig
from minivllm.debug.printers import describe_forward_context, describe_kv_cache
from minivllm.engine import LLMEngine
from minivllm.forward_context import collect_layers
from minivllm.models.loader import load_hf_config, load_model, resolve_model
from minivllm.sampling.params import SamplingParams


def test_printers_in_a_hook_follow_a_request(tmp_path: Path) -> None:
    folder = str(save_tiny("llama", tmp_path))
    vllm_config = tiny_vllm_config(folder, load_hf_config(resolve_model(folder)))
    vllm_config = replace(vllm_config, cache_config=CacheConfig(block_size=8, kv_cache_memory_bytes=1 << 20))
    model = load_model(vllm_config)
    name, layer = next(iter(collect_layers(model).items()))
    seen: list[tuple[str, str]] = []

    def look(*_: Any) -> None:
        seen.append((describe_forward_context(), describe_kv_cache(name)))

    layer.register_forward_hook(look)
    engine = LLMEngine(vllm_config, model=model)
    ((context, cache),) = seen
    assert "profile run" in context.splitlines()[0]
    assert "attention metadata: None" in context
    assert "no cache is bound yet" in cache

    prompt = list(range(3, 14))  # 11 tokens: blocks 1 and 2 of 8
    engine.add_request("r", prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    (prefill, pages), (decode, later) = seen[1:]
    # Block 0 is the null block: slots begin at 8.
    assert "[11] int64 8 9 10 11 12 13 14 15 16 17 18" in prefill
    assert "[1] int64 19" in decode
    assert "block    1  K ########  V ########" in pages
    assert "block    2  K ###" in pages
    assert "block    2  K ####" in later
    runner = engine.model_runner
    assert "block    1  K ########  V ########" in describe_kv_cache(layer, blocks=[1])
    assert describe_forward_context().startswith("no forward context")
    assert "group 0 (full_attention)" in describe_kv_cache(runner)
