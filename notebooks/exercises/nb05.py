"""Exercises of notebook 05, attention metadata builders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from minivllm.attention.backend import AttentionMetadataBuilder
from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.check.exercise import Inputs, exercise
from minivllm.config import ModelConfig, VllmConfig
from minivllm.core.kv_cache_interface import FullAttentionSpec


def build_page_lists(
    self,
    common_prefix_len,
    common_attn_metadata,
    fast_build=False,
):
    """The pages of each request, laid end to end: int32 tensors in a dict.

    paged_kv_indices: block ids of request 0, of request 1, ..., live ones only.
    paged_kv_indptr: [num_reqs + 1], where each request's ids begin, and the end.
    paged_kv_last_page_len: [num_reqs], tokens in the last page, 1 to block_size.
    """
    block_size = self.kv_cache_spec.block_size
    seq_lens = common_attn_metadata.seq_lens_cpu.tolist()
    table = common_attn_metadata.block_table_tensor.tolist()
    indices, indptr = [], [0]
    for blocks, seq_len in zip(table, seq_lens, strict=True):
        indices += blocks[: -(-seq_len // block_size)]
        indptr.append(len(indices))
    lists = {
        "paged_kv_indices": indices,
        "paged_kv_indptr": indptr,
        "paged_kv_last_page_len": [(n - 1) % block_size + 1 for n in seq_lens],
    }
    return {name: torch.tensor(v, dtype=torch.int32) for name, v in lists.items()}


def split_batch(
    query_start_loc: list[int],
    decode_threshold: int,
) -> tuple[int, int, int, int]:
    """(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens).

    query_start_loc: [num_reqs + 1]. Decodes are the leading requests of at most
    decode_threshold tokens; from the first other request on, all are prefills.
    """
    num_reqs, num_tokens = len(query_start_loc) - 1, query_start_loc[-1]
    num_decodes = 0
    while (
        num_decodes < num_reqs
        and query_start_loc[num_decodes + 1] - query_start_loc[num_decodes]
        <= decode_threshold
    ):
        num_decodes += 1
    decode_tokens = query_start_loc[num_decodes]
    return (
        num_decodes,
        num_reqs - num_decodes,
        decode_tokens,
        num_tokens - decode_tokens,
    )


def _observe_build(answer: Callable[..., Any], given: Inputs) -> Any:
    """The answer becomes the build() of a real builder, whose signature is checked, and is called as a runner does."""
    builder_cls = type("YourBuilder", (AttentionMetadataBuilder,), {"build": answer})
    spec = FullAttentionSpec(
        block_size=given["block_size"], num_kv_heads=1, head_size=8, dtype="float32"
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model="toy", hf_config=None, dtype="float32", max_model_len=64
        )
    )
    starts = torch.tensor(
        [0, *itertools.accumulate(given["query_lens"])], dtype=torch.int32
    )
    seq_lens = torch.tensor(given["seq_lens"], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=seq_lens - starts.diff(),
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(given["query_lens"]),
        max_seq_len=max(given["seq_lens"]),
        block_table_tensor=torch.tensor(given["block_table"], dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )
    builder = builder_cls(spec, ["layers.0"], config, torch.device("cpu"))
    return builder.build(common_prefix_len=0, common_attn_metadata=common)


@exercise("ex05", build_page_lists, _observe_build)
def _steps(rng: random.Random, i: int) -> Inputs:
    """Steps of one to four requests; rows of the table are filled up with stale ids.

    Hint: A request of n tokens owns the first -(-n // block_size) entries of its row of block_table_tensor.

    Hint: Append these ids to one list; after each request append the length of the list so far to paged_kv_indptr.

    Hint: The last page holds (n - 1) % block_size + 1 tokens: block_size where n is a multiple of it, never 0.

    Hint: Return a dict of torch.tensor(..., dtype=torch.int32). seq_lens_cpu holds the n; its tolist() gives integers.
    """
    block_size = 4 if i < 5 else rng.choice([1, 2, 4, 16])
    seq_lens = [rng.randint(1, 3 * block_size) for _ in range(1 + i % 4)]
    if i % 3 == 1:
        seq_lens[0] = block_size * rng.randint(1, 3)  # a full last page
    ids = rng.sample(range(1, 40), 4 * len(seq_lens))
    return {
        "query_lens": [rng.randint(1, length) for length in seq_lens],
        "seq_lens": seq_lens,
        "block_table": [ids[4 * row : 4 * row + 4] for row, _ in enumerate(seq_lens)],
        "block_size": block_size,
    }


def _why_split(given: Inputs, got: Any, want: Any) -> str:
    starts = given["query_start_loc"]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    return (
        f"The requests have {lengths} tokens; the first {want[0]} of them are decodes."
    )


@exercise("ex05_2", split_batch, why=_why_split)
def _batches(rng: random.Random, i: int) -> Inputs:
    """Batches with long requests at the end, now and then in between.

    Hint: Request r has query_start_loc[r + 1] - query_start_loc[r] tokens.

    Hint: Go on from request 0 while that is at most decode_threshold, then stop: what comes later does not count.

    Hint: The tokens of the first n requests are query_start_loc[n].
    """
    threshold = 1 if i < 8 else rng.randint(1, 4)
    short = [rng.randint(1, threshold) for _ in range(rng.randint(0, 3))]
    long = [rng.randint(threshold + 1, 9) for _ in range(rng.randint(0, 2))]
    lengths = short + long
    if i % 3 == 2 or not lengths:  # not in order: a decode behind a prefill
        lengths += [threshold + 2, 1]
    return {
        "query_start_loc": [0, *itertools.accumulate(lengths)],
        "decode_threshold": threshold,
    }
