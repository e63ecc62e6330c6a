"""kv_manager_trace*.json: operations on a KV-cache manager in, what vLLM 0.32.0 answered and held after each out."""

from __future__ import annotations

from typing import Any

import pytest
from golden_cases import cases
from golden_specs import make_kv_cache_config

from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

CASE_FIELDS = {
    "id", "name", "num_blocks", "hash_block_size", "scheduler_block_size", "max_model_len", "max_in_flight_tokens",
    "prefix_cache_retention_interval", "groups", "prompts", "ops",
}  # fmt: skip


class Driver:
    """Does to a manager what the recorded scheduler did, and says what came of it in the words of the file."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.manager = KVCacheManager(
            make_kv_cache_config(case["groups"], case["num_blocks"]),
            max_model_len=case["max_model_len"],
            scheduler_block_size=case["scheduler_block_size"],
            hash_block_size=case["hash_block_size"],
            max_in_flight_tokens=case["max_in_flight_tokens"],
            prefix_cache_retention_interval=case["prefix_cache_retention_interval"],
        )
        hasher = make_block_hasher(case["hash_block_size"])
        self.requests = {
            name: Request(name, prompt, SamplingParams(), block_hasher=hasher)
            for name, prompt in case["prompts"].items()
        }
        self.hits: dict[str, KVCacheBlocks] = {}

    def get_computed_blocks(self, op: dict[str, Any]) -> dict[str, Any]:
        request = self.requests[op["req"]]
        self.manager.new_step_starts()
        hit, hit_tokens, boundary = self.manager.get_computed_blocks(request)
        self.hits[request.request_id] = hit
        request.shared_prefix_boundary = boundary
        return {
            "num_tokens": request.num_tokens,
            "hit_tokens": hit_tokens,
            "hit_blocks": ids(hit),
            "shared_prefix_boundary": boundary,
        }

    def allocate_slots(self, op: dict[str, Any]) -> dict[str, Any]:
        given = {key: op[key] for key in ("num_new_tokens", "num_new_computed_tokens", "full_sequence_must_fit")}
        request = self.requests[op["req"]]
        if op["with_hit_blocks"]:
            hit = self.hits.pop(request.request_id)
        else:
            hit = None
            self.manager.new_step_starts()
        new_blocks = self.manager.allocate_slots(request, new_computed_blocks=hit, **given)
        if new_blocks is not None:
            request.num_computed_tokens += op["num_new_computed_tokens"] + op["num_new_tokens"]
        return {
            **given,
            "with_hit_blocks": op["with_hit_blocks"],
            "new_blocks": None if new_blocks is None else ids(new_blocks),
            "blocks": [list(blocks) for blocks in self.manager.get_block_ids(request.request_id)],
        }

    def append_token(self, op: dict[str, Any]) -> dict[str, Any]:
        self.requests[op["req"]].append_output_token_ids(op["token"])
        return {"token": op["token"]}

    def free(self, op: dict[str, Any]) -> dict[str, Any]:
        self.manager.free(self.requests[op["req"]])
        return {}

    def preempt(self, op: dict[str, Any]) -> dict[str, Any]:
        self.requests[op["req"]].num_computed_tokens = 0
        return self.free(op)

    def reset_prefix_cache(self, op: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.manager.reset_prefix_cache()}

    def state(self) -> dict[str, Any]:
        pool = self.manager.block_pool
        return {
            "free": self.manager.num_free_blocks,
            "free_queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "cached": [block.block_id for block in pool.blocks if block.block_hash is not None],
        }


DOERS = {
    "get_computed_blocks": Driver.get_computed_blocks,
    "allocate_slots": Driver.allocate_slots,
    "append_token": Driver.append_token,
    "free": Driver.free,
    "preempt": Driver.preempt,
    "reset_prefix_cache": Driver.reset_prefix_cache,
}


def ids(blocks: KVCacheBlocks) -> list[list[int]]:
    return [[block.block_id for block in group] for group in blocks.blocks]


@pytest.mark.parametrize("case", [*cases("kv_manager_trace"), *cases("kv_manager_trace_extra")])
def test_kv_manager_trace(case: dict[str, Any]) -> None:
    assert set(case) == CASE_FIELDS
    driver = Driver(case)
    for step, op in enumerate(case["ops"]):
        actual = {"op": op["op"], **DOERS[op["op"]](driver, op)}
        if "req" in op:
            actual["req"] = op["req"]
        if op["op"] != "append_token":
            actual |= driver.state()
        assert actual == op, f"op {step}"
        driver.manager.check_integrity()
