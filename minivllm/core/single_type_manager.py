"""The blocks of each request in one KV-cache group, by the rule of the group's kind of attention.

A manager knows which blocks a request holds, which leave its window, and what of a prompt the prefix cache has for
layers of its kind. It takes blocks from the pool that all groups share.

Mirrors vllm/v1/core/single_type_kv_cache_manager.py (0.32.0). Left out: cross attention, speculation (EAGLE), external
K/V. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from typing_extensions import override

from minivllm.core.block_hash import BlockHash, hashes_for
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    cdiv,
)
from minivllm.request import Request


class SingleTypeKVCacheManager(ABC):
    """The part that every kind shares: allocate, cache, free.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py SingleTypeKVCacheManager.
    """

    def __init__(
        self, kv_cache_spec: KVCacheSpec, block_pool: BlockPool, group_id: int, *, enable_caching: bool,
        max_model_len: int, max_in_flight_tokens: int,
    ) -> None:  # fmt: skip
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.group_id = group_id
        self.enable_caching = enable_caching
        # More than this no request holds at once, however long it is.
        self.max_blocks = kv_cache_spec.max_blocks_per_request(max_model_len, max_in_flight_tokens)
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *, admission: bool = False
    ) -> int:
        """Blocks that must be free for the request to hold `num_tokens` tokens.

        Hit blocks that nobody uses count too: they are free now, and will not be. admission: the tokens are those of
        the whole sequence, of which a window never holds all at once.
        """
        required = cdiv(num_tokens, self.block_size)
        if admission:
            required = min(required, self.max_blocks)
        new = max(0, required - len(new_computed_blocks) - len(self.req_to_blocks.get(request_id, ())))
        return new + sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks)

    def allocate_new_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with the blocks of its prefix-cache hit."""
        if request_id in self.num_cached_block:
            if new_computed_blocks:
                raise RuntimeError(f"request {request_id} runs already and cannot take a prefix-cache hit")
            return
        self.block_pool.touch(block for block in new_computed_blocks if not block.is_null)
        self.req_to_blocks[request_id].extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Lengthen the request's table until it holds `num_tokens` tokens; returns what was added."""
        blocks = self.req_to_blocks[request_id]
        missing = cdiv(num_tokens, self.block_size) - len(blocks)
        if missing <= 0:
            return []
        added = self.block_pool.get_new_blocks(missing)
        blocks.extend(added)
        return added

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the full blocks of the request's first `num_tokens` tokens be found by their hashes."""
        first, last = self.num_cached_block.get(request.request_id, 0), num_tokens // self.block_size
        if first >= last:
            return
        hashes = hashes_for(request.block_hashes, self.block_pool.hash_block_size, self.block_size)
        blocks = self.req_to_blocks[request.request_id]
        for index in range(first, last):
            if not blocks[index].is_null and blocks[index].block_hash is None:
                self.block_pool.cache_block(blocks[index], hashes[index], self.group_id)
        self.num_cached_block[request.request_id] = last

    def free(self, request_id: str) -> None:
        """Give all blocks back, the last first: a tail without its head is worth nothing."""
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request_id, [])))
        self.num_cached_block.pop(request_id, None)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks of tokens that no later token attends to; null blocks take their places."""
        last = min(
            self.get_num_skipped_tokens(num_computed_tokens) // self.block_size,
            len(self.req_to_blocks.get(request_id, ())),
        )
        if last <= 0:
            return
        blocks, removed = self.req_to_blocks[request_id], []
        for index in range(last - 1, -1, -1):
            if blocks[index].is_null:  # so are all before it
                break
            removed.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(removed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token, at position `num_computed_tokens`, does not attend to."""
        return 0

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int], block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec, alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        """The longest cached prefix that layers of this kind can go on from, for groups that share one spec.

        block_hashes: one a block of the spec. max_length, alignment_tokens: the hit, in tokens, is at most the one
        and a multiple of the other. Returns one list of blocks a group, null blocks where none is needed.
        """


