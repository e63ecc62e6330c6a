"""The blocks of each request in a KV-cache group of Mamba layers: a block is one copy of a state.

A state stands for all tokens before it, so only the newest is read. Which older ones are kept, for prefix-cache hits,
is the spec's `mamba_cache_mode`.

Mirrors MambaManager of vllm/v1/core/single_type_kv_cache_manager.py (0.32.0). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, CacheKey, KVCacheBlock
from minivllm.core.kv_cache_interface import MambaSpec, cdiv
from minivllm.core.single_type_manager import SingleTypeKVCacheManager, columns, count_idle, tail_mask
from minivllm.request import Request


class MambaManager(SingleTypeKVCacheManager):
    """A hit needs one state. In "align" mode a step allocates only the block in which it ends.

    The step then copies the state out of the block before, which therefore stays for one step more.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py MambaManager.
    Leaves out: blocks for speculated tokens, checkpoints within a chunk, states cached within a block.
    """

    def __init__(self, kv_cache_spec: MambaSpec, block_pool: BlockPool, group_id: int, **settings: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, group_id, **settings)
        self._align = kv_cache_spec.mamba_cache_mode == "align"
        self._last_state: dict[str, int] = {}  # where in the table the state before the newest stands
        self._cached_this_step: set[CacheKey] = set()

    def new_step_starts(self) -> None:
        """States written in the step before can be hit from now on."""
        self._cached_this_step.clear()

    @override
    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], admission: bool = False
    ) -> int:
        if new_computed_blocks and new_computed_blocks[-1].block_hash in self._cached_this_step:
            # The state is written only in this step: more than any pool has, so that the request waits for the next.
            return self.block_pool.num_gpu_blocks + 1
        # Never capped on admission: how many states a chunk leaves behind is decided by the chunk alone.
        needed = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks)
        idle = count_idle(new_computed_blocks)
        return min(needed - idle, 1) + idle if self._align else needed

    @override
    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        if not self._align:
            return super().allocate_new_blocks(request_id, num_tokens)
        blocks = self.req_to_blocks.setdefault(request_id, [])
        held, required = len(blocks), cdiv(num_tokens, self.block_size)
        if required <= held:
            return []
        if held:
            self._last_state[request_id] = held - 1
        blocks.extend([self.block_pool.null_block] * (required - 1 - held))
        blocks.extend(self.block_pool.get_new_blocks(1))
        return blocks[held:]

    @override
    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        super().remove_skipped_blocks(request_id, num_computed_tokens)
        last = self._last_state.get(request_id)
        if last is None or last >= cdiv(num_computed_tokens, self.block_size) - 1:
            return
        # Null blocks in between hide it from the rule above.
        blocks = self.req_to_blocks[request_id]
        self.block_pool.free_blocks([blocks[last]])
        blocks[last] = self.block_pool.null_block

    @override
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    @override
    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        first = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens)
        new = self.req_to_blocks[request.request_id][first : self.num_cached_block.get(request.request_id, 0)]
        self._cached_this_step.update(block.block_hash for block in new if block.block_hash is not None)

    @override
    def reachable_block_mask(self, start: int, end: int, boundaries: Iterable[int]) -> list[bool] | None:
        """The states at the places where a hit may end; all of them where nothing is said."""
        if self.retention_interval is None:
            return None
        ends = [self.aligned(tokens // self.block_size) for tokens in boundaries]
        return tail_mask(start, end, 1, self.retention_interval // self.block_size, ends)

    @override
    def free(self, request_id: str) -> None:
        super().free(request_id)
        self._last_state.pop(request_id, None)

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int],
        drop_eagle_block: bool = False,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        """The newest state that is cached. drop_eagle_block means nothing here: no draft model has Mamba layers."""
        hashes = self.hashes(block_hashes)
        rows: list[list[KVCacheBlock]] = []
        for index in range(min(max_length // self.block_size, len(hashes)) - 1, -1, -1):
            if index + 1 == self.aligned(index + 1):
                found = self.block_pool.get_cached_block(hashes[index], group_ids)
                if found is not None:
                    rows = [[self.block_pool.null_block] * len(group_ids)] * index + [found]
                    break
        return columns(rows, len(group_ids))
