"""Splitting and reordering, beyond the golden cases: regions, few swaps, refusals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.attention.batch_split import (
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_prefill_chunks,
)


class Rows:
    """A batch of (scheduled, computed, prompt) rows."""

    def __init__(self, requests: list[tuple[int, int, int]]) -> None:
        self.req_ids = [str(i) for i in range(len(requests))]
        self.scheduled = {str(i): request[0] for i, request in enumerate(requests)}
        self.num_computed_tokens_cpu = np.array([r[1] for r in requests], dtype=np.int32)
        self.num_prompt_tokens = np.array([r[2] for r in requests], dtype=np.int32)
        self.num_swaps = 0

    def swap_states(self, i1: int, i2: int) -> None:
        assert i1 != i2
        self.num_swaps += 1
        self.req_ids[i1], self.req_ids[i2] = self.req_ids[i2], self.req_ids[i1]
        for values in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            values[[i1, i2]] = values[[i2, i1]]


def region(scheduled: int, computed: int, prompt: int, threshold: int) -> int:
    if computed == 0:
        return 3
    if scheduled > threshold:
        return 2
    return 1 if computed < prompt else 0


def common(query_lens: list[int]) -> SimpleNamespace:
    starts = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
    return SimpleNamespace(num_reqs=len(query_lens), num_actual_tokens=sum(query_lens), query_start_loc_cpu=starts)


request = st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(1, 9))


@given(st.lists(request, max_size=14), st.integers(1, 4))
def test_reordered_rows_run_through_the_regions(requests: list[tuple[int, int, int]], threshold: int) -> None:
    rows = Rows(requests)
    moved = reorder_batch_to_split_decodes_and_prefills(
        rows, SimpleNamespace(num_scheduled_tokens=rows.scheduled), threshold
    )
    order = [int(req_id) for req_id in rows.req_ids]
    regions = [region(*requests[i], threshold) for i in order]
    assert sorted(order) == list(range(len(requests)))
    assert regions == sorted(regions)
    assert moved == (rows.num_swaps > 0)
    assert rows.num_swaps < max(1, len(requests))
    # Once in order, always in order.
    assert not reorder_batch_to_split_decodes_and_prefills(
        rows, SimpleNamespace(num_scheduled_tokens=rows.scheduled), threshold
    )


def test_one_prompt_token_with_nothing_computed_is_no_decode() -> None:
    """vLLM #32118: taken for a decode, it read the state of the row's last owner."""
    rows = Rows([(1, 0, 1), (1, 3, 3)])
    assert reorder_batch_to_split_decodes_and_prefills(rows, SimpleNamespace(num_scheduled_tokens=rows.scheduled))
    assert rows.req_ids == ["1", "0"]
    assert split_decodes_and_prefills(
        common([1, 1]), treat_short_extends_as_decodes=False, is_prefilling=np.array([False, True])
    ) == (1, 1, 1, 1)


@given(st.lists(st.integers(0, 5), max_size=10), st.integers(1, 4), st.booleans())
def test_split_covers_the_batch(query_lens: list[int], threshold: int, uniform: bool) -> None:
    decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
        common(query_lens), threshold, require_uniform=uniform
    )
    assert decodes + prefills == len(query_lens)
    assert decode_tokens == sum(query_lens[:decodes])
    assert prefill_tokens == sum(query_lens[decodes:])
    assert all(length <= threshold for length in query_lens[:decodes])
    if not uniform and prefills:
        assert query_lens[decodes] > threshold


def test_a_uniform_batch_of_short_extends_is_no_decode_batch_where_they_count_as_prefills() -> None:
    """One length for all does not make decodes of requests that are still in their prompt."""
    flags = torch.tensor([False, True, True])
    options = {"require_uniform": True, "treat_short_extends_as_decodes": False}
    assert split_decodes_and_prefills(common([2, 2, 2]), 2, is_prefilling=flags, **options) == (1, 2, 2, 4)
    assert split_decodes_and_prefills(common([2, 2, 2]), 2, require_uniform=True) == (3, 0, 6, 0)


@pytest.mark.parametrize("flags", [None, np.array([True])])
def test_short_extends_need_their_flags(flags: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="is_prefilling with one flag for each of 2 requests"):
        split_decodes_and_prefills(common([1, 1]), treat_short_extends_as_decodes=False, is_prefilling=flags)


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(20, 40), st.integers(0, 5))
def test_chunks_pack_greedily(seq_lens: list[int], workspace: int, offset: int) -> None:
    chunks = split_prefill_chunks(seq_lens, workspace, offset)
    assert [i for start, end in chunks for i in range(start, end)] == list(range(offset, offset + len(seq_lens)))
    totals = [sum(seq_lens[start - offset : end - offset]) for start, end in chunks]
    assert all(total <= workspace for total in totals)
    firsts = [seq_lens[start - offset] for start, _ in chunks]
    assert all(total + first > workspace for total, first in zip(totals, firsts[1:], strict=False))


def test_a_request_longer_than_the_workspace_is_refused() -> None:
    """vLLM would loop for ever on it without its assertion."""
    with pytest.raises(ValueError, match="request 4 has 9 tokens, the workspace holds 8"):
        split_prefill_chunks(torch.tensor([3, 9]), 8, request_offset=3)
