"""A model runner without a model: it keeps tables and a KV cache as the real one does, and checks what it is told.

What stands in a slot is a number that follows from all tokens up to its position, so a request that reads a slot of
anyone else, or one that was never written, is found out at once. So it is with the state in a block of a Mamba group.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.outputs import EngineCoreOutput, ModelRunnerOutput
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

BLOCK = 4
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
FULL = FullAttentionSpec(**SHAPE)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=("float32",), mamba_cache_mode="align")


def sliding(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**SHAPE, sliding_window=window)


def make_scheduler(
    num_blocks: int,
    *specs: KVCacheSpec,
    max_model_len: int = 64,
    caching: bool = False,
    retention: int | None = 0,
    **settings: Any,
) -> Scheduler:
    """A scheduler over a pool of `num_blocks`, the null block included, with one group for each spec."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8} | settings
    vllm_config = VllmConfig(
        model_config=ModelConfig(model="tiny", hf_config=None, dtype="float32", max_model_len=max_model_len),
        cache_config=CacheConfig(
            block_size=BLOCK, enable_prefix_caching=caching, prefix_cache_retention_interval=retention
        ),
        scheduler_config=SchedulerConfig(**settings),
    )
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer.{index}",), kv_cache_spec=spec)
        for index, spec in enumerate(specs or (FULL,))
    )
    return Scheduler(vllm_config, KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=groups))


