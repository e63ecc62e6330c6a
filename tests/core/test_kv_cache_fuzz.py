"""Random operations on KV-cache managers of every layout, against a memory that knows what stands in each slot.

A slot of an attention block holds the prefix of its token, a Mamba block the prefix that its state stands for. Whatever
a request is about to read, by the rule of its group's kind, must be its own prefix: a block that was given back too
early, handed out twice or found by a stale hash shows at once. Blocks are emptied when they are handed out.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    cdiv,
)
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

MAX_MODEL_LEN, MOST_AT_ONCE = 64, 16
Prefix = tuple[int, ...]


def full(block_size: int = 4) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32")


def sliding(window: int, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=window)


def chunked(chunk: int, block_size: int = 4) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", attention_chunk_size=chunk
    )


def mamba(mode: Any, block_size: int = 4) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((8, 8),), dtypes=("float32",), mamba_cache_mode=mode)


LAYOUTS: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "sliding": [sliding(6)],
    "window_of_one": [sliding(1)],
    "chunked": [chunked(8)],
    "chunked_within_blocks": [chunked(11)],
    "mamba_none": [mamba("none", MAX_MODEL_LEN)],
    "mamba_all": [mamba("all")],
    "mamba_align": [mamba("align")],
    "full_sliding": [full(), sliding(9)],
    "two_windows": [sliding(5), sliding(13)],
    "windows_and_full": [sliding(7), full(), sliding(16), sliding(7)],
    "full_chunked": [chunked(8), full()],
    "full_chunked_within_blocks": [chunked(6), full()],
    "mixed_block_sizes": [full(8), sliding(5), chunked(16, 8)],
    "mamba_and_full": [mamba("align"), full()],
    "mamba_all_and_full": [full(), mamba("all")],
    "everything": [chunked(8), sliding(6, 8), mamba("align", 8), full(), sliding(6, 8)],
}


class Memory:
    """What stands in every block of every group, and what a request reads and writes in a step."""

    def __init__(self, specs: list[KVCacheSpec]) -> None:
        self.specs = specs
        self.slots: dict[tuple[int, int], Prefix] = {}  # (block, slot within it)

    def hand_out(self, block_ids: list[int]) -> None:
        for slot in [slot for slot in self.slots if slot[0] in block_ids]:
            del self.slots[slot]

    def read(self, tokens: Prefix, computed: int, tables: list[list[int]]) -> None:
        """All that the token at position `computed` attends to, before it, is in its place."""
        for spec, table in zip(self.specs, tables, strict=True):
            if isinstance(spec, MambaSpec):
                positions = range(max(0, computed - 1), computed)
            elif isinstance(spec, SlidingWindowSpec):
                positions = range(max(0, computed - spec.sliding_window + 1), computed)
            elif isinstance(spec, ChunkedLocalAttentionSpec):
                positions = range(computed - computed % spec.attention_chunk_size, computed)
            else:
                positions = range(computed)
            for position in positions:
                block, slot = table[position // spec.block_size], position % spec.block_size
                slot = 0 if isinstance(spec, MambaSpec) else slot
                assert block != 0, f"{spec.kind}: position {position} is read at {computed}, but was given back"
                assert self.slots.get((block, slot)) == tokens[: position + 1], f"{spec.kind}: stale at {position}"

    def write(self, tokens: Prefix, start: int, end: int, tables: list[list[int]]) -> None:
        for spec, table in zip(self.specs, tables, strict=True):
            size = spec.block_size
            assert len(table) == cdiv(end, size), "a table holds exactly the tokens it was asked to hold"
            for position in range(start, end):
                block, slot = table[position // size], position % size
                if isinstance(spec, MambaSpec):
                    # "all" writes a state wherever a block ends, the others only where the step ends.
                    ends_here = position + 1 == end or (spec.mamba_cache_mode == "all" and (position + 1) % size == 0)
                    if not ends_here:
                        continue
                    slot = 0
                assert block != 0, f"{spec.kind}: no slot for position {position}"
                self.slots[block, slot] = tokens[: position + 1]


class Simulation:
    def __init__(self, specs: list[KVCacheSpec], seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.specs = specs
        sizes = [spec.block_size for spec in specs]
        self.hits_at = math.lcm(*sizes)
        self.caching = rng.random() < 0.8
        retention = rng.choice([None, 0, 0, self.hits_at, 2 * self.hits_at])
        groups = tuple(KVCacheGroupSpec(layer_names=(f"{i}",), kv_cache_spec=s) for i, s in enumerate(specs))
        one_request = sum(cdiv(MAX_MODEL_LEN, size) for size in sizes)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=rng.randint(one_request, 2 * one_request) + 1, kv_cache_tensors=(), kv_cache_groups=groups
            ),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=self.hits_at,
            hash_block_size=math.gcd(*sizes),
            max_in_flight_tokens=MOST_AT_ONCE,
            enable_caching=self.caching,
            prefix_cache_retention_interval=retention,
        )
        self.hasher = make_block_hasher(math.gcd(*sizes))
        self.memory = Memory(specs)
        self.align_to = max([s.block_size for s in specs if isinstance(s, MambaSpec)], default=0)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_hits = self.num_refused = self.num_named = 0

    def step(self) -> None:
        rng = self.rng
        if not self.waiting or rng.random() < 0.1:
            self.num_named += 1
            prompt = [rng.randrange(2) if rng.random() < 0.1 else 1 for _ in range(rng.randint(1, 40))]
            self.waiting.append(Request(f"r{self.num_named}", prompt, SamplingParams(), block_hasher=self.hasher))
        draw = rng.random()
        if self.running and draw < 0.65:
            self.continue_one(rng.choice(self.running))
        elif self.running and draw < 0.8:
            request = rng.choice(self.running)
            self.running.remove(request)
            self.manager.free(request)
            if rng.random() < 0.5:  # preempted
                request.num_computed_tokens = 0
                self.waiting.append(request)
        elif not self.running and draw > 0.97:
            assert self.manager.reset_prefix_cache()
            assert all(block.block_hash is None for block in self.manager.block_pool.blocks)
        else:
            self.admit(rng.choice(self.waiting))
        self.manager.check_integrity()

    def chunk_end(self, start: int, end: int, num_tokens: int) -> int:
        """A Mamba state can only be cached where a step ends, so steps end on block borders."""
        size = self.align_to
        if not size or start // size == (end - 1) // size:
            return end
        if start % size:
            return (start // size + 1) * size
        return end if end == num_tokens else end // size * size

    def admit(self, request: Request) -> None:
        manager = self.manager
        manager.new_step_starts()
        before = manager.num_free_blocks
        hit, length, request.shared_prefix_boundary = manager.get_computed_blocks(request)
        assert manager.num_free_blocks == before, "a lookup changes nothing"
        assert length % self.hits_at == 0
        assert length < request.num_tokens
        tokens = tuple(request.all_token_ids)
        self.memory.read(tokens, length, [[block.block_id for block in blocks] for blocks in hit.blocks])
        end = self.chunk_end(
            length, min(request.num_tokens, length + self.rng.randint(1, MOST_AT_ONCE)), request.num_tokens
        )
        admission = self.rng.random() < 0.5
        new = manager.allocate_slots(request, end - length, length, hit, full_sequence_must_fit=admission)
        if new is None:
            self.num_refused += 1
            assert manager.num_free_blocks == before, "a refused request takes nothing"
            assert not any(manager.get_block_ids(request.request_id))
            return
        self.num_hits += length > 0 and any(not block.is_null for blocks in hit.blocks for block in blocks)
        self.waiting.remove(request)
        self.running.append(request)
        self.compute(request, new.blocks, length, end)

    def continue_one(self, request: Request) -> None:
        start = request.num_computed_tokens
        if start == request.num_tokens:
            if request.num_tokens == MAX_MODEL_LEN - 1:
                self.running.remove(request)
                self.manager.free(request)
                return
            request.append_output_token_ids(self.rng.randrange(2))
        end = self.chunk_end(
            start, min(request.num_tokens, start + self.rng.randint(1, MOST_AT_ONCE)), request.num_tokens
        )
        self.manager.new_step_starts()
        free = self.manager.num_free_blocks
        new = self.manager.allocate_slots(request, end - start)
        if new is None:
            self.num_refused += 1
            # It may have given back what left a window, but its table still covers what is computed.
            assert self.manager.num_free_blocks >= free
            self.memory.read(tuple(request.all_token_ids), start, self.tables(request))
            return
        self.compute(request, new.blocks, start, end)

    def tables(self, request: Request) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(request.request_id)]

    def compute(self, request: Request, new: tuple[list[Any], ...], start: int, end: int) -> None:
        tables = self.tables(request)
        for blocks, table in zip(new, tables, strict=True):
            ids = [block.block_id for block in blocks]
            assert table[len(table) - len(ids) :] == ids, "new blocks are the end of the table"
            self.memory.hand_out([block_id for block_id in ids if block_id != 0])
        tokens = tuple(request.all_token_ids)
        self.memory.read(tokens, start, tables)
        self.memory.write(tokens, start, end, tables)
        request.num_computed_tokens = end

    def finish(self) -> None:
        for request in self.running:
            self.manager.free(request)
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.manager.block_pool.num_gpu_blocks - 1
        assert self.manager.usage == 0.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_read_finds_its_own_prefix(layout: str) -> None:
    hits = refused = 0
    for seed in range(6):
        simulation = Simulation(LAYOUTS[layout], seed)
        for _ in range(150):
            simulation.step()
        simulation.finish()
        hits, refused = hits + simulation.num_hits, refused + simulation.num_refused
    # The sequences are such that the interesting things do happen.
    # (A window of one token reads no block, so vLLM caches none for it.)
    assert hits > 0 or layout in ("mamba_none", "window_of_one")
    assert refused > 0
