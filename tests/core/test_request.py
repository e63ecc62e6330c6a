"""Requests: what they count, what they keep to themselves, how they end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from minivllm.core.block_hash import BlockHash
from minivllm.request import Request, RequestStatus
from minivllm.sampling.params import SamplingParams


def test_tokens_are_counted_as_they_come() -> None:
    request = Request("a", [5, 6, 7], SamplingParams())
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    request.append_output_token_ids(8)
    request.append_output_token_ids([9, 10])
    assert list(request.all_token_ids) == [5, 6, 7, 8, 9, 10]
    assert list(request.output_token_ids) == [8, 9, 10]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 6, 3)
    assert request.prompt_token_ids == [5, 6, 7]


def test_the_callers_list_stays_the_callers() -> None:
    prompt = [5, 6, 7]
    request = Request("a", prompt, SamplingParams())
    prompt.append(1)
    request.append_output_token_ids(8)
    assert request.prompt_token_ids == [5, 6, 7]
    assert prompt == [5, 6, 7, 1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has an empty prompt"):
        Request("a", [], SamplingParams())


def test_the_hasher_is_asked_whenever_tokens_come() -> None:
    def hasher(request: Request) -> list[BlockHash]:
        known, full = len(request.block_hashes), request.num_tokens // 2
        return [BlockHash(bytes([index])) for index in range(known, full)]

    request = Request("a", [5, 6, 7], SamplingParams(), block_hasher=hasher)
    assert request.block_hashes == [b"\0"]
    request.append_output_token_ids(8)
    assert request.block_hashes == [b"\0", b"\1"]
    request.append_output_token_ids([9])
    assert request.block_hashes == [b"\0", b"\1"]
    request.append_output_token_ids([10, 11, 12, 13])
    assert request.block_hashes == [b"\0", b"\1", b"\2", b"\3"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.WAITING, None),
        (RequestStatus.RUNNING, None),
        (RequestStatus.PREEMPTED, None),
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH_CAPPED, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ],
)
def test_ends(status: RequestStatus, reason: str | None) -> None:
    request = Request("a", [5], SamplingParams())
    request.status = status
    assert request.is_finished() is status.is_finished is (reason is not None)
    assert request.get_finished_reason() == reason


def test_every_status_is_covered() -> None:
    assert len(RequestStatus) == 7


def test_requests_are_told_apart_by_identity() -> None:
    first, second = (Request("a", [5], SamplingParams()) for _ in range(2))
    assert first != second
    assert len({first, second, first}) == 2
    assert "'a', WAITING, 0 of 1 tokens computed" in repr(first)


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="salt"):
        Request("a", [5], SamplingParams(), **cast(dict[str, Any], {"salt": "x"}))
