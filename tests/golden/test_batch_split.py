"""batch_split.json: splits, swaps, orders and prefill chunks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import cases

from minivllm.attention.batch_split import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_prefill_chunks,
)
from minivllm.sampling.params import SamplingParams
from minivllm.worker.input_batch import CachedRequestState, InputBatch


class RecordingBatch(InputBatch):
    """An InputBatch that notes its swaps."""

    swaps: list[list[int]]

    def swap_states(self, i1: int, i2: int) -> None:
        self.swaps.append([i1, i2])
        super().swap_states(i1, i2)


def run_split(case: dict[str, Any]) -> None:
    fields = {
        "id",
        "fn",
        "query_lens",
        "decode_threshold",
        "require_uniform",
        "treat_short_extends_as_decodes",
        "result",
    }
    assert set(case) - {"is_prefilling"} == fields
    starts = torch.tensor([0, *np.cumsum(case["query_lens"]).tolist()], dtype=torch.int32)
    common = SimpleNamespace(
        num_reqs=len(case["query_lens"]), num_actual_tokens=sum(case["query_lens"]), query_start_loc_cpu=starts
    )
    options: dict[str, Any] = {}
    if "is_prefilling" in case:
        options["is_prefilling"] = torch.tensor(case["is_prefilling"])
    result = split_decodes_and_prefills(
        common,
        decode_threshold=case["decode_threshold"],
        require_uniform=case["require_uniform"],
        treat_short_extends_as_decodes=case["treat_short_extends_as_decodes"],
        **options,
    )
    assert list(result) == case["result"]


def run_reorder(case: dict[str, Any]) -> None:
    assert set(case) == {"id", "fn", "decode_threshold", "requests", "modified", "order", "swaps"}
    longest = max(max(computed + scheduled, prompt) for scheduled, computed, prompt in case["requests"])
    batch = RecordingBatch(len(case["requests"]), longest, 64, "cpu", 50, [4])
    batch.swaps = []
    for index, (_, computed, prompt) in enumerate(case["requests"]):
        batch.add_request(
            CachedRequestState(
                req_id=str(index),
                prompt_token_ids=[index] * prompt,
                sampling_params=SamplingParams(),
                block_ids=([index + 1],),
                num_computed_tokens=computed,
                output_token_ids=[index] * max(0, computed - prompt),
            )
        )
    scheduled = {str(index): request[0] for index, request in enumerate(case["requests"])}
    modified = reorder_batch_to_split_decodes_and_prefills(
        batch, SimpleNamespace(num_scheduled_tokens=scheduled), case["decode_threshold"]
    )
    assert modified is case["modified"]
    assert [int(req_id) for req_id in batch.req_ids] == case["order"]
    assert batch.swaps == case["swaps"]
    batch.check_integrity()


def run_chunks(case: dict[str, Any]) -> None:
    assert set(case) == {"id", "fn", "seq_lens", "workspace_size", "request_offset", "result"}
    lengths = torch.tensor(case["seq_lens"], dtype=torch.int32)
    result = split_prefill_chunks(lengths, case["workspace_size"], case["request_offset"])
    assert [list(bounds) for bounds in result] == case["result"]


@pytest.mark.parametrize("case", cases("batch_split"))
def test_batch_split(case: dict[str, Any]) -> None:
    runs = {
        "split_decodes_and_prefills": run_split,
        "reorder_batch_to_split_decodes_and_prefills": run_reorder,
        "split_prefill_chunks": run_chunks,
    }
    if case["fn"] not in runs:
        raise NotImplementedError(f"batch_split function {case['fn']!r} is not known")
    runs[case["fn"]](case)
