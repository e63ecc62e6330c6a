"""Chunked local attention for a backend that only knows causal attention: each chunk becomes a request of its own.

    chunk 8       positions 3 .. 17 of one request            three virtual requests
                  [. . . 3 4 5 6 7|8 .. 15|16 17]        ─►   queries 5, 8, 2    keys 8, 8, 2

A backend that masks chunks itself (TORCH) has no need of it. Mirrors parts of vllm/v1/attention/backends/utils.py
(0.32.0). Left out: the function that makes the virtual table alone, for update_block_table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from minivllm.attention.metadata import CommonAttentionMetadata


def make_local_attention_virtual_batches(
    attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int
) -> CommonAttentionMetadata:
    """Cut each request at multiples of attn_chunk_size; plain causal attention over the result is chunked attention.

    A virtual request's keys are the tokens of its chunk so far, its block table begins at the chunk's first block.
    Tokens stay where they are, so `slot_mapping` is the same. attn_chunk_size: a multiple of block_size.

    Mirrors: vllm/v1/attention/backends/utils.py make_local_attention_virtual_batches.
    """
    common, chunk = common_attn_metadata, attn_chunk_size
    if chunk < 1 or block_size < 1 or chunk % block_size:
        raise ValueError(
            f"attn_chunk_size={chunk} must be a multiple of block_size={block_size}: a chunk has to begin with a block"
        )
    ends = common.seq_lens_cpu[: common.num_reqs].numpy().astype(np.int64)
    begins = ends - np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
    last = np.maximum(ends - 1, 0) // chunk
    first = np.minimum(begins // chunk, last)  # a request without queries still has a row
    counts = last - first + 1
    rows = np.repeat(np.arange(common.num_reqs), counts)
    # The k-th virtual request of a row is chunk first + k.
    chunks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    origins = chunks * chunk
    keys = np.minimum(ends[rows] - origins, chunk)
    computed = np.maximum(begins[rows] - origins, 0)
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    starts.numpy()[1:] = np.cumsum(keys - computed)
    # Past the table's end nothing is read, but the index must be one that exists.
    columns = (origins // block_size)[:, None] + np.arange(chunk // block_size)
    columns = np.minimum(columns, common.block_table_tensor.shape[1] - 1)
    device = common.block_table_tensor.device
    seq_lens = torch.from_numpy(keys.astype(np.int32))
    return replace(
        common,
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=torch.from_numpy(computed.astype(np.int32)),
        num_reqs=len(rows),
        max_query_len=int((keys - computed).max(initial=0)),
        max_seq_len=int(keys.max(initial=0)),
        block_table_tensor=common.block_table_tensor[
            torch.from_numpy(rows)[:, None].to(device), torch.from_numpy(columns).to(device)
        ],
        causal=True,
    )
