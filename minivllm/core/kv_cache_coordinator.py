"""Lets the managers of all KV-cache groups act as one, and finds the prefix that all of them have.

Mirrors vllm/v1/core/kv_cache_coordinator.py (0.32.0). Left out: speculation, external K/V, context parallelism, hits
that end within a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from minivllm.core.mamba_manager import MambaManager
from minivllm.core.single_type_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from minivllm.request import Request

BlocksOfGroups = tuple[list[KVCacheBlock], ...]  # one list a group

MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
}


def manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager of a kind of layer; that of its base class where a spec has none of its own."""
    for kind in type(kv_cache_spec).__mro__:
        if kind in MANAGERS:
            return MANAGERS[kind]
    raise ValueError(
        f"no manager knows a KV-cache group of {type(kv_cache_spec).__name__}; there are managers for"
        f" {[kind.__name__ for kind in MANAGERS]}"
    )


class KVCacheCoordinator:
    """One manager a group, in the order of the groups, over one pool.

    Mirrors: vllm/v1/core/kv_cache_coordinator.py KVCacheCoordinator, UnitaryKVCacheCoordinator,
    HybridKVCacheCoordinator.
    """

    def __init__(
        self, kv_cache_config: KVCacheConfig, block_pool: BlockPool, *, max_model_len: int, max_in_flight_tokens: int,
        scheduler_block_size: int, retention_interval: int | None,
    ) -> None:  # fmt: skip
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        sizes = {spec.block_size for spec in specs}
        if any(scheduler_block_size % size for size in sizes) or (
            block_pool.enable_caching and any(size % block_pool.hash_block_size for size in sizes)
        ):
            raise ValueError(
                f"block sizes {sorted(sizes)} must be multiples of hash_block_size={block_pool.hash_block_size} and"
                f" divide scheduler_block_size={scheduler_block_size}: take their GCD and LCM"
            )
        if retention_interval is not None and (retention_interval < 0 or retention_interval % scheduler_block_size):
            raise ValueError(
                f"prefix_cache_retention_interval={retention_interval} must be None, 0 or a multiple of the scheduler"
                f" block size {scheduler_block_size}"
            )
        self.scheduler_block_size = scheduler_block_size
        self.managers = [
            manager_class(spec)(
                spec, block_pool, group_id, max_model_len=max_model_len, max_in_flight_tokens=max_in_flight_tokens,
                alignment_tokens=scheduler_block_size, retention_interval=retention_interval,
            )
            for group_id, spec in enumerate(specs)
        ]  # fmt: skip
        self._dropping = [manager for manager in self.managers if manager.drops_blocks]
        # Groups of one spec hit together. Full attention comes first: its hit bounds the others', and a prefix of it
        # is a hit again.
        self._groups_by_spec: dict[KVCacheSpec, list[int]] = {}
        for group_id, spec in sorted(enumerate(specs), key=lambda item: not isinstance(item[1], FullAttentionSpec)):
            self._groups_by_spec.setdefault(spec, []).append(group_id)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: BlocksOfGroups, admission: bool = False
    ) -> int:
        """Blocks that must be free, over all groups."""
        total = 0
        for manager, blocks in zip(self.managers, new_computed_blocks):
            total += manager.get_num_blocks_to_allocate(request_id, num_tokens, blocks, admission)
        return total

    def allocate_new_computed_blocks(self, request_id: str, new_computed_blocks: BlocksOfGroups) -> None:
        """Begin a request's tables with its hit, in all groups before any new block may evict a part of it."""
        for manager, blocks in zip(self.managers, new_computed_blocks, strict=True):
            manager.allocate_new_computed_blocks(request_id, blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> BlocksOfGroups:
        """Lengthen a request's tables to hold `num_tokens` tokens; returns what was added."""
        return tuple([manager.allocate_new_blocks(request_id, num_tokens) for manager in self.managers])

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
        for manager in self._dropping:
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def new_step_starts(self) -> None:
        """Called before a step's first decision. A hit on a Mamba state that is yet to be written has to wait."""
        for manager in self.managers:
            if isinstance(manager, MambaManager):
                manager.new_step_starts()

    def get_blocks(self, request_id: str) -> BlocksOfGroups:
        """A request's tables, one list a group."""
        return tuple([manager.req_to_blocks.get(request_id) or [] for manager in self.managers])

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int
    ) -> tuple[BlocksOfGroups, int, int]:
        """The longest prefix that every group has, at most `max_length` tokens: (blocks, tokens, missed tokens).

        Each group may shorten what the others found, and a shorter prefix may be no hit for a window any more: so
        the groups are asked in turn until none shortens it. Missed tokens: how much longer the hit of some group was.
        """
        hits: dict[int, list[KVCacheBlock]] = {}
        length, longest, settled = max_length, 0, False
        while not settled:
            before = length
            for spec, group_ids in self._groups_by_spec.items():
                if isinstance(spec, FullAttentionSpec) and group_ids[0] in hits:
                    length = min(length, len(hits[group_ids[0]]) * spec.block_size)
                    continue
                found = self.managers[group_ids[0]].find_longest_cache_hit(block_hashes, length, group_ids)
                hits.update(zip(group_ids, found, strict=True))
                length = len(found[0]) * spec.block_size
                longest = max(longest, length)
            settled = length == before or len(self._groups_by_spec) == 1
        blocks = [hits[group_id] for group_id in range(len(self.managers))]
        for manager, found_blocks in zip(self.managers, blocks, strict=True):
            del found_blocks[length // manager.block_size :]
        return tuple(blocks), length, longest - length
