"""local_attention.json: every field of the virtual batches of chunked local attention."""

from typing import Any

import pytest
import torch
from golden_cases import cases

from minivllm.attention.local_attention import make_local_attention_virtual_batches
from minivllm.attention.metadata import CommonAttentionMetadata

INPUT = {"id", "attn_chunk_size", "block_size", "query_lens", "seq_lens", "block_table"}
OUTPUT = {
    "virtual_query_start_loc",
    "virtual_seq_lens",
    "virtual_block_table",
    "num_virtual_reqs",
    "max_query_len",
    "max_seq_len",
    "num_actual_tokens",
}


@pytest.mark.parametrize("case", cases("local_attention"))
def test_local_attention(case: dict[str, Any]) -> None:
    assert set(case) == INPUT | OUTPUT
    query_lens = torch.tensor(case["query_lens"], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0, dtype=torch.int32)))
    seq_lens = torch.tensor(case["seq_lens"], dtype=torch.int32)
    slots = torch.arange(int(starts[-1]))
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=seq_lens - query_lens,
        num_reqs=len(query_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.tensor(case["block_table"], dtype=torch.int32),
        slot_mapping=slots,
    )
    made = make_local_attention_virtual_batches(case["attn_chunk_size"], common, case["block_size"])
    assert made.query_start_loc.tolist() == made.query_start_loc_cpu.tolist() == case["virtual_query_start_loc"]
    assert made.seq_lens.tolist() == made.seq_lens_cpu.tolist() == case["virtual_seq_lens"]
    assert made.block_table_tensor.tolist() == case["virtual_block_table"]
    for field in ("max_query_len", "max_seq_len", "num_actual_tokens"):
        assert getattr(made, field) == case[field], field
    assert made.num_reqs == case["num_virtual_reqs"]
    assert made.causal
    assert made.slot_mapping is slots
    dtypes = {made.query_start_loc.dtype, made.seq_lens.dtype, made.block_table_tensor.dtype}
    assert dtypes == {torch.int32}
    virtual_query_lens = made.query_start_loc_cpu.diff()
    assert torch.equal(made.num_computed_tokens_cpu, made.seq_lens_cpu - virtual_query_lens)
