"""Where decodes end and prefills begin: kernels differ for the two, so a batch is ordered and then cut once.

The order is decode, short extend, long extend, prefill (see `reorder_batch_to_split_decodes_and_prefills`). A request
with nothing computed is a prefill even at one token: state-space layers must not read an old state (vLLM #32118).

Mirrors parts of vllm/v1/attention/backends/utils.py (0.32.0). Left out: split_decodes_prefills_and_extends and what
serves speculative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:  # only names: attention imports nothing of the scheduler or the worker
    from minivllm.attention.metadata import CommonAttentionMetadata
    from minivllm.core.scheduler_output import SchedulerOutput
    from minivllm.worker.input_batch import InputBatch


def split_decodes_and_prefills(
    common_attn_metadata: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling: npt.NDArray[np.bool_] | Tensor | None = None,  # [num_reqs], True while in the prompt
) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens) of a batch that is in order.

    Decodes are the leading requests of at most decode_threshold tokens; from the first other request on, all count
    as prefills. require_uniform: decodes must have the first request's length, so that a graph of that length serves
    them; rows of length 0 (padding) do not spoil a batch that is uniform otherwise. With
    treat_short_extends_as_decodes=False a short piece of a prompt is a prefill, and is_prefilling must tell which.
    """
    num_reqs, num_tokens = common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens
    starts = common_attn_metadata.query_start_loc_cpu[: num_reqs + 1].numpy()
    lengths = np.diff(starts)
    all_decodes = (num_reqs, 0, num_tokens, 0)
    if num_reqs == 0:
        return all_decodes
    if lengths[0] > decode_threshold:
        return 0, num_reqs, 0, num_tokens
    ends = lengths != lengths[0] if require_uniform else lengths > decode_threshold  # requests that are no decode
    if treat_short_extends_as_decodes:
        one_length_or_padding = not lengths[ends].any()
        if require_uniform and (one_length_or_padding or lengths.max() <= decode_threshold <= 1):
            return all_decodes
    else:
        flags = np.zeros(0, dtype=bool) if is_prefilling is None else np.asarray(is_prefilling, dtype=bool)
        if len(flags) != num_reqs:
            raise ValueError(
                f"treat_short_extends_as_decodes=False needs is_prefilling with one flag for each of {num_reqs}"
                f" requests, got {is_prefilling}"
            )
        ends = ends | flags
    if not ends.any():
        return all_decodes
    num_decodes = int(np.argmax(ends))
    num_decode_tokens = int(starts[num_decodes])
    return num_decodes, num_reqs - num_decodes, num_decode_tokens, num_tokens - num_decode_tokens


def reorder_batch_to_split_decodes_and_prefills(
    input_batch: InputBatch, scheduler_output: SchedulerOutput, decode_threshold: int = 1
) -> bool:
    """Swap rows until the batch runs decode, short extend, long extend, prefill; True if any row moved.

    With tokens computed: decode (prompt done, at most decode_threshold tokens), short extend (prompt not done, at
    most decode_threshold), long extend (more tokens). With none computed: prefill. Rows already in their region stay;
    the others are brought home along the cycles of one permutation, so swaps are few and the order is not stable.
    """
    req_ids = input_batch.req_ids
    scheduled = np.array([scheduler_output.num_scheduled_tokens[req_id] for req_id in req_ids])
    computed = input_batch.num_computed_tokens_cpu[: len(req_ids)]
    prompt = input_batch.num_prompt_tokens[: len(req_ids)]
    region = np.where(computed < prompt, 1, 0)
    region[scheduled > decode_threshold] = 2
    region[computed == 0] = 3

    homeless = np.flatnonzero(region != np.sort(region))
    order = np.argsort(region[homeless], kind="stable")
    target_of = dict(zip(homeless[order].tolist(), homeless.tolist(), strict=True))
    for row in target_of:
        target = target_of[row]
        while target != row:
            input_batch.swap_states(row, target)
            target_of[target], target = target, target_of[target]
    return len(homeless) > 0


def split_prefill_chunks(
    seq_lens_cpu: Tensor | Sequence[int], workspace_size: int, request_offset: int = 0
) -> list[tuple[int, int]]:
    """Pack consecutive requests into chunks of at most workspace_size tokens: [start, end) ranges of requests.

    seq_lens_cpu: [num_prefills] int32. request_offset is added to every bound.
    """
    lengths: list[int] = seq_lens_cpu.tolist() if isinstance(seq_lens_cpu, Tensor) else list(seq_lens_cpu)
    bounds, total = [0], 0
    for request, length in enumerate(lengths):
        if length > workspace_size:
            raise ValueError(
                f"request {request + request_offset} has {length} tokens, the workspace holds {workspace_size}:"
                " a chunk cannot split a request, so make the workspace at least as long as the longest one"
            )
        if total + length > workspace_size:
            bounds.append(request)
            total = 0
        total += length
    if lengths:
        bounds.append(len(lengths))
    return [(start + request_offset, end + request_offset) for start, end in pairwise(bounds)]
