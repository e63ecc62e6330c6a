"""block_hash.json: requests in, which of their full blocks vLLM 0.32.0 gave equal hashes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from golden_cases import cases

from minivllm.core.block_hash import BlockHash, hashes_for, make_block_hasher
from minivllm.request import LoRARequest, MultiModalFeature, Request
from minivllm.sampling.params import SamplingParams

KINDS = {
    "shared_prefix", "cache_salt", "lora", "mm_identifier", "mm_offset", "mm_two_items", "combined", "output_tokens",
    "coarser_group_block", "repeated_content",
}  # fmt: skip


def make_request(given: dict[str, Any], block_size: int) -> Request:
    given = dict(given)
    prompt, output = given.pop("prompt"), given.pop("output", [])
    lora = given.pop("lora", None)
    request = Request(
        "r",
        prompt,
        SamplingParams(),
        cache_salt=given.pop("cache_salt", None),
        lora_request=None if lora is None else LoRARequest(*lora),
        mm_features=[MultiModalFeature(*feature) for feature in given.pop("mm", [])],
        block_hasher=make_block_hasher(block_size),
    )
    assert not given, f"unread fields {set(given)}"
    for token in output:  # one by one, as they are sampled
        request.append_output_token_ids(token)
    return request


def classes(requests: Iterable[Iterable[BlockHash]], numbers: dict[BlockHash, int]) -> list[list[int]]:
    """Hashes as numbers, in the order in which they first appear."""
    return [[numbers.setdefault(block_hash, len(numbers)) for block_hash in hashes] for hashes in requests]


@pytest.mark.parametrize("case", cases("block_hash"))
def test_block_hash(case: dict[str, Any]) -> None:
    assert case["kind"] in KINDS
    fields = {"id", "kind", "block_size", "requests", "classes"}
    hashes = [make_request(given, case["block_size"]).block_hashes for given in case["requests"]]
    numbers: dict[BlockHash, int] = {}
    assert classes(hashes, numbers) == case["classes"]
    if case["kind"] == "coarser_group_block":
        fields |= {"group_block_size", "group_classes"}
        coarse = [hashes_for(h, case["block_size"], case["group_block_size"]) for h in hashes]
        assert classes(coarse, numbers) == case["group_classes"]
    assert set(case) == fields
