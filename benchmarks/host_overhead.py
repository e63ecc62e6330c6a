"""Host cost of a decode step against the size of the pool: `allocate_slots`, and the runner's attention metadata.

256 requests decode one token a step. Timed are two parts of each step: `KVCacheManager.allocate_slots` called for every
request, and `ModelRunner._build_attention_metadata` for the batch; each with four layers in one KV-cache group (all
see everything) and in four (one does, three have a window), and with pools of several sizes. Neither part may look at
blocks that no request holds, so no column should grow from one pool to the next. The model itself is never run.

    python benchmarks/host_overhead.py [--num-blocks 4096,16384,65536] [--rounds 20] [--out FILE]

Prints a table of medians in microseconds; --out also writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_groups import generate_scheduler_kv_cache_config, get_kv_cache_config
from minivllm.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.models.gemma3 import Gemma3ForCausalLM
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams
from minivllm.worker.model_runner import ModelRunner

BLOCK = 16
LAYERS = {1: ["full_attention"] * 4, 4: ["full_attention"] + ["sliding_attention"] * 3}  # by number of groups
# A round: prompts of BLOCK to 2 * BLOCK - 1 tokens, so that each step brings a new block to one request in BLOCK; and
# BLOCK steps, after which every request has got exactly one.
LONGEST = 3 * BLOCK - 1


def blocks_needed(num_groups: int, num_requests: int) -> int:
    """The smallest pool that a round fits in, the null block counted."""
    return 1 + num_groups * num_requests * -(-LONGEST // BLOCK)


def build(num_groups: int, num_blocks: int, num_requests: int) -> tuple[KVCacheManager, ModelRunner]:
    """A manager and a runner over the same pool; the weights of the tiny model are never read."""
    from transformers import Gemma3TextConfig

    needed = blocks_needed(num_groups, num_requests)
    if num_blocks < needed:
        raise ValueError(
            f"a pool of {num_blocks} blocks is too small: {num_requests} requests in {num_groups} KV-cache groups need "
            f"{needed}; raise --num-blocks or lower --requests"
        )
    kinds = LAYERS[num_groups]
    hf_config = Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=len(kinds), num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=4 * BLOCK, sliding_window=BLOCK, layer_types=kinds,
    )  # fmt: skip
    config = VllmConfig(
        model_config=ModelConfig(model="none", hf_config=hf_config, dtype="float32", max_model_len=4 * BLOCK),
        cache_config=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=num_blocks),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2 * BLOCK * num_requests, max_num_seqs=num_requests),
    )
    runner = ModelRunner(config)
    runner.load_model(Gemma3ForCausalLM(vllm_config=config))
    kv_cache_config = get_kv_cache_config(config, runner.get_kv_cache_spec(), 0)
    found = len(kv_cache_config.kv_cache_groups)
    if found != num_groups:
        raise RuntimeError(f"layers {kinds} came in {found} KV-cache groups, not {num_groups}: change LAYERS")
    runner.initialize_kv_cache(kv_cache_config)
    return Scheduler(config, generate_scheduler_kv_cache_config([kv_cache_config])).kv_cache_manager, runner


def admit(manager: KVCacheManager, index: int, num_tokens: int) -> Request:
    """A request whose prompt is computed; its tokens are its own, so that no block is shared."""
    tokens = list(range(index * LONGEST, index * LONGEST + num_tokens))
    request = Request(str(index), tokens, SamplingParams(max_tokens=BLOCK), block_hasher=make_block_hasher(BLOCK))
    if manager.allocate_slots(request, num_tokens) is None:
        raise RuntimeError(f"no room for a prompt of {num_tokens} tokens: {manager.num_free_blocks} blocks are free")
    request.num_computed_tokens = num_tokens
    return request


def step_output(
    manager: KVCacheManager, requests: list[Request], found: list[KVCacheBlocks | None], first: bool
) -> SchedulerOutput:
    """What the scheduler would tell the runner of one decode step. found: what `allocate_slots` returned for each."""
    arrived, known = [], CachedRequestData()
    for request, blocks in zip(requests, found, strict=True):
        if blocks is None:
            raise RuntimeError(f"no slot for request {request.request_id}: {manager.num_free_blocks} blocks are free")
        if first:
            arrived.append(
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=[0] * request.num_tokens,  # the tokens of the batch are not looked at
                    sampling_params=request.sampling_params,
                    block_ids=manager.get_block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
        else:
            known.req_ids.append(request.request_id)
            known.new_block_ids.append(blocks.get_block_ids(allow_none=True))
            known.num_computed_tokens.append(request.num_computed_tokens)
            known.num_output_tokens.append(request.num_output_tokens)
    return SchedulerOutput(
        scheduled_new_reqs=arrived,
        scheduled_cached_reqs=known,
        num_scheduled_tokens={request.request_id: 1 for request in requests},
        total_num_scheduled_tokens=len(requests),
    )


@torch.inference_mode()
def run_round(manager: KVCacheManager, runner: ModelRunner, num_requests: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of the two parts in each of BLOCK steps. Leaves the pool as it was, with nothing cached."""
    requests = [admit(manager, index, BLOCK + index % BLOCK) for index in range(num_requests)]
    allocate, metadata = [], []
    for step in range(BLOCK):
        manager.new_step_starts()
        for request in requests:
            request.append_output_token_ids(0)
        started = time.perf_counter_ns()
        found = [manager.allocate_slots(request, 1) for request in requests]
        allocate.append(time.perf_counter_ns() - started)
        output = step_output(manager, requests, found, first=step == 0)
        runner._update_states(output)
        inputs = runner._prepare_inputs(output)
        started = time.perf_counter_ns()
        runner._build_attention_metadata(inputs)
        metadata.append(time.perf_counter_ns() - started)
        for row, request in enumerate(requests):
            request.num_computed_tokens += 1
            runner.input_batch.append_token(row, 0)
    for request in requests:
        manager.free(request)
        runner.input_batch.remove_request(request.request_id)
        runner.requests.pop(request.request_id)
    runner.input_batch.condense()
    if not manager.reset_prefix_cache():  # or a small pool would also pay for evictions, which a large one never sees
        raise RuntimeError(f"blocks are still held after a round: {manager.num_free_blocks} are free")
    return allocate, metadata


