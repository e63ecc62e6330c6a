"""KV memory of Gemma 3 at long context: layers in groups by kind, against every layer keeping every block.

Eight requests of 4,096 tokens decode at the same time. Sliding layers see 512 tokens and give back what lies below,
unless hybrid memory is disabled. Counted is the peak of blocks in use times their bytes; tokens must be the same in
both runs, and the ratio at most 0.35. Prints JSON; the exit status is 1 where one of the two does not hold.

    python benchmarks/hybrid_memory.py [--model gemma3-270m] [--dtype float32] [--out FILE]

Where Gemma's package is not installed, or with --model tiny, a small random Gemma 3 takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.kv_cache_groups import bytes_per_block
from minivllm.engine import LLMEngine
from minivllm.models.loader import load_hf_config, load_model, resolve_dtype, resolve_model
from minivllm.sampling.params import SamplingParams

LIMIT = 0.35
ALIAS = "gemma3-270m"


def save_tiny_gemma3(folder: str) -> str:
    """A random Gemma 3 with the real one's layers and window, but narrow."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=32768, sliding_window=512, initializer_range=0.2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def choose_model(model: str, folder: str) -> str:
    """`model` itself, or a tiny one saved to `folder`."""
    if model == "tiny":
        return save_tiny_gemma3(folder)
    if model == ALIAS:
        try:
            resolve_model(model)
        except FileNotFoundError as error:
            print(f"{error}. A small random Gemma 3 takes its place.", file=sys.stderr)
            return save_tiny_gemma3(folder)
    return model


def configure(model: str, args: argparse.Namespace) -> VllmConfig:
    """Settings of the run with hybrid memory, and room for all requests at once without it."""
    hf_config = load_hf_config(resolve_model(model))
    model_config = ModelConfig(
        model=model, hf_config=hf_config, dtype=resolve_dtype(hf_config, args.dtype), max_model_len=args.context
    )
    blocks = args.requests * -(-args.context // args.block_size)
    token = 2 * hf_config.num_key_value_heads * hf_config.head_dim * getattr(torch, model_config.dtype).itemsize
    room = (blocks + 8) * args.block_size * token * hf_config.num_hidden_layers
    return VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=args.block_size, kv_cache_memory_bytes=room),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=args.requests
        ),
    )


def measure(
    vllm_config: VllmConfig, model: torch.nn.Module, prompts: list[list[int]], max_tokens: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """What one run took, and the tokens of each request."""
    engine = LLMEngine(vllm_config, model=model)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    config, manager = engine.kv_cache_config, engine.scheduler.kv_cache_manager
    block_bytes = bytes_per_block(config.kv_cache_groups)
    peak = together = 0
    answers: dict[str, list[int]] = {}
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        answers |= {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
        peak = max(peak, config.num_blocks - 1 - manager.num_free_blocks)
        together = max(together, len(engine.scheduler.running))
    figures = {
        "groups": len(config.kv_cache_groups),
        "bytes_per_block": block_bytes,
        "peak_blocks": peak,
        "peak_bytes": peak * block_bytes,
        "most_requests_at_once": together,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return figures, [answers[str(index)] for index in range(len(prompts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ALIAS, help="an alias, a folder, a .gguf file, or tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a request, prompt and output")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48, help="of the context, how many are generated")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--out", default=None, help="also write the JSON to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vllm_config = configure(choose_model(args.model, folder), args)
        model = load_model(vllm_config)
    rng = random.Random(0)
    top = vllm_config.model_config.hf_config.vocab_size - 100
    prompts = [[rng.randrange(100, top) for _ in range(args.context - args.max_tokens)] for _ in range(args.requests)]
    keep_all = replace(vllm_config.cache_config, disable_hybrid_kv_cache_manager=True)
    hybrid, tokens = measure(vllm_config, model, prompts, args.max_tokens)
    plain, plain_tokens = measure(replace(vllm_config, cache_config=keep_all), model, prompts, args.max_tokens)
    report = {
        "model": Path(vllm_config.model_config.model).name if args.model == ALIAS else args.model,
        "settings": vars(args),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "hybrid": hybrid,
        "hybrid_disabled": plain,
        "ratio": round(hybrid["peak_bytes"] / plain["peak_bytes"], 4),
        "limit": LIMIT,
        "same_tokens": tokens == plain_tokens,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if report["same_tokens"] and report["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
