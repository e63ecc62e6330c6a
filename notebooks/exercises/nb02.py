"""Exercises of notebook 02, paged KV cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minivllm.check.exercise import Inputs, exercise


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the keys and values of a step into the pages, in place.

    key, value: [num_tokens, num_kv_heads, head_size].
    kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], K at 0, V at 1.
    slot_mapping: [num_tokens] int64; -1: this token is written nowhere.
    """
    block_size = kv_cache.shape[2]
    live = slot_mapping >= 0
    blocks, offsets = slot_mapping[live] // block_size, slot_mapping[live] % block_size
    kv_cache[blocks, 0, offsets] = key[live]
    kv_cache[blocks, 1, offsets] = value[live]


def gather_kv(
    kv_cache: torch.Tensor,
    block_ids: list[int],
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a request, in the order of its text.

    kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], K at 0, V at 1.
    Returns K and V, each [num_tokens, num_kv_heads, head_size].
    """
    pages = kv_cache[block_ids]
    return pages[:, 0].flatten(0, 1)[:num_tokens], pages[:, 1].flatten(0, 1)[
        :num_tokens
    ]


def _pages(rng: random.Random, i: int) -> tuple[Tensor, int]:
    """A cache that holds 0, 1, 2, ..., and its block size."""
    block_size, heads = (2, 1) if i < 5 else (rng.choice([1, 3, 4]), rng.choice([1, 2]))
    shape = (rng.choice([4, 6]), 2, block_size, heads, 2)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(
        shape
    ), block_size


def _observe_write(answer: Callable[..., Any], given: Inputs) -> Tensor:
    answer(**given)
    cache: Tensor = given["kv_cache"]
    return cache


def _why_write(given: Inputs, got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return "Write into kv_cache in place; its shape stays."
    block, kind, offset = where = tuple(
        (got != want).any(-1).any(-1).nonzero()[0].tolist()
    )
    slot = block * got.shape[2] + offset
    return (
        f"kv_cache after the call differs in {'KV'[kind]} of block {block}, offset {offset}, which is slot {slot}:"
        f" it holds {got[where].flatten().tolist()}, wanted {want[where].flatten().tolist()}."
    )


@exercise("ex02", write_kv, _observe_write, _why_write)
def _write(rng: random.Random, i: int) -> Inputs:
    """Tokens, padding among them, and an empty cache.

    Hint: slot // block_size is the block, slot % block_size the offset; both may be tensors.

    Hint: kv_cache[blocks, 0, offsets] = key writes all keys at once, and index 1 instead of 0 the values.

    Hint: Leave out the tokens with slot -1 first: live = slot_mapping >= 0, then key[live], slot_mapping[live].
    """
    cache, block_size = _pages(rng, i)
    slots = rng.sample(
        range(block_size, cache.shape[0] * block_size), rng.randint(1, 3)
    )
    if i % 2:  # padding, at the end as a runner makes it, or among the others
        slots.insert(rng.choice([len(slots), 0]), -1)
    key = 100.0 + torch.arange(len(slots) * cache[0, 0, 0].numel()).view(
        len(slots), *cache.shape[3:]
    )
    return {
        "key": key,
        "value": -key,
        "kv_cache": torch.zeros_like(cache),
        "slot_mapping": torch.tensor(slots),
    }


def _why_gather(given: Inputs, got: Any, want: Any) -> str:
    if not (
        isinstance(got, tuple)
        and len(got) == 2
        and all(isinstance(part, Tensor) for part in got)
    ):
        return "Return two tensors, keys and values."
    if any(mine.shape != wanted.shape for mine, wanted in zip(got, want)):
        return f"The shapes are {[tuple(part.shape) for part in got]}, wanted {[tuple(part.shape) for part in want]}."
    return "The shapes are right, the values are not: look at the order of the blocks and at K = 0, V = 1."


@exercise("ex02_2", gather_kv, why=_why_gather)
def _gather(rng: random.Random, i: int) -> Inputs:
    """A full cache and the blocks of one request.

    Hint: kv_cache[block_ids] is the request's pages in order: [len(block_ids), 2, block_size, heads, head_size].

    Hint: Take [:, 0] for the keys, then flatten(0, 1) joins blocks and offsets into one token dimension.

    Hint: The last block may be partly filled: keep the first num_tokens.
    """
    cache, block_size = _pages(rng, i)
    block_ids = rng.sample(range(1, cache.shape[0]), rng.randint(1, 3))
    num_tokens = len(block_ids) * block_size - rng.randrange(block_size)
    return {"kv_cache": cache, "block_ids": block_ids, "num_tokens": num_tokens}
