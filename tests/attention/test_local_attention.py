"""Chunked local attention through virtual batches is the TORCH backend's own chunked attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention.local_attention import make_local_attention_virtual_batches
from minivllm.attention.metadata import CommonAttentionMetadata
from tests.attention.paged_case import PagedBatch, make_config, make_layer


def run_as_virtual_batches(batch: PagedBatch, chunk: int, block_size: int) -> tuple[CommonAttentionMetadata, object]:
    """The batch's step through a layer that knows nothing of chunks."""
    common = make_local_attention_virtual_batches(chunk, batch.common, block_size)
    plain = make_layer(batch.config)
    twin = PagedBatch(plain, batch.config, batch.requests, seed=batch.seed)
    # Queries of one request lie in order, chunk after chunk: the same tokens, other borders between requests.
    metadata = twin.builder().build(common_prefix_len=0, common_attn_metadata=common)
    return common, twin.run(metadata)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 2, 4]),
    blocks_per_chunk=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_virtual_batches_equal_direct_chunks(requests, block_size, blocks_per_chunk, seed) -> None:
    chunk = block_size * blocks_per_chunk
    config = make_config(block_size=block_size)
    batch = PagedBatch(make_layer(config, attention_chunk_size=chunk), config, requests, seed=seed)
    common, through_virtual = run_as_virtual_batches(batch, chunk, block_size)
    direct = batch.run()
    torch.testing.assert_close(through_virtual, direct, rtol=1e-5, atol=1e-5)
    assert int(common.query_start_loc_cpu[-1]) == common.num_actual_tokens == batch.num_tokens
    assert common.max_seq_len <= chunk


def test_against_the_definition_with_released_chunks() -> None:
    """Blocks of earlier chunks are null in the table, as the manager leaves them; NaN there must not matter."""
    config = make_config(block_size=2)
    batch = PagedBatch(make_layer(config, attention_chunk_size=6), config, [(13, 7), (6, 1), (0, 7)], seed=3)
    for row, (computed, _) in enumerate(batch.requests):
        released = computed // 6 * 3
        batch.table[row, :released] = 0
    batch.cache[0] = torch.nan
    common, out = run_as_virtual_batches(batch, 6, 2)
    # run_as_virtual_batches deals out the same pages (same seed); only the common metadata has the nulls.
    torch.testing.assert_close(out.double(), batch.expected(), rtol=1e-5, atol=1e-5)
    assert common.num_reqs == 2 + 1 + 2


def test_a_request_without_queries_keeps_a_row() -> None:
    """Rows of length 0 are padding: they add no query and shift nobody."""
    config = make_config(block_size=2)
    batch = PagedBatch(make_layer(config), config, [(5, 3), (8, 0), (0, 1)], seed=1)
    common = make_local_attention_virtual_batches(4, batch.common, 2)
    assert common.query_start_loc_cpu.diff().tolist() == [3, 0, 1]
    assert common.seq_lens_cpu.tolist() == [4, 4, 1]


@pytest.mark.parametrize(("chunk", "block_size"), [(6, 4), (0, 2), (2, 4)])
def test_a_chunk_must_begin_with_a_block(chunk: int, block_size: int) -> None:
    config = make_config(block_size=2)
    batch = PagedBatch(make_layer(config), config, [(0, 3)])
    with pytest.raises(ValueError, match=rf"attn_chunk_size={chunk}.*block_size={block_size}"):
        make_local_attention_virtual_batches(chunk, batch.common, block_size)
