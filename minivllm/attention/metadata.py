"""What a step's batch looks like to attention, before any backend has shaped it to its needs.

The runner makes one per KV-cache group, and every metadata builder of the group reads it. Tensors only; nothing of a
model or a request. Mirrors CommonAttentionMetadata of vllm/v1/attention/backend.py (0.32.0).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class CommonAttentionMetadata:
    """The batch of one step: who has how many tokens, where their pages are, and where new tokens go.

    Requests lie one after another in the token dimension: request r owns tokens
    query_start_loc[r] : query_start_loc[r + 1], the last of its seq_lens[r] tokens. The `_cpu` twins hold the same
    values on the host, so that builders never wait for the device. causal=False lets every query see its request's
    whole sequence. Rows and tokens past num_reqs and num_actual_tokens are padding.

    Mirrors: vllm/v1/attention/backend.py CommonAttentionMetadata.
    Leaves out: encoder lengths, context parallelism, logits indices, asynchronous upper bounds.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32
    query_start_loc_cpu: Tensor  # [num_reqs + 1] int32, host
    seq_lens: Tensor  # [num_reqs] int32, computed and new tokens together
    seq_lens_cpu: Tensor  # [num_reqs] int32, host
    num_computed_tokens_cpu: Tensor  # [num_reqs] int32, host
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor  # [num_reqs, max_blocks] int32; entries past a request's blocks are stale
    slot_mapping: Tensor  # [num_tokens] int64, -1 = no slot
    causal: bool = True
