"""The scheduler's one door to the KV cache: what is already computed, and slots for what comes next.

Mirrors vllm/v1/core/kv_cache_manager.py (0.32.0). Left out: KV connectors, speculation, events, metrics.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_coordinator import HitBlocks, KVCacheCoordinator
from minivllm.core.kv_cache_interface import BlockId, KVCacheConfig
from minivllm.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: one list a KV-cache group.

    Mirrors: vllm/v1/core/kv_cache_manager.py KVCacheBlocks.
    """

    blocks: HitBlocks

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[BlockId], ...] | None:
        """Ids, one list a group; with allow_none, None where there is no block at all."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)


class KVCacheManager:
    """Blocks for requests, with prefix caching.

    max_in_flight_tokens: the most tokens of one step, which bounds what a window holds. watermark_blocks: kept free
    when a request is admitted while others run.

    Mirrors: vllm/v1/core/kv_cache_manager.py KVCacheManager.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int,
        enable_caching: bool = True,
        prefix_cache_retention_interval: int | None = None,
        watermark_blocks: int = 0,
    ) -> None:
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.watermark_blocks = watermark_blocks
        self.block_pool = BlockPool(kv_cache_config.num_blocks, enable_caching, hash_block_size)
        self.coordinator = KVCacheCoordinator(
            kv_cache_config, self.block_pool, enable_caching=enable_caching, max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens, scheduler_block_size=scheduler_block_size,
        )  # fmt: skip
        self._no_blocks: HitBlocks = tuple([] for _ in kv_cache_config.kv_cache_groups)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self.block_pool.get_num_free_blocks()

    @property
    def usage(self) -> float:
        """The part of the pool in use, 0 to 1."""
        return self.block_pool.get_usage()

    def new_step_starts(self) -> None:
        """Called before each step's first decision. Mamba groups react to it; no other does."""

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """What the prefix cache has of a request: (blocks, tokens, shared prefix boundary).

        At most num_tokens - 1 tokens: one is always left to compute, since the logits of the last are needed. A
        request that wants its prompt's log-probabilities has to compute the whole prompt.
        """
        if not self.enable_caching or request.sampling_params.prompt_logprobs is not None:
            return KVCacheBlocks(self._no_blocks), 0, 0
        blocks, num_tokens = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return KVCacheBlocks(blocks), num_tokens, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = False,
    ) -> KVCacheBlocks | None:
        """Slots for the next `num_new_tokens` tokens; None where the pool is too full, with nothing allocated.

        num_new_computed_tokens, new_computed_blocks: the hit that `get_computed_blocks` just found.
        full_sequence_must_fit: refuse unless the whole sequence as it is would fit. has_scheduled_reqs: others run,
        so the watermark counts. Returns the new blocks, hit blocks left out.
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens must be at least 1, got {num_new_tokens}")
        hit = self._no_blocks if new_computed_blocks is None else new_computed_blocks.blocks
        request_id, coordinator = request.request_id, self.coordinator
        computed = request.num_computed_tokens + num_new_computed_tokens
        watermark = self.watermark_blocks if has_scheduled_reqs else 0
        if full_sequence_must_fit:
            whole = coordinator.get_num_blocks_to_allocate(
                request_id, min(request.num_tokens, self.max_model_len), hit, admission=True
            )
            if whole + watermark > self.num_free_blocks:
                return None
        # First give back what has left the windows: it may be what makes the rest fit.
        coordinator.remove_skipped_blocks(request_id, computed)
        num_tokens = min(computed + num_new_tokens, self.max_model_len)
        needed = coordinator.get_num_blocks_to_allocate(request_id, num_tokens, hit)
        if needed + watermark > self.num_free_blocks:
            return None
        coordinator.allocate_new_computed_blocks(request_id, hit)
        new_blocks = coordinator.allocate_new_blocks(request_id, num_tokens)
        if self.enable_caching:
            coordinator.cache_blocks(request, min(computed + num_new_tokens, request.num_tokens))
        return KVCacheBlocks(new_blocks)

    def free(self, request: Request) -> None:
        """Give back all blocks of a request; cached ones stay to be found until they are handed out again."""
        self.coordinator.free(request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing done, while a request holds blocks."""
        return self.block_pool.reset_prefix_cache()

    def get_block_ids(self, request_id: str) -> tuple[list[BlockId], ...]:
        """A request's whole table, one list a group; 0 where a block has left a window."""
        ids = KVCacheBlocks(self.coordinator.get_blocks(request_id)).get_block_ids()
        assert ids is not None
        return ids

    def take_new_block_ids(self) -> list[BlockId]:
        """Blocks handed out since the last call that must be zeroed before use."""
        return []

    def check_integrity(self) -> None:
        """Raise RuntimeError naming what does not agree: pool, reference counts, owners."""
        self.block_pool.check_integrity()
        counts: Counter[BlockId] = Counter()
        for manager in self.coordinator.managers:
            for request_id, blocks in manager.req_to_blocks.items():
                held = [block.block_id for block in blocks if not block.is_null]
                if len(held) != len(set(held)):
                    raise RuntimeError(f"request {request_id} holds a block twice in group {manager.group_id}: {held}")
                counts.update(held)
        for block in self.block_pool.blocks:
            if not block.is_null and block.ref_cnt != counts[block.block_id]:
                raise RuntimeError(f"{block} is referred to by {counts[block.block_id]} tables")
        used = sum(block.ref_cnt > 0 for block in self.block_pool.blocks[1:])
        if used + self.num_free_blocks != self.block_pool.num_gpu_blocks - 1:
            raise RuntimeError(f"{used} blocks in use and {self.num_free_blocks} free do not make the whole pool")
