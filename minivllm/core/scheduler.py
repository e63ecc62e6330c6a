"""Decides each step: how many tokens for whom, and which blocks they are written to.

There is no prefill phase and no decode phase. A request has `num_tokens` known tokens of which `num_computed_tokens`
are computed, and every step hands out at most `max_num_batched_tokens` tokens so that the second number catches up
with the first. Chunked prefill, prefix-cache hits, decoding and recomputing after a preemption are all this one rule.

Mirrors `vllm/v1/core/sched/scheduler.py` (vLLM 0.32.0, synchronous scheduling) without speculation, KV connectors,
encoder inputs, structured output, LoRA limits, streamed input and metrics. Plain Python: no tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.config import VllmConfig
from minivllm.core.kv_cache_groups import resolve_kv_cache_block_sizes
from minivllm.core.kv_cache_interface import BlockId, KVCacheConfig, MambaSpec, cdiv
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request_queue import create_request_queue
from minivllm.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.outputs import EngineCoreOutput, ModelRunnerOutput
from minivllm.request import Request, RequestStatus


@dataclass(slots=True, kw_only=True)
class _Step:
    """What the current `schedule()` has decided so far."""

    token_budget: int
    chunk_limit: int  # the most tokens one request may get
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    # Requests the runner knows: new blocks, or None; for the resumed ones the whole table.
    known: dict[str, tuple[list[BlockId], ...] | None] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    new: list[Request] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def give(self, request_id: str, num_tokens: int) -> None:
        self.num_scheduled_tokens[request_id] = num_tokens
        self.token_budget -= num_tokens

    def take_back(self, request_id: str) -> None:
        self.token_budget += self.num_scheduled_tokens.pop(request_id, 0)
        self.known.pop(request_id, None)


class Scheduler:
    """Owns the queues and the KV-cache manager; the engine alternates `schedule` and `update_from_output`.

    Mirrors: vllm/v1/core/sched/scheduler.py Scheduler.
    Leaves out: async scheduling, speculation, KV connectors, encoder inputs, structured output, pausing, metrics.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.config = config = vllm_config.scheduler_config
        self.kv_cache_config = kv_cache_config
        self.max_model_len = vllm_config.model_config.max_model_len
        scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            max_model_len=self.max_model_len,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            max_in_flight_tokens=config.max_num_batched_tokens,
            enable_caching=vllm_config.cache_config.enable_prefix_caching,
            prefix_cache_retention_interval=vllm_config.cache_config.prefix_cache_retention_interval,
            watermark_blocks=int(config.watermark * kv_cache_config.num_blocks),
        )
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(config.policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()  # ended since the last schedule(), to be told to the runner
        self._failed: list[EngineCoreOutput] = []  # ended with an error since the last update_from_output()

        self._max_active = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
        mamba = [
            spec.block_size
            for spec in kv_cache_config.layer_specs().values()
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
        ]
        self._align_to = max(mamba, default=0)

    def add_request(self, request: Request) -> None:
        """Queue a request. One that can never fit the pool is not queued: the next update reports its error."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already scheduled; ids must be unique")
        if request.num_tokens >= self.max_model_len:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, but max_model_len="
                f"{self.max_model_len} must hold them and one more: shorten the prompt or raise max_model_len"
            )
        self.requests[request.request_id] = request
        if self._blocks_needed(request, 0) > self.kv_cache_config.num_blocks - 1:
            self._fail(request)
        else:
            self.waiting.add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Hand out this step's tokens and blocks: first to running requests, then to waiting ones."""
        self.kv_cache_manager.new_step_starts()
        step = _Step(token_budget=self.config.max_num_batched_tokens, chunk_limit=self._chunk_limit())
        self._schedule_running(step)
        # Memory is short in a step that had to preempt: whoever came in now would soon be put out again.
        if not step.preempted:
            self._schedule_waiting(step)
        output = self._make_output(step)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Append the sampled tokens and end what is complete; returns each request's news, in scheduling order."""
        outputs, self._failed = self._failed, []
        rows = {request_id: row for row, request_id in enumerate(runner_output.req_ids)}
        stopped = False
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step ran
                continue
            row = rows[request_id]
            token_ids = runner_output.sampled_token_ids[row]
            prompt_logprobs = runner_output.prompt_logprobs.get(request_id)
            if not token_ids and prompt_logprobs is None:
                continue
            for token_id in token_ids:
                request.append_output_token_ids(token_id)
            if token_ids and check_stop(request, self.max_model_len):
                stopped = True
                self._free(request)
            outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=token_ids,
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                    new_logprobs=None if runner_output.logprobs is None else runner_output.logprobs[row],
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
        if stopped:
            self.running = [request for request in self.running if not request.is_finished()]
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> None:
        """End requests from outside (an abort, a stop string); ids that are not scheduled are ignored."""
        if not status.is_finished:
            raise ValueError(f"finish_requests needs a finished status, got {status.name}")
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        requests = {self.requests[request_id] for request_id in ids if request_id in self.requests}
        self.running = [request for request in self.running if request not in requests]
        self.waiting.remove_requests(requests)
        for request in requests:
            request.status = status
            self._free(request)

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs or waits, or an error is still to be reported."""
        return bool(self.requests or self._failed)

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        return len(self.running), len(self.waiting)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing done, while requests hold blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def _chunk_limit(self) -> int:
        """The most tokens one request may get, so that a long prompt does not starve the others.

        A request alone has nobody to starve. Adaptive: at least a fair share of the budget.
        """
        budget, threshold = self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold
        num_requests = len(self.running) + len(self.waiting)
        if not threshold or num_requests <= 1:
            return budget
        if self.config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, budget // num_requests)
        return threshold

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.token_budget > 0:
            request = self.running[index]
            computed = request.num_computed_tokens
            num_new = min(request.num_tokens - computed, step.chunk_limit, step.token_budget)
            if self._align_to and not (num_new := self._end_on_block_border(request, computed, num_new)):
                index += 1
                continue
            blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            while blocks is None:
                if len(self.running) == 1:
                    # It outgrew the pool. vLLM would preempt it and try again for ever (vLLM #39734).
                    self._fail(request)
                    break
                victim = self._choose_victim()
                index -= self._preempt(victim, step) < index
                if victim is request:
                    # The rest of the queue waits for the next step: 0.32's rule, also under "priority".
                    return
                blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            else:
                step.known[request.request_id] = blocks.get_block_ids(allow_none=True)
                step.give(request.request_id, num_new)
                index += 1

    def _schedule_waiting(self, step: _Step) -> None:
        while self.waiting and step.token_budget > 0 and len(self.running) < self._max_active:
            request = self.waiting.peek_request()
            hit_blocks, num_hit, request.shared_prefix_boundary = self.kv_cache_manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - num_hit, step.chunk_limit)
            if num_new > step.token_budget and not self.config.enable_chunked_prefill:
                break
            num_new = min(num_new, step.token_budget)
            if self._align_to and not (num_new := self._end_on_block_border(request, num_hit, num_new)):
                break
            blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=hit_blocks,
                full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
                has_scheduled_reqs=bool(self.running),
            )
            if blocks is None:
                if self.running:
                    break
                # Every block is free and it does not fit: waiting would never end.
                self._fail(request)
                continue
            self.waiting.pop_request()
            self.running.append(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = num_hit
                step.new.append(request)
            else:
                step.resumed.add(request.request_id)
                step.known[request.request_id] = self.kv_cache_manager.get_block_ids(request.request_id)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_hit
            step.give(request.request_id, num_new)

    def _make_output(self, step: _Step) -> SchedulerOutput:
        """Built before computed tokens are counted up: the runner needs the state before the step."""
        manager, known = self.kv_cache_manager, [self.requests[request_id] for request_id in step.known]
        finished, self.finished_req_ids = self.finished_req_ids, set()
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    block_ids=manager.get_block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                    eos_token_id=request.eos_token_id,
                )
                for request in step.new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=list(step.known),
                resumed_req_ids=step.resumed,
                new_block_ids=list(step.known.values()),
                num_computed_tokens=[request.num_computed_tokens for request in known],
                num_output_tokens=[request.num_output_tokens for request in known],
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(step.num_scheduled_tokens.values()),
            preempted_req_ids=step.preempted,
            finished_req_ids=finished,
            new_block_ids_to_zero=manager.take_new_block_ids(),
        )

    def _choose_victim(self) -> Request:
        """The running request to preempt: the last one, or under "priority" the least important, then latest."""
        if self.config.policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda request: (request.priority, request.arrival_time))

    def _preempt(self, victim: Request, step: _Step) -> int:
        """Free all blocks of `victim` and queue it to be computed anew; returns the place it had among the running."""
        position = self.running.index(victim)
        del self.running[position]
        # Blocks that this step was to fill are in the prefix cache by now, but will never be written: nobody may find
        # them. (0.32 leaves them there, and the resumed request reads what was never computed.)
        block_ids = self.kv_cache_manager.get_block_ids(victim.request_id)
        self.kv_cache_manager.free(victim)
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, block_ids, strict=True):
            self.kv_cache_manager.block_pool.evict_blocks(
                ids[victim.num_computed_tokens // group.kv_cache_spec.block_size :]
            )
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.waiting.prepend_request(victim)
        step.preempted.append(victim.request_id)
        step.take_back(victim.request_id)
        return position

    def _end_on_block_border(self, request: Request, start: int, num_new: int) -> int:
        """Shorten a prefill chunk so that it ends where a Mamba state can be cached: at a block border.

        Only the end of a chunk leaves a state behind. So chunks end on borders, at the last border of the sequence,
        and at a prefix that other requests share; a chunk that starts within a block ends that block first.
        """
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prefill_end:
            return num_new
        size, end = self._align_to, start + num_new
        budget, threshold = self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold
        longest = min(budget, threshold or budget)
        if end < prefill_end and (end // size * size > start or size <= longest):
            end = end // size * size
        stops = [request.num_tokens // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if request.shared_prefix_boundary < end:
            stops.append(start + (request.shared_prefix_boundary - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(end - start, 0)

    def _blocks_needed(self, request: Request, max_in_flight_tokens: int) -> int:
        """Blocks that all groups together hold for the sequence as it is, computing so many tokens at a time.

        With 0 it is what the windows alone hold: less can never do.
        """
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        return sum(
            min(
                cdiv(request.num_tokens, spec.block_size),
                spec.max_blocks_per_request(self.max_model_len, max_in_flight_tokens),
            )
            for spec in specs
        )

    def _fail(self, request: Request) -> None:
        """End a request that can never fit; its error goes out with the next update."""
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        needed = self._blocks_needed(request, self.config.max_num_batched_tokens)
        error = (
            f"request {request.request_id!r} needs {needed} KV-cache blocks for its {request.num_tokens} tokens, but"
            f" the pool has {self.kv_cache_config.num_blocks - 1}: shorten the prompt or lower max_tokens, or enlarge"
            " the pool with kv_cache_memory_bytes, gpu_memory_utilization or num_gpu_blocks_override"
        )
        self._failed.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                num_cached_tokens=request.num_cached_tokens,
                error=error,
            )
        )

    def _free(self, request: Request) -> None:
        """Give back the blocks of a request that has ended, and tell the runner with the next step."""
        self.kv_cache_manager.free(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the request's last token ends it; sets its status and stop reason then.

    min_tokens holds back stop tokens only: the two length limits always count.
    """
    params, token_id = request.sampling_params, request.output_token_ids[-1]
    num_output = request.num_output_tokens
    if num_output >= params.min_tokens:
        if token_id == request.eos_token_id and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in (params.stop_token_ids or ()):
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, token_id
            return True
    if request.num_tokens >= max_model_len or (params.max_tokens is not None and num_output >= params.max_tokens):
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
