"""The blocks of each request in one KV-cache group, by the rule of the group's kind of attention.

A manager knows which blocks a request holds, which leave its window, and what of a prompt the prefix cache has for
layers of its kind. It takes blocks from the pool that all groups share. `mamba_manager.py` has the kind that is not
attention.

Mirrors vllm/v1/core/single_type_kv_cache_manager.py (0.32.0). Left out: cross attention, sinks in blocks of their
own, external K/V, context parallelism, hits that end within a block. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from minivllm.core.block_hash import BlockHash, hashes_for
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec, cdiv
from minivllm.request import Request


class SingleTypeKVCacheManager(ABC):
    """The part that every kind shares: allocate, cache, free.

    alignment_tokens: a prefix-cache hit ends at a multiple of it. retention_interval: see
    `CacheConfig.prefix_cache_retention_interval`.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py SingleTypeKVCacheManager.
    Leaves out: external K/V, blocks for speculated tokens, copies of partly filled blocks.
    """

    drops_blocks = True  # whether blocks leave a request's table while it runs

    def __init__(
        self, kv_cache_spec: KVCacheSpec, block_pool: BlockPool, group_id: int, *, max_model_len: int,
        max_in_flight_tokens: int, alignment_tokens: int, retention_interval: int | None = None,
    ) -> None:  # fmt: skip
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.group_id = group_id
        self.alignment_tokens = alignment_tokens
        self.retention_interval = retention_interval
        # More than this no request holds at once, however long it is.
        self.max_blocks = kv_cache_spec.max_blocks_per_request(max_model_len, max_in_flight_tokens)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # Blocks at the start of a table that were offered to the prefix cache already.
        self.num_cached_block: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], admission: bool = False
    ) -> int:
        """Blocks that must be free for the request to hold `num_tokens` tokens.

        Hit blocks that nobody uses count too: they are free now, and will not be. admission: the tokens are those of
        the whole sequence, of which a window never holds all at once.
        """
        required = cdiv(num_tokens, self.block_size)
        if admission:
            required = min(required, self.max_blocks)
        new = max(0, required - len(self.req_to_blocks.get(request_id, ())) - len(new_computed_blocks))
        return new + count_idle(new_computed_blocks) if new_computed_blocks else new

    def allocate_new_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock]) -> None:
        """Begin a request's table with the blocks of its prefix-cache hit."""
        if self.req_to_blocks.get(request_id):
            if new_computed_blocks:
                raise RuntimeError(f"request {request_id!r} runs already and cannot take a prefix-cache hit")
            return
        self.block_pool.touch(new_computed_blocks)
        self.req_to_blocks[request_id] = list(new_computed_blocks)
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Lengthen the request's table until it holds `num_tokens` tokens; returns what was added."""
        blocks = self.req_to_blocks.setdefault(request_id, [])
        missing = cdiv(num_tokens, self.block_size) - len(blocks)
        if missing <= 0:
            return []
        added = self.block_pool.get_new_blocks(missing)
        blocks.extend(added)
        return added

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the full blocks of the request's first `num_tokens` tokens be found, those that a hit could use."""
        first, last = self.num_cached_block.get(request.request_id, 0), num_tokens // self.block_size
        if first >= last:
            return
        # Where a later request will want to go on: from this prompt sent again, and from where prompts part.
        boundaries = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        mask = self.reachable_block_mask(first, last, boundaries)
        hashes = self.hashes(request.block_hashes)
        blocks = self.req_to_blocks[request.request_id]
        for index in range(first, last):
            if not blocks[index].is_null and (mask is None or mask[index - first]):
                self.block_pool.cache_block(blocks[index], hashes[index], self.group_id)
        self.num_cached_block[request.request_id] = last

    def reachable_block_mask(self, start: int, end: int, boundaries: Iterable[int]) -> list[bool] | None:
        """Which of the blocks [start, end) are worth caching; None for all. boundaries: in tokens, 0 for none."""
        return None

    def free(self, request_id: str) -> None:
        """Give all blocks back, the last first: a tail without its head is worth nothing."""
        self.block_pool.free_blocks(reversed(self.req_to_blocks.pop(request_id, ())))
        self.num_cached_block.pop(request_id, None)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back the blocks of tokens that no later token attends to; null blocks take their places."""
        skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        blocks = self.req_to_blocks.get(request_id)
        if skipped <= 0 or not blocks:
            return
        removed: list[KVCacheBlock] = []
        for index in range(min(skipped, len(blocks)) - 1, -1, -1):
            if blocks[index].is_null:  # so are all before it
                break
            removed.append(blocks[index])
            blocks[index] = self.block_pool.null_block
        self.block_pool.free_blocks(removed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token, at position `num_computed_tokens`, does not attend to."""
        return 0

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int],
        drop_eagle_block: bool = False,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        """The longest cached prefix that layers of this kind can go on from, for groups that share this spec.

        block_hashes: as the request has them. max_length: in tokens. drop_eagle_block: leave out the last block, which
        a speculating draft model has to compute itself. Returns one list of blocks a group, with null blocks where
        none is needed; the hit is as many tokens as they hold.
        """

    def hashes(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """A request's hashes, one a block of this group."""
        return hashes_for(block_hashes, self.block_pool.hash_block_size, self.block_size)

    def aligned(self, num_blocks: int) -> int:
        """The most blocks, up to `num_blocks`, that end at a multiple of the alignment."""
        return num_blocks * self.block_size // self.alignment_tokens * self.alignment_tokens // self.block_size


def count_idle(blocks: Iterable[KVCacheBlock]) -> int:
    """How many of these blocks are in the free queue."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)


def columns(rows: Sequence[Sequence[KVCacheBlock]], num_groups: int) -> tuple[list[KVCacheBlock], ...]:
    """From one row for each position to one list of blocks for each group."""
    return tuple([row[group] for row in rows] for group in range(num_groups))


def tail_mask(start: int, end: int, length: int, period: int, ends: Iterable[int]) -> list[bool] | None:
    """Marks, of the blocks [start, end), the last `length` of every `period` blocks (0: none) and before each end."""
    if 0 < period <= length:
        return None
    mask = [period > 0 and index % period >= period - length for index in range(start, end)]
    for last in ends:
        for index in range(max(start, last - length), min(end, last)):
            mask[index - start] = True
    return mask


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every block is kept, and a hit ends at the first block that is missing.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py FullAttentionManager.
    """

    drops_blocks = False

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int],
        drop_eagle_block: bool = False,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        hashes, rows = self.hashes(block_hashes), []
        for index in range(min(max_length // self.block_size, len(hashes))):
            found = self.block_pool.get_cached_block(hashes[index], group_ids)
            if found is None:
                break
            rows.append(found)
        return columns(rows[: self.aligned(max(0, len(rows) - drop_eagle_block))], len(group_ids))


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Blocks below the window are given back; a hit needs only the window's own blocks.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py SlidingWindowManager.
    Leaves out: extra_retained_tokens, by which speculation keeps more than the window.
    """

    def __init__(self, kv_cache_spec: SlidingWindowSpec, block_pool: BlockPool, group_id: int, **settings: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, group_id, **settings)
        self.sliding_window = kv_cache_spec.sliding_window
        # The token to be computed is in the window too, but needs no cached block.
        self._blocks_for_hit = cdiv(self.sliding_window - 1, self.block_size)

    @override
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int],
        drop_eagle_block: bool = False,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        hashes, dropped = self.hashes(block_hashes), int(drop_eagle_block)
        needed = self._blocks_for_hit + dropped
        most = min(max_length // self.block_size, len(hashes))
        rows = [[self.block_pool.null_block] * len(group_ids)] * most
        run = 0  # cached blocks side by side, seen from the right
        for index in range(most - 1, -1, -1):
            if run == 0 and (index + 1 - dropped) * self.block_size % self.alignment_tokens:
                continue  # a hit may not end here
            found = self.block_pool.get_cached_block(hashes[index], group_ids)
            run = 0 if found is None else run + 1
            if found is not None:
                rows[index] = found
                if run >= needed:
                    length = index + run
                    break
        else:
            length = self.aligned(run)  # no full window: what reaches back to the first token is a hit all the same
        return columns(rows[: self.aligned(max(0, length - dropped))], len(group_ids))

    @override
    def reachable_block_mask(self, start: int, end: int, boundaries: Iterable[int]) -> list[bool] | None:
        """The blocks of the windows before the places where a hit may end."""
        interval = self.retention_interval
        period = (self.alignment_tokens if interval is None else interval) // self.block_size
        ends = [] if interval is None else [self.aligned(tokens // self.block_size) for tokens in boundaries]
        return tail_mask(start, end, self._blocks_for_hit, period, ends)


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Blocks of earlier chunks are given back, and count as computed in a hit: nobody reads them.

    Mirrors: vllm/v1/core/single_type_kv_cache_manager.py ChunkedLocalAttentionManager.
    """

    def __init__(
        self, kv_cache_spec: ChunkedLocalAttentionSpec, block_pool: BlockPool, group_id: int, **settings: Any
    ) -> None:
        super().__init__(kv_cache_spec, block_pool, group_id, **settings)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    @override
    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - num_computed_tokens % self.attention_chunk_size

    @override
    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, group_ids: Sequence[int],
        drop_eagle_block: bool = False,
    ) -> tuple[list[KVCacheBlock], ...]:  # fmt: skip
        if drop_eagle_block:
            raise ValueError("chunked local attention cannot leave out a hit's last block for a draft model")
        hashes, first = self.hashes(block_hashes), self.get_num_skipped_tokens(max_length) // self.block_size
        rows = [[self.block_pool.null_block] * len(group_ids)] * first
        for index in range(first, min(max_length // self.block_size, len(hashes))):
            found = self.block_pool.get_cached_block(hashes[index], group_ids)
            if found is None:
                break
            rows.append(found)
        kept = self.aligned(len(rows))
        if kept * self.block_size < self.get_num_skipped_tokens(max_length):
            # Cut to whole blocks, it ends within an earlier chunk, of which the tokens before it are needed after all.
            return self.find_longest_cache_hit(block_hashes, kept * self.block_size, group_ids)
        return columns(rows[:kept], len(group_ids))
