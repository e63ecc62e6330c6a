"""Block hashes: what they tell apart, and that they are made once a block."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.core.block_hash import BlockHash, hashes_for, make_block_hasher
from minivllm.request import LoRARequest, MultiModalFeature, Request
from minivllm.sampling.params import SamplingParams

PROMPT = list(range(10, 22))  # 3 blocks of 4


def hashes(prompt: list[int] = PROMPT, block_size: int = 4, **settings: Any) -> list[BlockHash]:
    hasher = make_block_hasher(block_size)
    return Request("r", prompt, SamplingParams(), block_hasher=hasher, **settings).block_hashes


def test_a_hash_stands_for_the_whole_prefix() -> None:
    changed = hashes([0, *PROMPT[1:]])
    assert len(hashes()) == 3
    assert hashes() == hashes()
    assert not set(hashes()) & set(changed), "the first token counts in every block"
    swapped = hashes([*PROMPT[4:8], *PROMPT[:4], *PROMPT[8:]])
    assert not set(hashes()) & set(swapped)


@pytest.mark.parametrize("length", range(1, 14))
def test_only_full_blocks_have_a_hash(length: int) -> None:
    """MinivLLM #76: at a length that is a multiple of the block size the last block is full, not an empty one more."""
    assert len(hashes(list(range(length)))) == length // 4


@pytest.mark.parametrize("steps", [[1] * 9, [3, 3, 3], [9], [4, 5], [8, 1]])
def test_hashes_do_not_depend_on_how_tokens_came(steps: list[int]) -> None:
    whole = list(range(5, 19))
    request = Request("r", whole[:5], SamplingParams(), cache_salt="s", block_hasher=make_block_hasher(4))
    done = 5
    for step in steps:
        request.append_output_token_ids(whole[done : done + step])
        done += step
        assert len(request.block_hashes) == done // 4
    assert request.block_hashes == hashes(whole, cache_salt="s")


def test_a_hash_is_not_made_twice() -> None:
    hasher = make_block_hasher(4)
    request = Request("r", PROMPT, SamplingParams(), block_hasher=hasher)
    assert hasher(request) == []
    request.append_output_token_ids([1, 2, 3])
    assert hasher(request) == []


@pytest.mark.parametrize(
    ("settings", "first_that_differs"),
    [
        ({"cache_salt": "a"}, 0),
        ({"lora_request": LoRARequest("a", 1, "/a")}, 0),
        ({"mm_features": [MultiModalFeature("cat", 5, 2)]}, 1),
        ({"mm_features": [MultiModalFeature("cat", 0, 4)]}, 0),
        ({"mm_features": [MultiModalFeature("cat", 4, 8)]}, 1),
        ({"cache_salt": ""}, 3),
        ({"mm_features": [MultiModalFeature("cat", 12, 4)]}, 3),
    ],
)
def test_extra_keys_keep_blocks_apart_from_where_they_begin(settings: dict[str, Any], first_that_differs: int) -> None:
    same = [ours == plain for ours, plain in zip(hashes(**settings), hashes(), strict=True)]
    assert same == [index < first_that_differs for index in range(3)]


def test_extra_keys_of_different_kinds_are_not_mixed_up() -> None:
    """A salt, an adapter and an image of one name differ, as do tokens that look like an extra key."""
    variants = [
        hashes(),
        hashes(cache_salt="x"),
        hashes(cache_salt="y"),
        hashes(lora_request=LoRARequest("x", 1, "x")),
        hashes(lora_request=LoRARequest("x", 1, "y")),
        hashes(mm_features=[MultiModalFeature("x", 0, 1)]),
        hashes(mm_features=[MultiModalFeature("x", 1, 1)]),
        hashes(mm_features=[MultiModalFeature("x", 0, 1), MultiModalFeature("x", 1, 1)]),
    ]
    assert len({found[0] for found in variants}) == len(variants)
    assert hashes(lora_request=LoRARequest("x", 1, "x")) == hashes(lora_request=LoRARequest("x", 2, "x"))


@pytest.mark.parametrize("token", [-1, 2**31, 2**62])
def test_any_token_id_can_be_hashed(token: int) -> None:
    assert hashes([token] * 4) != hashes([0] * 4)


def test_coarser_blocks_have_the_hash_of_their_last_part() -> None:
    fine = hashes(list(range(15)), block_size=2)  # 7 hashes
    assert hashes_for(fine, 2, 6) == [fine[2], fine[5]]
    assert hashes_for(fine, 2, 16) == []
    assert hashes_for(fine, 2, 2) is fine


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        make_block_hasher(0)
    with pytest.raises(ValueError, match="block_size=6 is not a multiple of the hash block size 4"):
        hashes_for([], 4, 6)
