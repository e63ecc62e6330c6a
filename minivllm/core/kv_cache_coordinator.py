"""Lets the managers of all KV-cache groups act as one, and finds the prefix that all of them have.

Mirrors vllm/v1/core/kv_cache_coordinator.py (0.32.0). Left out: speculation, external K/V, context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.core.block_hash import BlockHash, hashes_for
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from minivllm.core.single_type_manager import manager_class
from minivllm.request import Request

HitBlocks = tuple[list[KVCacheBlock], ...]  # one list a group


class KVCacheCoordinator:
    """One manager a group, in the order of the groups, over one pool.

    Mirrors: vllm/v1/core/kv_cache_coordinator.py KVCacheCoordinator, UnitaryKVCacheCoordinator,
    HybridKVCacheCoordinator.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, block_pool: BlockPool, *, enable_caching: bool, max_model_len: int,
        max_in_flight_tokens: int, scheduler_block_size: int,
    ) -> None:  # fmt: skip
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.scheduler_block_size = scheduler_block_size
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.managers = [
            manager_class(spec)(
                spec, block_pool, group_id, enable_caching=enable_caching, max_model_len=max_model_len,
                max_in_flight_tokens=max_in_flight_tokens,
            )
            for group_id, spec in enumerate(specs)
        ]  # fmt: skip
        # Groups of one spec hit together. Full attention comes first: its hit bounds the others', and a prefix of it
        # is a hit again.
        self.by_spec: dict[KVCacheSpec, list[int]] = {}
        for group_id, spec in sorted(enumerate(specs), key=lambda item: not isinstance(item[1], FullAttentionSpec)):
            self.by_spec.setdefault(spec, []).append(group_id)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: HitBlocks, *, admission: bool = False
    ) -> int:
        """Blocks that must be free, over all groups."""
        return sum(
            manager.get_num_blocks_to_allocate(request_id, num_tokens, blocks, admission=admission)
            for manager, blocks in zip(self.managers, new_computed_blocks, strict=True)
        )

    def allocate_new_computed_blocks(self, request_id: str, new_computed_blocks: HitBlocks) -> None:
        """Begin a request's tables with its hit."""
        for manager, blocks in zip(self.managers, new_computed_blocks, strict=True):
            manager.allocate_new_computed_blocks(request_id, blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> HitBlocks:
        """Lengthen a request's tables to hold `num_tokens` tokens; returns what was added."""
        return tuple(manager.allocate_new_blocks(request_id, num_tokens) for manager in self.managers)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache full blocks, in several groups only up to where all of them could hit."""
        if len(self.managers) > 1:
            num_tokens = num_tokens // self.scheduler_block_size * self.scheduler_block_size
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request."""
        for manager in self.managers:
            manager.free(request_id)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back what has left the groups' windows."""
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def get_blocks(self, request_id: str) -> HitBlocks:
        """A request's tables, one list a group."""
        return tuple(manager.req_to_blocks.get(request_id) or [] for manager in self.managers)

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> tuple[HitBlocks, int]:
        """The longest prefix that every group has, at most `max_length` tokens, and its blocks.

        Each group may shorten what the others found, and a shorter prefix may be no hit for a window any more: so
        the groups are asked in turn until none shortens it.
        """
        hits: dict[int, list[KVCacheBlock]] = {}
        length, settled = max_length, False
        while not settled:
            before = length
            for spec, group_ids in self.by_spec.items():
                if isinstance(spec, FullAttentionSpec) and group_ids[0] in hits:
                    length = min(length, len(hits[group_ids[0]]) * spec.block_size)
                    length = length // spec.block_size * spec.block_size
                    continue
                found = manager_class(spec).find_longest_cache_hit(
                    hashes_for(block_hashes, self.block_pool.hash_block_size, spec.block_size),
                    length, group_ids, self.block_pool, spec, self.scheduler_block_size,
                )  # fmt: skip
                hits.update(zip(group_ids, found, strict=True))
                length = len(found[0]) * spec.block_size
            settled = length == before or len(self.by_spec) == 1
        return tuple(
            hits[group_id][: length // manager.block_size] for group_id, manager in enumerate(self.managers)
        ), length
