"""scheduler_trace*.json: requests, arrivals and aborts in, every step's decisions out, as vLLM 0.32.0 took them."""

from __future__ import annotations

from typing import Any

import pytest
from golden_cases import cases

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_groups import resolve_kv_cache_block_sizes
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.outputs import EngineCoreOutput, ModelRunnerOutput
from minivllm.request import Request, RequestStatus
from minivllm.sampling.params import SamplingParams

STEP_FIELDS = {
    "step", "added", "aborted", "new", "running", "resumed", "preempted", "self_preempted_loop_stopped",
    "num_scheduled_tokens", "finished_ids", "free_blocks", "sampled", "finished_now", "running_queue",
    "waiting_queue", "free_blocks_end",
}  # fmt: skip


def make_spec(given: dict[str, Any], block_size: int) -> KVCacheSpec:
    shape: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    if given["type"] == "full":
        return FullAttentionSpec(**shape)
    if given["type"] == "sliding_window":
        return SlidingWindowSpec(**shape, sliding_window=given["window"])
    if given["type"] == "chunked_local":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=given["window"])
    raise ValueError(f"unknown group type {given['type']!r}")


def make_configs(given: dict[str, Any]) -> tuple[VllmConfig, KVCacheConfig]:
    given = dict(given)
    assert given.pop("async_scheduling") is False, "async scheduling is left out"
    block_size, num_blocks = given.pop("block_size"), given.pop("num_blocks")
    groups = [
        KVCacheGroupSpec(layer_names=(f"layer.{index}",), kv_cache_spec=make_spec(group, block_size))
        for index, group in enumerate(given.pop("groups"))
    ]
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model="golden", hf_config=None, dtype="float32", max_model_len=given.pop("max_model_len")
        ),
        cache_config=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=given.pop("enable_prefix_caching"),
            prefix_cache_retention_interval=given.pop("prefix_cache_retention_interval"),
        ),
        scheduler_config=SchedulerConfig(watermark=given.pop("watermark_percent") / 100, **given),
    )
    return vllm_config, KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=tuple(groups))


def lists(block_ids: tuple[list[int], ...] | None) -> list[list[int]] | None:
    return None if block_ids is None else [list(ids) for ids in block_ids]


def describe(output: SchedulerOutput) -> dict[str, Any]:
    """The fields that one schedule() decides, in the words of the file."""
    cached = output.scheduled_cached_reqs
    known = list(
        zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids, strict=True)
    )
    return {
        "new": [
            {"id": new.req_id, "num_computed_tokens": new.num_computed_tokens, "block_ids": lists(new.block_ids)}
            for new in output.scheduled_new_reqs
        ],
        "running": [
            {
                "id": req_id,
                "num_computed_tokens": computed,
                "num_output_tokens": outputs,
                "new_block_ids": lists(blocks),
            }
            for req_id, computed, outputs, blocks in known
            if req_id not in cached.resumed_req_ids
        ],
        "resumed": [
            {"id": req_id, "num_computed_tokens": computed, "num_output_tokens": outputs, "block_ids": lists(blocks)}
            for req_id, computed, outputs, blocks in known
            if req_id in cached.resumed_req_ids
        ],
        "preempted": output.preempted_req_ids,
        "num_scheduled_tokens": [list(item) for item in output.num_scheduled_tokens.items()],
        "finished_ids": sorted(output.finished_req_ids),
    }


def run_model(scheduler: Scheduler, output: SchedulerOutput, indices: dict[str, int]) -> ModelRunnerOutput:
    """The file's model: a token follows from the request's place in the list and the number of its outputs."""
    sampled: list[list[int]] = []
    for req_id in output.num_scheduled_tokens:
        request = scheduler.requests[req_id]
        complete = request.num_computed_tokens == request.num_tokens
        token = (indices[req_id] * 131 + request.num_output_tokens * 17) % 997 + 3
        sampled.append([token] if complete else [])
    return ModelRunnerOutput(req_ids=list(output.num_scheduled_tokens), sampled_token_ids=sampled)


@pytest.mark.parametrize("case", [*cases("scheduler_trace"), *cases("scheduler_trace_extra")])
def test_scheduler_trace(case: dict[str, Any]) -> None:
    vllm_config, kv_cache_config = make_configs(case["config"])
    scheduler = Scheduler(vllm_config, kv_cache_config)
    manager = scheduler.kv_cache_manager
    hasher = None
    if vllm_config.cache_config.enable_prefix_caching:
        hasher = make_block_hasher(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
    indices = {given["id"]: index for index, given in enumerate(case["requests"])}
    outputs: dict[str, list[int]] = {req_id: [] for req_id in indices}

    for expected in case["steps"]:
        assert set(expected) <= STEP_FIELDS, f"unread fields {set(expected) - STEP_FIELDS}"
        actual: dict[str, Any] = {"step": expected["step"]}
        arrivals = [given for given in case["requests"] if given["arrival_step"] == expected["step"]]
        if "added" in expected or arrivals:
            actual["added"] = [given["id"] for given in arrivals]
        for given in arrivals:
            assert set(given) <= {"id", "arrival_step", "prompt", "max_tokens", "priority", "stop_token_ids"}
            params = SamplingParams(
                max_tokens=given["max_tokens"], stop_token_ids=given.get("stop_token_ids"), ignore_eos=True
            )
            scheduler.add_request(
                Request(
                    given["id"],
                    given["prompt"],
                    params,
                    arrival_time=float(indices[given["id"]]),
                    priority=given.get("priority", 0),
                    block_hasher=hasher,
                )
            )
        if "aborted" in expected:
            actual["aborted"] = expected["aborted"]
            scheduler.finish_requests(expected["aborted"], RequestStatus.FINISHED_ABORTED)

        decided = scheduler.schedule()
        manager.check_integrity()
        actual |= describe(decided)
        actual["free_blocks"] = manager.num_free_blocks
        for req_id in decided.num_scheduled_tokens:
            assert scheduler.requests[req_id].status is RequestStatus.RUNNING
        # Whoever runs gets at least one token while the budget lasts, unless the loop was stopped before its turn.
        budget_left = decided.total_num_scheduled_tokens < vllm_config.scheduler_config.max_num_batched_tokens
        left_out = [r for r in scheduler.running if r.request_id not in decided.num_scheduled_tokens]
        if decided.preempted_req_ids and left_out and budget_left:
            actual["self_preempted_loop_stopped"] = True

        ran = run_model(scheduler, decided, indices)
        news: list[EngineCoreOutput] = scheduler.update_from_output(decided, ran)
        manager.check_integrity()
        actual["sampled"] = [
            [req_id, token]
            for req_id, tokens in zip(ran.req_ids, ran.sampled_token_ids, strict=True)
            for token in tokens
        ]
        for item in news:
            outputs[item.request_id] += item.new_token_ids
        actual["finished_now"] = [[item.request_id, item.finish_reason] for item in news if item.finish_reason]
        actual["running_queue"] = [request.request_id for request in scheduler.running]
        actual["waiting_queue"] = [request.request_id for request in scheduler.waiting]
        actual["free_blocks_end"] = manager.num_free_blocks
        assert actual == expected

    assert outputs == case["outputs"]
    assert not scheduler.has_unfinished_requests()
    assert manager.num_free_blocks == kv_cache_config.num_blocks - 1
