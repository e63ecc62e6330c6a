"""Layers that read another layer's pages: the same tokens as copying K and V, no pages of their own, clear refusals."""

from __future__ import annotations

import pytest
import torch

from minivllm.attention.backends.torch_paged import TorchPagedBackend
from minivllm.core.kv_cache_groups import get_kv_cache_config
from minivllm.core.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from minivllm.sampling.params import SamplingParams
from minivllm.worker.model_runner import ModelRunner
from tests.worker.hybrid_models import (
    BLOCK,
    PoisonedEngine,
    attention,
    copy_instead,
    layer_name,
    make_config,
    make_model,
    random_prompts,
    share,
)

# Two kinds of layers, and the last two share with the last of their kind, as in Gemma 3n.
WINDOWS = [8, None, 8, None, 8, None]
SHARING = {4: 2, 5: 3}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request at a time, nothing cached, and K and V of the targets copied into pages of their own."""
    config = make_config(WINDOWS, enable_prefix_caching=False)
    model = make_model(config)
    copy_instead(model, SHARING)
    engine = PoisonedEngine(config, model)
    return [engine.generate([prompt])[0] for prompt in random_prompts()]


def test_copying_is_not_what_the_layers_would_do_by_themselves(expected: list[list[int]]) -> None:
    config = make_config(WINDOWS)
    assert PoisonedEngine(config, make_model(config)).generate(random_prompts()) != expected


@pytest.mark.parametrize("hybrid_off", [False, True])
@pytest.mark.parametrize("budget", [11, 64])
def test_batched_chunked_and_prefix_cached(expected: list[list[int]], budget: int, hybrid_off: bool) -> None:
    config = make_config(WINDOWS, budget=budget, disable_hybrid_kv_cache_manager=hybrid_off)
    engine = PoisonedEngine(config, make_model(config, SHARING))
    assert engine.generate(random_prompts()) == expected
    assert set(engine.num_cached.values()) == {0}
    assert engine.generate(random_prompts()) == expected
    assert max(engine.num_cached.values()) >= 5 * BLOCK


def test_preempted_and_resumed(expected: list[list[int]]) -> None:
    config = make_config(WINDOWS, num_blocks=26, budget=16, enable_prefix_caching=False)
    engine = PoisonedEngine(config, make_model(config, SHARING))
    assert engine.generate(random_prompts()) == expected
    assert engine.preempted


def test_prefix_logits_equal_copying() -> None:
    """Not only the greedy token: every log-probability of every prompt position, chunked over several steps."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5, ignore_eos=True)
    found = []
    for shared in (True, False):
        config = make_config(WINDOWS, budget=13)
        model = make_model(config, SHARING if shared else None)
        if not shared:
            copy_instead(model, SHARING)
        engine = PoisonedEngine(config, model).engine
        engine.add_request("a", random_prompts()[-1], params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        rows = outputs[0].prompt_logprobs or []
        found.append(torch.tensor([sorted(each.logprob for each in row.values())[-5:] for row in rows if row]))
    assert found[0].shape == (48, 5)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_a_sharing_layer_owns_nothing_and_writes_nothing() -> None:
    config = make_config(WINDOWS)
    engine = PoisonedEngine(config, make_model(config, SHARING))
    runner = engine.runner
    specs = runner.get_kv_cache_spec()
    assert list(specs) == [layer_name(index) for index in range(4)]
    grouped = {name for group in engine.engine.kv_cache_config.kv_cache_groups for name in group.layer_names}
    assert grouped == set(specs)
    for index, target in SHARING.items():
        assert attention(runner.model, index).kv_cache is attention(runner.model, target).kv_cache
    writes: list[str] = []
    for name, layer in runner.layers.items():
        original = layer.impl.do_kv_cache_update

        def spy(*args, name=name, original=original):
            writes.append(name)
            return original(*args)

        layer.impl.do_kv_cache_update = spy
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    assert writes == list(specs)


def test_it_joins_the_group_of_its_target() -> None:
    """One builder with the target where all is alike, one of its own for other query heads; the table is the same."""
    config = make_config([8, None, None, 8])
    model = make_model(config, {3: 0})
    share(model, 2, layer_name(1), config, num_heads=2)
    runner = ModelRunner(config)
    runner.load_model(model)
    specs = runner.get_kv_cache_spec()
    runner.initialize_kv_cache(get_kv_cache_config(config, specs, 0))
    found = {
        tuple(group.layer_names): (gid, group.kv_cache_spec, group.num_heads)
        for gid, groups in enumerate(runner.attn_groups)
        for group in groups
    }
    full, sliding = specs[layer_name(1)], specs[layer_name(0)]
    assert isinstance(full, FullAttentionSpec)
    assert isinstance(sliding, SlidingWindowSpec)
    (gid,) = {gid for gid, spec, _ in found.values() if spec == full}
    assert found == {
        (layer_name(0), layer_name(3)): (1 - gid, sliding, 4),
        (layer_name(1),): (gid, full, 4),
        (layer_name(2),): (gid, full, 2),
    }


class OtherLayout(TorchPagedBackend):
    """Same kernels, but its own idea of a page."""

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class SameLayout(TorchPagedBackend):
    """Another backend whose pages are TORCH's."""


def load(pairs: dict[int, str], **options: object) -> ModelRunner:
    config = make_config(WINDOWS)
    model = make_model(config)
    for index, target in pairs.items():
        share(model, index, target, config, **options)
    runner = ModelRunner(config)
    runner.load_model(model)
    return runner


@pytest.mark.parametrize(
    ("pairs", "options", "says"),
    [
        ({3: "model.layers.9"}, {}, "'model.layers.9': the model has no such layer"),
        ({3: layer_name(5)}, {}, "does not come before"),
        ({3: layer_name(5), 5: layer_name(3)}, {}, "does not come before"),  # a cycle
        ({3: layer_name(1), 5: layer_name(3)}, {}, rf"has no pages of its own, but shares those of '{layer_name(1)}'"),
        ({3: layer_name(2)}, {}, "SlidingWindowSpec.*this layer reads FullAttentionSpec"),
        ({4: layer_name(2)}, {"per_layer_sliding_window": 12}, "sliding_window=8.*sliding_window=12"),
        ({5: layer_name(3)}, {"num_kv_heads": 4}, "num_kv_heads=2.*num_kv_heads=4"),
    ],
)
def test_refused_when_the_model_is_loaded(pairs: dict[int, str], options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        load(pairs, **options)
    text = str(error.value)
    assert any(layer_name(index) in text and target in text for index, target in pairs.items())
    assert "kv_sharing_target_layer_name" in text


def test_a_layer_cannot_share_with_itself() -> None:
    with pytest.raises(ValueError, match=f"{layer_name(3)} cannot share its own KV cache"):
        load({3: layer_name(3)})


@pytest.mark.parametrize(("backend", "refused"), [(OtherLayout, True), (SameLayout, False)])
def test_pages_of_another_layout(backend: type[TorchPagedBackend], refused: bool) -> None:
    config = make_config(WINDOWS)
    model = make_model(config, SHARING)
    attention(model, 5).attn_backend = backend
    runner = ModelRunner(config)
    if refused:
        with pytest.raises(ValueError, match=f"'{layer_name(5)}' cannot share the KV cache of '{layer_name(3)}'"):
            runner.load_model(model)
    else:
        runner.load_model(model)
        assert runner.kv_sharing == {layer_name(4): layer_name(2), layer_name(5): layer_name(3)}
