"""Every block of the KV cache: who uses it, what it holds, which one is handed out next.

A block is free when no request refers to it. A free block that carries a hash is still good for a prefix-cache hit
until it is handed out again; so blocks without a hash wait at the front of the queue and hashed ones at its end, the
tail of a sequence before its head, because a prefix is worth more than what follows it.

Mirrors vllm/v1/core/block_pool.py and FreeKVCacheBlockQueue of kv_cache_utils.py (0.32.0). Left out: KV events,
metrics, partly filled blocks in the prefix cache. No torch: blocks are numbers here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm.core.block_hash import BlockHash
from minivllm.core.kv_cache_interface import BlockId

CacheKey = tuple[BlockHash, int]  # a block's hash and the id of its KV-cache group


class KVCacheBlock:
    """One block. ref_cnt: requests that refer to it. block_hash: what it can be found by, None if it cannot.

    Mirrors: vllm/v1/core/kv_cache_utils.py KVCacheBlock.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: CacheKey | None = None
        self.is_null = False
        # Its neighbours in the free queue; itself while it is not in there.
        self.prev_free_block = self.next_free_block = self

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else ", cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they are handed out: a doubly linked list through the blocks themselves.

    A deque would not do: a prefix-cache hit takes a block out of the middle.

    Mirrors: vllm/v1/core/kv_cache_utils.py FreeKVCacheBlockQueue.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        # A sentinel before the head and after the tail, so that no end is a special case.
        self._ends = KVCacheBlock(BlockId(-1))
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are asked for, but only {self.num_free_blocks} are free")
        taken: list[KVCacheBlock] = []
        block = self._ends.next_free_block
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = block
            block = following
        self._ends.next_free_block, block.prev_free_block = block, self._ends
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.prev_free_block, block.next_free_block
        if before is block:
            raise RuntimeError(f"{block} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = block
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the end, in their order."""
        self._insert_after(self._ends.prev_free_block, blocks)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the front: the first of them is handed out next."""
        self._insert_after(self._ends, blocks)

    def _insert_after(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> None:
        after = before.next_free_block
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks in order. RuntimeError where links or count are wrong, so it never walks for ever."""
        found: list[KVCacheBlock] = []
        before, block = self._ends, self._ends.next_free_block
        while block is not self._ends and block.prev_free_block is before and len(found) < self.num_free_blocks:
            found.append(block)
            before, block = block, block.next_free_block
        if (block, block.prev_free_block, len(found)) != (self._ends, before, self.num_free_blocks):
            raise RuntimeError(
                f"the free queue of {self.num_free_blocks} blocks is broken after {len(found)}: {before} -> {block}"
            )
        return found


class BlockPool:
    """All blocks, the free queue, and the map from hashes to the blocks that hold them.

    Block 0 is the null block: it stands in tables where a block has left its window, is never free and never written
    for anybody. Several blocks may hold one hash; a lookup gives the oldest.

    Mirrors: vllm/v1/core/block_pool.py BlockPool.
    Leaves out: KV events, metrics, partial blocks.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        if num_gpu_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, got num_gpu_blocks={num_gpu_blocks}")
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(BlockId(index)) for index in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self._cached: dict[CacheKey, list[KVCacheBlock]] = {}  # oldest first, never empty

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """The part of all blocks in use, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def get_cached_block(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """The oldest block with this hash in each of the groups; None unless all have one."""
        found: list[KVCacheBlock] = []
        for group_id in group_ids:
            holders = self._cached.get((block_hash, group_id))
            if holders is None:
                return None
            found.append(holders[0])
        return found

    def cache_block(self, block: KVCacheBlock, block_hash: BlockHash, group_id: int) -> None:
        """Let a full block be found by its hash."""
        if block.is_null or block.block_hash is not None:
            raise RuntimeError(f"{block} cannot be given a hash: it is the null block or has one")
        block.block_hash = key = (block_hash, group_id)
        self._cached.setdefault(key, []).append(block)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks; what they held can no longer be found."""
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more request refers to these blocks."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One request less refers to these blocks; those that nobody needs are free, the first to go again first."""
        uncached: list[KVCacheBlock] = []
        cached: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                if block.block_hash is None:
                    uncached.append(block)
                else:
                    cached.append(block)
            elif block.ref_cnt > 1:
                block.ref_cnt -= 1
            elif not block.is_null:
                raise RuntimeError(f"{block} is freed more often than it was handed out")
        self.free_block_queue.prepend_n(uncached)
        self.free_block_queue.append_n(cached)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and nothing done, while a block is in use."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Let these blocks no longer be found; they keep their places, in use or in the free queue."""
        for block_id in block_ids:
            if self.blocks[block_id].block_hash is not None:
                self._evict(self.blocks[block_id])

    def _evict(self, block: KVCacheBlock) -> None:
        key = block.block_hash
        assert key is not None
        holders = self._cached[key]
        holders.remove(block)
        if not holders:
            del self._cached[key]
        block.block_hash = None

    def check_integrity(self) -> None:
        """Raise RuntimeError naming what does not agree: queue, counts, hashes."""
        free = {block.block_id for block in self.free_block_queue.get_all_free_blocks()}
        idle = {block.block_id for block in self.blocks if block.ref_cnt == 0 and not block.is_null}
        if idle != free:
            raise RuntimeError(f"blocks in use in the free queue, or lost from it: {sorted(idle ^ free)}")
        if self.null_block.ref_cnt or self.null_block.block_hash is not None:
            raise RuntimeError(f"the null block is owned or cached: {self.null_block}")
        listed = sorted((block.block_id, key) for key, holders in self._cached.items() for block in holders)
        carried = [(block.block_id, block.block_hash) for block in self.blocks if block.block_hash is not None]
        if listed != carried:
            raise RuntimeError(f"hashes in the map and on the blocks differ: {set(listed) ^ set(carried)}")
