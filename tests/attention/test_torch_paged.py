"""The TORCH backend against brute force: every mix of requests and features, in memory that is NaN where unowned."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.attention.backends import torch_paged, torch_plan
from minivllm.core.kv_cache_interface import MambaSpec
from tests.attention.paged_case import PagedBatch, make_config, make_layer

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


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (6, 2), (7, 7)], ids=str)
@pytest.mark.parametrize("head_size", [1, 3, 8, 80])
def test_any_number_of_heads_and_any_head_size(heads, head_size, small_limits):
    config = make_config(block_size=3)
    layer = make_layer(config, num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, scale=head_size**-0.5)
    check(PagedBatch(layer, config, [(5, 1), (0, 7), (2, 1), (11, 9), (12, 1)], seed=head_size))


@pytest.mark.parametrize("seed", range(24))
def test_random_batches_at_the_real_limits(seed):
    rng = random.Random(seed)
    config = make_config(block_size=rng.choice([1, 2, 4, 16]))
    options = FEATURES[rng.choice(list(FEATURES))]
    requests = [(rng.randint(0, 200), rng.choice([1, 1, 2, 150])) for _ in range(rng.randint(1, 5))]
    check(PagedBatch(make_layer(config, **options), config, requests, padding=rng.choice([0, 3]), seed=seed))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fused_scores", [0, 10**9], ids=["batched", "fused"])
@pytest.mark.parametrize("options", [{}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=["plain", "sinks"])
def test_half_precision_with_a_softmax_in_float32(dtype, fused_scores, options, monkeypatch):
    """300 keys: a softmax that summed in bfloat16 would be off by far more than the tolerance."""
    monkeypatch.setattr(torch_paged, "FUSED_SCORES", fused_scores)
    config = make_config(dtype=dtype, block_size=16, max_model_len=512)
    layer = make_layer(config, **options)
    check(PagedBatch(layer, config, [(299, 1), (0, 40), (250, 50)], dtype=getattr(torch, dtype)), tolerance=6e-3)


@pytest.mark.parametrize("gap", [1, 8, 100])
def test_pages_with_gaps_between_them(gap):
    config = make_config()
    check(PagedBatch(make_layer(config), config, [(5, 1), (0, 7), (3, 4)], page_gap=gap))


def test_only_the_slots_of_the_step_are_written():
    config = make_config()
    batch = PagedBatch(make_layer(config), config, [(5, 1), (0, 7), (3, 4)], padding=4)
    before = batch.cache.clone()
    batch.run()
    changed = ~((batch.cache == before) | (batch.cache.isnan() & before.isnan())).flatten(3).all(
        -1
    )  # [blocks, 2, size]
    slots = batch.slot_mapping[: batch.num_tokens]
    expected = torch.zeros_like(changed)
    expected[slots // 4, :, slots % 4] = True
    assert torch.equal(changed, expected)


def test_keys_padded_beyond_the_slots_are_not_written():
    """vLLM #13418: a padded batch with a slot mapping that ends with the real tokens."""
    config = make_config()
    batch = PagedBatch(make_layer(config), config, [(5, 1), (0, 7)], padding=3)
    batch.slot_mapping = batch.common.slot_mapping = batch.slot_mapping[: batch.num_tokens]
    check(batch)


def test_padding_requests_of_no_tokens_are_passed_over():
    config = make_config()
    batch = PagedBatch(make_layer(config), config, [(5, 1), (4, 0), (0, 7)])
    check(batch)


def test_a_window_never_touches_what_lies_below_it():
    """Blocks below the window were freed: their table entries are the null block, and its content is NaN."""
    config = make_config()
    layer = make_layer(config, per_layer_sliding_window=5)
    batch = PagedBatch(layer, config, [(30, 1), (17, 9), (0, 9)])
    for row, (computed, _) in enumerate(batch.requests):
        below = max(0, computed - 4) // 4
        batch.cache[batch.table[row, :below].long()] = torch.nan
        batch.table[row, :below] = 0
    check(batch)