def _trim(hits: tuple[list[KVCacheBlock], ...], block_size: int, alignment_tokens: int) -> None:
    """Shorten a hit to a multiple of the alignment."""
    length = len(hits[0]) * block_size // alignment_tokens * alignment_tokens // block_size
    for blocks in hits:
        del blocks[length:]


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every block is kept, and a hit ends at the first block that is missing.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py FullAttentionManager.
    """

    @classmethod
    @override
    def find_longest_cache_hit(
        cls, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int], block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec, alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        hits: tuple[list[KVCacheBlock], ...] = tuple([] for _ in group_ids)
        for index in range(min(max_length // kv_cache_spec.block_size, len(block_hashes))):
            found = block_pool.get_cached_block(block_hashes[index], group_ids)
            if found is None:
                break
            for blocks, block in zip(hits, found, strict=True):
                blocks.append(block)
        _trim(hits, kv_cache_spec.block_size, alignment_tokens)
        return hits


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Blocks below the window are given back; a hit needs only the window's own blocks.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py SlidingWindowManager.
    """

    @override
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        assert isinstance(self.kv_cache_spec, SlidingWindowSpec)
        return max(0, num_computed_tokens - self.kv_cache_spec.sliding_window + 1)

    @classmethod
    @override
    def find_longest_cache_hit(
        cls, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int], block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec, alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        size = kv_cache_spec.block_size
        needed = cdiv(kv_cache_spec.sliding_window - 1, size)  # the token itself is computed, not read
        most = min(max_length // size, len(block_hashes))
        hits = tuple([block_pool.null_block] * most for _ in group_ids)
        run = 0  # cached blocks side by side, seen from the right
        for index in range(most - 1, -1, -1):
            if run == 0 and (index + 1) * size % alignment_tokens:
                continue  # a hit may not end here
            found = block_pool.get_cached_block(block_hashes[index], group_ids)
            if found is None:
                run = 0
                continue
            run += 1
            for blocks, block in zip(hits, found, strict=True):
                blocks[index] = block
            if run >= needed:
                break
        else:
            index = 0  # no full window: what reaches back to the first token is a hit all the same
        for blocks in hits:
            del blocks[index + run :]
        _trim(hits, size, alignment_tokens)
        return hits


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Blocks of earlier chunks are given back, and count as computed in a hit: nobody reads them.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py ChunkedLocalAttentionManager.
    """

    @override
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        assert isinstance(self.kv_cache_spec, ChunkedLocalAttentionSpec)
        chunk = self.kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk * chunk

    @classmethod
    @override
    def find_longest_cache_hit(
        cls, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int], block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec, alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        size, chunk = kv_cache_spec.block_size, kv_cache_spec.attention_chunk_size
        first = max_length // chunk * chunk // size
        hits = tuple([block_pool.null_block] * first for _ in group_ids)
        for index in range(first, min(max_length // size, len(block_hashes))):
            found = block_pool.get_cached_block(block_hashes[index], group_ids)
            if found is None:
                break
            for blocks, block in zip(hits, found, strict=True):
                blocks.append(block)
        _trim(hits, size, alignment_tokens)
        return hits


def manager_class(kv_cache_spec: KVCacheSpec) -> type[SingleTypeKVCacheManager]:
    """The manager of a kind of layer."""
    if isinstance(kv_cache_spec, SlidingWindowSpec):
        return SlidingWindowManager
    if isinstance(kv_cache_spec, ChunkedLocalAttentionSpec):
        return ChunkedLocalAttentionManager
    if isinstance(kv_cache_spec, FullAttentionSpec):
        return FullAttentionManager
    kind = "unknown to the managers" if isinstance(kv_cache_spec, AttentionSpec) else "not supported yet"
    raise ValueError(f"a KV-cache group of {type(kv_cache_spec).__name__} is {kind}")