def make_request(
    scheduler: Scheduler, request_id: str, prompt: list[int] | int, max_tokens: int = 4, **settings: Any
) -> Request:
    """A request; a prompt given as a number n is n tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + sum(request_id.encode())) + place for place in range(prompt)]
    sampling = {key: settings.pop(key) for key in ("min_tokens", "stop_token_ids", "ignore_eos") if key in settings}
    hasher = None
    if scheduler.kv_cache_manager.enable_caching:
        sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        assert sizes == [BLOCK] * len(sizes)
        hasher = make_block_hasher(BLOCK)
    return Request(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **sampling), block_hasher=hasher, **settings
    )


@dataclass(slots=True)
class _State:
    tokens: list[int]
    tables: list[list[int]]
    salt: str | None
    num_computed: int = 0


@dataclass(slots=True)
class TinyRunner:
    """Runs a scheduler's steps; `sample(request_id, tokens)` is the model."""

    scheduler: Scheduler
    sample: Callable[[str, list[int]], int] = lambda request_id, tokens: 100 + len(tokens)
    states: dict[str, _State] = field(default_factory=dict)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, slot; of a state: block) -> content
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, EngineCoreOutput] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)
    num_hits: int = 0  # admissions, also after a preemption, that found something in the prefix cache

    def step(self) -> SchedulerOutput:
        """One schedule, execute, update, with every check."""
        output = self.scheduler.schedule()
        self.steps.append(output)
        self.check(output)
        ran = self.execute(output)
        self.check_pool()
        news = self.update(output, ran)
        self.check_pool()
        # A step that moves nothing would be repeated for ever.
        moved = output.num_scheduled_tokens or output.preempted_req_ids or news
        assert moved or not self.scheduler.has_unfinished_requests(), "a step did nothing"
        return output

    def run(self, limit: int = 500) -> TinyRunner:
        """Step until nothing is left; raises where that does not come to an end."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "the scheduler spins"
        manager = self.scheduler.kv_cache_manager
        assert manager.num_free_blocks == self.scheduler.kv_cache_config.num_blocks - 1
        self.step()
        assert not self.states, "the runner was not told of every end"
        return self

    def update(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Give the sampled tokens back and note the news."""
        news = self.scheduler.update_from_output(output, ran)
        for item in news:
            assert item.request_id not in self.finished, f"{item.request_id} has news after its end"
            self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
            if item.finish_reason is not None:
                self.finished[item.request_id] = item
        return news

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Bring the states up to date, write every slot of the step, then read what attention would read."""
        for request_id in output.finished_req_ids:
            self.states.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            salt = self.scheduler.requests[new.req_id].cache_salt
            state = _State(list(new.prompt_token_ids), [list(ids) for ids in new.block_ids], salt)
            state.num_computed = new.num_computed_tokens
            self.states[new.req_id] = state
            self.num_hits += state.num_computed > 0
        cached = output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            state, blocks = self.states[request_id], cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                state.tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, ids in zip(state.tables, blocks, strict=True):
                    table.extend(ids)
            state.num_computed = cached.num_computed_tokens[row]
            self.num_hits += request_id in cached.resumed_req_ids and state.num_computed > 0
            assert cached.num_output_tokens[row] == self.scheduler.requests[request_id].num_output_tokens

        contents = {request_id: self._contents(self.states[request_id]) for request_id in output.num_scheduled_tokens}
        specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
        written: Counter[tuple[int, int]] = Counter()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self.states[request_id]
            first, end = state.num_computed, state.num_computed + num_tokens
            for group, table in enumerate(state.tables):
                if isinstance(specs[group], MambaSpec):
                    self._check_state(group, table, first, contents[request_id])
                for position in range(first, end):
                    block = table[position // specs[group].block_size]
                    slot = (group, block * BLOCK + position % BLOCK)
                    if isinstance(specs[group], MambaSpec):
                        if position < end - 1:
                            continue
                        slot = (group, block)
                    assert block != 0, f"{request_id} writes position {position} to the null block"
                    self.cache[slot] = contents[request_id][position]
                    written[slot] += 1
        assert not written or max(written.values()) == 1, "two requests write one slot"
        sampled: list[list[int]] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self.states[request_id]
            first, last = state.num_computed, state.num_computed + num_tokens - 1
            for group, table in enumerate(state.tables):
                if isinstance(specs[group], MambaSpec):
                    continue
                for position in range(self._first_read(group, first), last + 1):
                    slot = (group, table[position // BLOCK] * BLOCK + position % BLOCK)
                    assert self.cache.get(slot) == contents[request_id][position], f"{request_id} reads a wrong slot"
            complete = last + 1 == len(state.tokens)
            sampled.append([self.sample(request_id, state.tokens)] if complete else [])
            state.tokens += sampled[-1]
        return ModelRunnerOutput(req_ids=list(output.num_scheduled_tokens), sampled_token_ids=sampled)

    def _check_state(self, group: int, table: list[int], first: int, contents: list[int]) -> None:
        """The state that a Mamba layer goes on from is that of exactly the tokens before."""
        block_size = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        if first:
            state = self.cache.get((group, table[(first - 1) // block_size]))
            assert state == contents[first - 1], "a wrong state"

    @staticmethod
    def _contents(state: _State) -> list[int]:
        contents, value = [], hash(state.salt)
        for token in state.tokens:
            value = hash((value, token))
            contents.append(value)
        return contents

    def _first_read(self, group: int, position: int) -> int:
        """The first position that the query at `position` reads in a group."""
        spec = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            return max(0, position - spec.sliding_window + 1)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return position // spec.attention_chunk_size * spec.attention_chunk_size
        return 0

    def check(self, output: SchedulerOutput) -> None:
        """What must hold of every decision."""
        config, scheduled = self.scheduler.config, output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values()) <= config.max_num_batched_tokens
        assert all(count > 0 for count in scheduled.values())
        assert len(self.scheduler.running) <= min(config.max_num_seqs, config.max_num_active_seqs or 10**9)
        named = [new.req_id for new in output.scheduled_new_reqs] + output.scheduled_cached_reqs.req_ids
        assert sorted(named) == sorted(scheduled)
        assert not set(output.preempted_req_ids) & set(scheduled)

    def check_pool(self) -> None:
        """Reference counts, owners and sums, counted anew from the tables."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        manager.check_integrity()
        owners: Counter[int] = Counter()
        group_of: dict[int, int] = {}
        for request in [*scheduler.running, *scheduler.waiting]:
            for group, ids in enumerate(manager.get_block_ids(request.request_id)):
                held = [block for block in ids if block != 0]
                assert request in scheduler.running or not held, f"{request} holds blocks and does not run"
                assert len(held) == len(set(held)), f"{request} holds a block twice"
                owners.update(held)
                for block in held:
                    assert group_of.setdefault(block, group) == group, f"block {block} belongs to two groups"
        if not manager.enable_caching:
            assert not owners or max(owners.values()) == 1, "a block has two owners"
        assert manager.num_free_blocks + len(owners) == scheduler.kv_cache_config.num_blocks - 1
        for block in manager.block_pool.blocks[1:]:
            assert block.ref_cnt == owners[block.block_id], f"block {block.block_id} has a wrong reference count"
        for request in scheduler.running:
            if (state := self.states.get(request.request_id)) is not None:
                # Blocks below a window become null in the manager's table; the runner's keeps their old ids.
                for ours, theirs in zip(state.tables, manager.get_block_ids(request.request_id), strict=True):
                    assert len(ours) == len(theirs)
                    assert all(a == b or b == 0 for a, b in zip(ours, theirs, strict=True)), "tables differ"


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts of two tokens only, so that many share a beginning."""
    return [rng.randrange(2) for _ in range(rng.randint(1, longest))]
