"""The TORCH backend against brute force: every mix of requests and features, in memory that is NaN where unowned."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tests.attention.paged_case import PagedBatch, make_config, make_layer

from minivllm.attention.backends import torch_paged, torch_plan

FEATURES = {
    "window": {"per_layer_sliding_window": 5},
    "chunk": {"attention_chunk_size": 6},
    "soft_cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "non_causal": {},
}
PAIRS = [
    pair
    for pair in itertools.chain([()], ((name,) for name in FEATURES), itertools.combinations(FEATURES, 2))
    if set(pair) != {"window", "chunk"}
]


@pytest.fixture
def small_limits(monkeypatch):
    """Many tiles and buckets in small batches."""
    monkeypatch.setattr(torch_plan, "TILE", 4)
    monkeypatch.setattr(torch_plan, "MAX_GATHERED_KEYS", 40)
    monkeypatch.setattr(torch_plan, "BUCKET_COST", 60)


def check(batch: PagedBatch, tolerance: float = 1e-5) -> None:
    out = batch.run()
    torch.testing.assert_close(out[: batch.num_tokens].double(), batch.expected(), rtol=tolerance, atol=tolerance)
    assert not out[batch.num_tokens :].any(), "padding rows must be 0"


def random_requests(rng: random.Random, count: int = 6) -> list[tuple[int, int]]:
    kinds = [
        lambda: (rng.randint(1, 40), 1),  # decode
        lambda: (0, rng.randint(1, 20)),  # prefill
        lambda: (rng.randint(1, 30), rng.randint(2, 17)),  # chunk of a longer prompt
        lambda: (0, 1),  # a prompt of one token
    ]
    return [rng.choice(kinds)() for _ in range(rng.randint(1, count))]


@pytest.mark.parametrize("fused_scores", [0, 10**9], ids=["batched", "fused"])
@pytest.mark.parametrize("features", PAIRS, ids=lambda pair: "+".join(pair) or "plain")
def test_features_alone_and_in_pairs(features, fused_scores, small_limits, monkeypatch):
    monkeypatch.setattr(torch_paged, "FUSED_SCORES", fused_scores)
    for seed, block_size in enumerate((1, 2, 4, 16)):
        options = {key: value for name in features for key, value in FEATURES[name].items()}
        config = make_config(block_size=block_size)
        layer = make_layer(config, **options)
        requests = random_requests(random.Random(f"{features}{seed}"))
        check(PagedBatch(layer, config, requests, causal="non_causal" not in features, padding=seed, seed=seed))