def test_reordering_the_batch_changes_nothing():
    config = make_config()
    layer = make_layer(config)
    requests = [(5, 1), (0, 7), (9, 1), (3, 4), (2, 1)]
    batch = PagedBatch(layer, config, requests)
    tokens = batch.run().split([new for _, new in requests])
    order = [3, 0, 4, 1, 2]
    moved = PagedBatch(layer, config, [requests[row] for row in order])
    for name in ("queries", "keys", "values"):
        setattr(moved, name, [getattr(batch, name)[row] for row in order])
    for row, (computed, _) in enumerate(moved.requests):
        for position in range(computed):
            block = moved.table[row, position // 4]
            moved.cache[block, :, position % 4] = torch.stack((moved.keys[row][position], moved.values[row][position]))
    torch.testing.assert_close(moved.run(), torch.cat([tokens[row] for row in order]), rtol=1e-5, atol=1e-6)


def test_no_operator_makes_anything_as_large_as_the_cache():
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = result if isinstance(result, list | tuple) else [result]
            if "as_strided" not in str(func) and not func.is_view:
                self.largest = max([self.largest, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
            return result

    config = make_config()
    layer = make_layer(config)
    small = PagedBatch(layer, config, [(5, 1), (0, 7), (3, 4)])
    expected = small.run()
    # The same pages in a cache of 4,000 blocks.
    large = torch.full((4000, *small.cache.shape[1:]), torch.nan)
    large[: len(small.cache)] = small.cache
    small.cache = large
    metadata = small.builder().build(0, small.common)
    with Sizes() as sizes:
        out = small.run(metadata)
    torch.testing.assert_close(out, expected)
    assert 0 < sizes.largest < 4000


def test_addresses_of_high_blocks_do_not_overflow():
    """Block 20,000,000 of a cache that is only a shape: its rows lie past 2**31."""
    config = make_config(block_size=16)
    batch = PagedBatch(make_layer(config), config, [(20, 1)])
    batch.table[:] = 20_000_000
    ((piece, rows),) = (
        batch.builder()
        .build(0, batch.common)
        .gathers(None, None, torch.empty(20_000_001, 2, 16, 8, 128, device="meta"))
    )
    assert rows.dtype == torch.int64
    assert rows.view(2, 8, 21)[0, 0, 16] == 20_000_000 * 2 * 16 * 8
    assert rows.view(2, 8, 21)[1, 7, 20] == ((20_000_000 * 2 + 1) * 16 + 4) * 8 + 7
    assert piece.positions.tolist() == [list(range(21))]


def test_another_group_gets_the_same_plan_with_its_own_table():
    config = make_config()
    layer = make_layer(config)
    first, second = (PagedBatch(layer, config, [(5, 1), (0, 7), (3, 4), (6, 1)], seed=seed) for seed in (1, 2))
    builder = first.builder()
    assert builder.supports_update_block_table
    metadata = builder.build(0, first.common)
    other = builder.update_block_table(metadata, second.table, second.slot_mapping)
    assert other.plan is metadata.plan
    for batch, built in ((second, other), (first, metadata)):
        out = batch.run(built)
        torch.testing.assert_close(out.double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_layers_with_and_without_a_window_may_share_metadata():
    """Hybrid memory off: one group, one spec, yet each layer sees by its own rule."""
    config = make_config(disable_hybrid_kv_cache_manager=True)
    windowed, full = make_layer(config, "a", per_layer_sliding_window=5), make_layer(config, "b")
    batches = [PagedBatch(layer, config, [(25, 1), (0, 7), (13, 4)], seed=3) for layer in (windowed, full)]
    metadata = batches[0].builder().build(0, batches[0].common)
    for batch in batches:
        torch.testing.assert_close(batch.run(metadata).double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_a_capture_batch_is_built_like_any_other():
    config = make_config()
    batch = PagedBatch(make_layer(config), config, [(5, 1), (3, 1)])
    metadata = batch.builder().build_for_cudagraph_capture(batch.common)
    torch.testing.assert_close(batch.run(metadata).double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_ragged_decodes_are_put_in_buckets_that_waste_little():
    config = make_config(block_size=16, max_model_len=4096)
    layer = make_layer(config, num_heads=9, num_kv_heads=3, head_size=64)
    rng = random.Random(0)
    lengths = [rng.randint(1, 3000) for _ in range(50)]
    batch = PagedBatch(layer, config, [(5, 1)] * 50)
    batch.common.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int32)
    pieces = batch.builder().build(0, batch.common).plan.pieces(None, None)
    assert sorted(row for piece in pieces for row in piece.rows.flatten().tolist()) == list(range(50))
    padded = 0
    for piece in pieces:
        assert piece.positions.numel() <= torch_plan.MAX_GATHERED_KEYS
        padded += piece.positions.numel() - sum(lengths[row] for row in piece.rows.flatten().tolist())
    assert padded * 192 <= torch_plan.BUCKET_COST * len(pieces)
    assert len(pieces) < 25


def test_threads_have_workspaces_of_their_own():
    buffers = []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: buffers.append(torch_paged._workspace.take(4, 4, torch.zeros(1))), range(1)))
    mine = torch_paged._workspace.take(4, 4, torch.zeros(1))
    assert mine.data_ptr() != buffers[0].data_ptr()


def test_a_workspace_made_in_inference_mode_serves_outside_of_it(monkeypatch):
    monkeypatch.setattr(torch_paged, "_workspace", torch_paged._Workspace())
    config = make_config()
    batch = PagedBatch(make_layer(config), config, [(5, 1)])
    with torch.inference_mode():
        batch.run()
    check(batch)


def test_a_layer_that_keeps_no_pages_of_k_and_v_is_refused():
    spec = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=("float32",))
    with pytest.raises(TypeError, match=r"TORCH attends over pages of K and V, layers \['m'\] keep MambaSpec"):
        torch_paged.TorchPagedMetadataBuilder(spec, ["m"], make_config(), torch.device("cpu"))
