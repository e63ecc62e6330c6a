"""Exercises of notebook 09, prefix caching."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def hash_blocks(
    token_ids: list[int],
    block_size: int,
    salt: str | None,
    digest,
) -> list[str]:
    """The hash of every full block of a request.

    digest(parent, tokens, extra): parent is the hash of the block before, None for the
    first block; tokens is a list; extra is the salt in the first block, else None.
    """
    hashes = []
    parent = None
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = token_ids[start : start + block_size]
        parent = digest(parent, tokens, salt if start == 0 else None)
        hashes.append(parent)
    return hashes


def hit_length(
    cached: list[bool],
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> int:
    """How many tokens of a prompt a group can take from the prefix cache.

    cached: whether each full block of the prompt is cached. One token at least is left
    to compute. window: None for full attention, else a window needs the blocks of the
    last window - 1 tokens before the end of the hit, or all of them near the start.
    """
    for end in range((num_tokens - 1) // block_size, 0, -1):
        needed = end
        if window is not None:
            needed = min(end, -(-(window - 1) // block_size))
        if all(cached[end - needed : end]):
            return end * block_size
    return 0


def _digest(parent: str | None, tokens: list[int], extra: str | None) -> str:
    return hashlib.sha256(repr((parent, tokens, extra)).encode()).hexdigest()[:6]


def _why_hashes(given: Inputs, got: Any, want: list[str]) -> str:
    if not isinstance(got, list) or len(got) != len(want):
        return f"{len(given['token_ids'])} tokens fill {len(want)} blocks of {given['block_size']}."
    first = next(i for i, pair in enumerate(zip(got, want)) if pair[0] != pair[1])
    if first:
        return f"Block {first} is the first that differs: its parent is {want[first - 1]!r}, and it has no salt."
    return f"Block 0 differs: its parent is None, its extra key {given['salt']!r}."


@exercise("ex09", hash_blocks, why=_why_hashes)
def _tokens(rng: random.Random, i: int) -> Inputs:
    """A request, salted or not.

    Hint: range(0, len(token_ids), block_size) gives where blocks begin; leave out the last one if it is not full.

    Hint: Keep the hash just made: it is the parent of the next block. It is None before the first.

    Hint: The salt is given to digest for the first block alone; the chain carries it on.
    """
    block_size = rng.choice([2, 3, 4])
    return {
        "token_ids": [rng.randint(0, 9) for _ in range(rng.randint(1, 4 * block_size))],
        "block_size": block_size,
        "salt": rng.choice(["red", "blue"]) if i % 3 == 1 else None,
        "digest": _digest,
    }


def _why_hit(given: Inputs, got: Any, want: int) -> str:
    size, window = given["block_size"], given["window"]
    if not isinstance(got, int):
        return "Return a number of tokens."
    if got >= given["num_tokens"]:
        return "That is the whole prompt: one token must be computed, to have logits."
    if got % size:
        return f"A hit is a whole number of blocks of {size} tokens."
    if window is None:
        return "Full attention goes on as far as no block is missing, from the first one on."
    needed = -(-(window - 1) // size)
    return f"A window of {window} needs {needed} cached block(s) side by side before the end, fewer only at the start."


@exercise("ex09_2", hit_length, why=_why_hit)
def _cache(rng: random.Random, i: int) -> Inputs:
    """A prompt and what is cached of it.

    Hint: Try the ends from the right: (num_tokens - 1) // block_size blocks, then one less, down to 1.

    Hint: Full attention needs all blocks before the end: all(cached[:end]).

    Hint: A window needs the last -(-(window - 1) // block_size) of them, or all where there are fewer than that.
    """
    block_size = 4 if i < 5 else rng.choice([1, 2, 4])
    num_tokens = rng.randint(block_size, 7 * block_size)
    likely = 0.9 if i % 2 else 0.6
    return {
        "cached": [rng.random() < likely for _ in range(num_tokens // block_size)],
        "num_tokens": num_tokens,
        "block_size": block_size,
        "window": None if i % 3 == 0 else rng.randint(2, 3 * block_size + 1),
    }
