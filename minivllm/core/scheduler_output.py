"""What one `schedule()` decided, handed from the scheduler to the model runner.

Mirrors `vllm/v1/core/sched/output.py` (vLLM 0.32.0) without encoder inputs, speculation, structured output and KV
connectors. Plain data: ids, counts and block ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.core.kv_cache_interface import BlockId
    from minivllm.sampling.params import SamplingParams


@dataclass(slots=True, kw_only=True)
class NewRequestData:
    """A request scheduled for the first time: everything the runner must know of it.

    block_ids: its whole table, one list a KV-cache group. num_computed_tokens: its prefix-cache hit.

    Mirrors: vllm/v1/core/sched/output.py NewRequestData.
    Leaves out: multimodal features, pooling, LoRA, prompt embeddings.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[BlockId], ...]
    num_computed_tokens: int
    eos_token_id: int | None = None


@dataclass(slots=True, kw_only=True)
class CachedRequestData:
    """Requests the runner knows already, as parallel lists: first those that ran on, then those that came back.

    new_block_ids[i]: blocks to append to request i's table, or None where it got none; for an id in `resumed_req_ids`
    the whole table, which replaces the old one. num_computed_tokens[i]: before this step.

    Mirrors: vllm/v1/core/sched/output.py CachedRequestData.
    Leaves out: new_token_ids and all_token_ids (the runner keeps every token it sampled; only pipeline stages miss
    some).
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[BlockId], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """One step: who computes how many tokens, with which blocks, and who left.

    num_scheduled_tokens: request id -> tokens, in scheduling order. preempted_req_ids: in the order of preemption.
    finished_req_ids: ended since the last step, by whatever cause. new_block_ids_to_zero: blocks that must
    read as zero before use.

    Mirrors: vllm/v1/core/sched/output.py SchedulerOutput.
    Leaves out: encoder inputs, speculative tokens, grammar, KV connectors, block copies, common prefix blocks (cascade
    attention).
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    new_block_ids_to_zero: list[BlockId] = field(default_factory=list)