def measure(num_groups: int, num_blocks: int, num_requests: int, rounds: int) -> dict[str, Any]:
    """One row of the table; a round to warm up comes first."""
    manager, runner = build(num_groups, num_blocks, num_requests)
    run_round(manager, runner, num_requests)
    timed = [run_round(manager, runner, num_requests) for _ in range(rounds)]
    allocate = [each for of_round, _ in timed for each in of_round]
    metadata = [each for _, of_round in timed for each in of_round]
    return {
        "groups": num_groups,
        "num_blocks": num_blocks,
        "requests": num_requests,
        "steps": len(allocate),
        "allocate_slots_us": round(statistics.median(allocate) / 1000, 1),
        "attention_metadata_us": round(statistics.median(metadata) / 1000, 1),
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| groups | num_blocks | allocate_slots, us | attention metadata, us |", "|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['groups']} | {row['num_blocks']:,} | {row['allocate_slots_us']} | {row['attention_metadata_us']} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", default="4096,16384,65536", help="sizes of the pool, separated by commas")
    parser.add_argument("--requests", type=int, default=256, help="requests that decode in each step")
    parser.add_argument("--rounds", type=int, default=20, help=f"timed rounds of {BLOCK} steps")
    parser.add_argument("--out", default=None, help="also write the figures as JSON to this file")
    args = parser.parse_args(argv)
    if min(args.requests, args.rounds) < 1:
        parser.error(f"--requests {args.requests} and --rounds {args.rounds} must both be at least 1")
    sizes = [int(size) for size in args.num_blocks.split(",")]
    rows = [measure(groups, size, args.requests, args.rounds) for groups in LAYERS for size in sizes]
    print(format_table(rows))
    if args.out:
        report = {
            "settings": vars(args),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "rows": rows,
        }
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
