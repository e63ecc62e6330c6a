"""Exercises of notebook 04, KV-cache specs, page sizes, groups."""

from __future__ import annotations

import random
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def deal_out(buckets: list[list[str]]) -> list[list[str]]:
    """The KV-cache groups of a hybrid model, those of the first bucket first.

    buckets: the layers of each kind, in the order of the model.
    """
    sizes = [len(bucket) for bucket in buckets]
    group_size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups = []
    for bucket in buckets:
        count = -(-len(bucket) // group_size)
        groups += [bucket[i::count] for i in range(count)]
    return groups


def unify_pages(layers: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """(block size, empty bytes of a page) of every layer; all pages become equal.

    layers: (block size, bytes of a page, is it a Mamba layer) of every layer.
    """
    largest = max(page for _, page, _ in layers)
    unified = []
    for block_size, page, is_mamba in layers:
        if is_mamba or largest % page:
            unified.append((block_size, largest - page))
        else:
            unified.append((block_size * (largest // page), 0))
    return unified


def _why_groups(given: Inputs, got: Any, want: Any) -> str:
    sizes = [len(bucket) for bucket in given["buckets"]]
    return f"The buckets have {sizes} layers; the groups should have {[len(group) for group in want]}."


@exercise("ex04", deal_out, why=_why_groups)
def _buckets(rng: random.Random, i: int) -> Inputs:
    """Buckets of the layers of one model, interleaved.

    Hint: First the group size: the smallest bucket's, or the largest's if that is less than 1.5 times the smallest.

    Hint: A bucket of k layers becomes n = -(-k // group_size) groups (k / group_size, rounded up).

    Hint: The members of group i of n are bucket[i::n].
    """
    sizes = [rng.randint(1, 9) for _ in range(1 + i % 3)]
    if i % 4 == 1:  # at the border
        base = 2 * rng.randint(1, 3)
        sizes = [base, base * 3 // 2 - i // 4 % 2]
    kinds = [kind for kind, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(kinds)
    return {
        "buckets": [
            [f"layers.{layer}" for layer, other in enumerate(kinds) if other == kind]
            for kind in range(len(sizes))
        ]
    }


@exercise("ex04_2", unify_pages)
def _pages(rng: random.Random, i: int) -> Inputs:
    """Layers of equal, dividing and odd pages.

    Hint: The largest page first; a layer that has it already keeps its block size and has 0 empty bytes.

    Hint: Where largest % page is 0 and it is no Mamba layer, the block gets largest // page times the tokens.

    Hint: Everything else keeps its block size; largest - page bytes stay empty.
    """
    unit = 32 * rng.randint(1, 4)
    layers = []
    for _ in range(2 + i % 4):
        page = unit * rng.choice([1, 1, 2, 3, 4, 5, 6])
        layers.append((rng.choice([4, 16]), page, i > 2 and rng.random() < 0.3))
    return {"layers": layers}
