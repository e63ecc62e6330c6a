"""The scheduler's one door to the KV cache: what is already computed, and slots for what comes next.

Mirrors vllm/v1/core/kv_cache_manager.py (0.32.0). Left out: KV connectors, speculation, events, metrics.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_coordinator import BlocksOfGroups, KVCacheCoordinator
from minivllm.core.kv_cache_interface import BlockId, KVCacheConfig
from minivllm.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: one list a KV-cache group.

    Mirrors: vllm/v1/core/kv_cache_manager.py KVCacheBlocks.
    """

    blocks: BlocksOfGroups

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[BlockId], ...] | None:
        """Ids, one list a group; with allow_none, None where there is no block at all."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([[block.block_id for block in group] for group in self.blocks])


class KVCacheManager:
    """Blocks for requests, with prefix caching.

    max_in_flight_tokens: the most tokens of one step, which bounds what a window holds.
    prefix_cache_retention_interval: see `CacheConfig`. watermark_blocks: kept free when a request is admitted while
    others run.

    Mirrors: vllm/v1/core/kv_cache_manager.py KVCacheManager.
    Leaves out: KV connectors, lookahead slots, cross attention, events, metrics.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, *, max_model_len: int, scheduler_block_size: int, hash_block_size: int,
        max_in_flight_tokens: int, enable_caching: bool = True, prefix_cache_retention_interval: int | None = None,
        watermark_blocks: int = 0,
    ) -> None:  # fmt: skip
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.watermark_blocks = watermark_blocks
        self.block_pool = BlockPool(kv_cache_config.num_blocks, enable_caching, hash_block_size)
        self.coordinator = KVCacheCoordinator(
            kv_cache_config, self.block_pool, max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens,
            scheduler_block_size=scheduler_block_size, retention_interval=prefix_cache_retention_interval,
        )  # fmt: skip
        self._no_blocks = KVCacheBlocks(tuple([] for _ in kv_cache_config.kv_cache_groups))
        self._zeroing = kv_cache_config.needs_kv_cache_zeroing
        self._new_block_ids: list[BlockId] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.block_pool.free_block_queue.num_free_blocks

    @property
    def usage(self) -> float:
        """The part of the pool in use, 0 to 1."""
        return self.block_pool.get_usage()

    def new_step_starts(self) -> None:
        """Called before each step's first decision. Mamba groups react to it; no other does."""
        self.coordinator.new_step_starts()

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """What the prefix cache has of a request: (blocks, tokens, shared prefix boundary).

        At most num_tokens - 1 tokens: one is always left to compute, since the logits of the last are needed. A
        request that wants its prompt's log-probabilities has to compute the whole prompt. The boundary goes into
        `request.shared_prefix_boundary`: up to there some group has the prefix and another lacks what it needs to go
        on, so it is worth caching when this request computes it. 0 for none.
        """
        if not self.enable_caching or request.sampling_params.prompt_logprobs is not None:
            return self._no_blocks, 0, 0
        blocks, length, missed = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return KVCacheBlocks(blocks), length, length + missed if missed else 0

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None, *, full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = False,
    ) -> KVCacheBlocks | None:  # fmt: skip
        """Slots for the next `num_new_tokens` tokens; None where the pool is too full, with nothing allocated.

        num_new_computed_tokens, new_computed_blocks: the hit that `get_computed_blocks` just found.
        full_sequence_must_fit: refuse unless the whole sequence as it is would fit. has_scheduled_reqs: others run,
        so the watermark counts. Returns the new blocks, hit blocks left out.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, got {num_new_tokens}")
        hit = (self._no_blocks if new_computed_blocks is None else new_computed_blocks).blocks
        request_id, coordinator = request.request_id, self.coordinator
        computed = request.num_computed_tokens + num_new_computed_tokens
        num_tokens = computed + num_new_tokens
        watermark = self.watermark_blocks if has_scheduled_reqs else 0
        if full_sequence_must_fit:
            whole = min(request.num_tokens, self.max_model_len)
            needed = coordinator.get_num_blocks_to_allocate(request_id, whole, hit, admission=True)
            if needed + watermark > self.num_free_blocks:
                return None
        # First give back what has left the windows: it may be what makes the rest fit.
        coordinator.remove_skipped_blocks(request_id, computed)
        slots = min(num_tokens, self.max_model_len)
        needed = coordinator.get_num_blocks_to_allocate(request_id, slots, hit)
        if needed + watermark > self.num_free_blocks:
            return None
        if new_computed_blocks is not None:
            coordinator.allocate_new_computed_blocks(request_id, hit)
        new_blocks = self._no_blocks
        if needed:
            new_blocks = KVCacheBlocks(coordinator.allocate_new_blocks(request_id, slots))
            if self._zeroing:
                ids = (block.block_id for group in new_blocks.blocks for block in group if not block.is_null)
                self._new_block_ids.extend(ids)
        if self.enable_caching:
            coordinator.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; cached ones stay to be found until they are handed out again."""
        self.coordinator.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing done, while a request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def get_block_ids(self, request_id: str) -> tuple[list[BlockId], ...]:
        """A request's whole table, one list a group; 0 where a block has left a window."""
        tables = self.coordinator.get_blocks(request_id)
        return tuple([[block.block_id for block in table] for table in tables])

    def take_new_block_ids(self) -> list[BlockId]:
        """Blocks handed out since the last call, where they must be zeroed before use; else none."""
        taken, self._new_block_ids = self._new_block_ids, []
        return taken

    def check_integrity(self) -> None:
        """Raise RuntimeError naming what does not agree: pool, reference counts, owners, groups."""
        self.block_pool.check_integrity()
        counts: Counter[BlockId] = Counter()
        group_of: dict[BlockId, int] = {}
        for group_id, manager in enumerate(self.coordinator.managers):
            for request_id, table in manager.req_to_blocks.items():
                owner = f"request {request_id!r} in group {group_id}"
                held = [block for block in table if not block.is_null]
                counts.update(block.block_id for block in held)
                if len(set(held)) < len(held):
                    raise RuntimeError(f"{owner} holds a block twice: {held}")
                if manager.num_cached_block.get(request_id, 0) > len(table):
                    raise RuntimeError(f"{owner} cached {manager.num_cached_block[request_id]} of {len(table)} blocks")
                for block in held:
                    hashed_for = group_id if block.block_hash is None else block.block_hash[1]
                    if {group_of.setdefault(block.block_id, group_id), hashed_for} != {group_id}:
                        raise RuntimeError(f"{owner} holds {block}, which belongs to another group")
        for block in self.block_pool.blocks[1:]:
            if block.ref_cnt != counts[block.block_id]:
                raise RuntimeError(f"{block} is referred to by {counts[block.block_id]} tables")
            if block.ref_cnt > 1 and not self.enable_caching:
                raise RuntimeError(f"{block} has several owners, though nothing is cached")
