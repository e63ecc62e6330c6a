"""Several KV-cache groups in one runner: metadata built once where only tables differ, new blocks zeroed where a spec
needs it, and the same tokens with hybrid memory off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import LLM
from minivllm.attention.backends.torch_paged import TorchPagedMetadataBuilder
from minivllm.attention.layer import Attention
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import KVCacheSpec
from minivllm.engine import LLMEngine
from minivllm.sampling.params import SamplingParams
from tests.models.tiny import save_tiny
from tests.worker.hybrid_models import (
    BLOCK,
    GREEDY,
    PoisonedEngine,
    attention,
    layer_name,
    make_config,
    make_model,
    random_prompts,
)

WINDOWS = [8, 8, None, 8, 8, None, 8]  # five sliding layers, two full ones: groups of two, 3 + 1


class Calls:
    """Counts what the TORCH builder is asked to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.build, self.update = 0, 0
        build, update = TorchPagedMetadataBuilder.build, TorchPagedMetadataBuilder.update_block_table

        def counted_build(*args: Any, **kwargs: Any) -> Any:
            self.build += 1
            return build(*args, **kwargs)

        def counted_update(*args: Any, **kwargs: Any) -> Any:
            self.update += 1
            return update(*args, **kwargs)

        monkeypatch.setattr(TorchPagedMetadataBuilder, "build", counted_build)
        monkeypatch.setattr(TorchPagedMetadataBuilder, "update_block_table", counted_update)


def test_groups_that_differ_by_table_only_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for supported in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(TorchPagedMetadataBuilder, "supports_update_block_table", supported)
            calls = Calls(patch)
            config = make_config(WINDOWS)
            engine = PoisonedEngine(config, make_model(config))
            assert [len(group.layer_names) for group in engine.engine.kv_cache_config.kv_cache_groups] == [2, 2, 1, 2]
            found.append(engine.generate(random_prompts()))
            steps = sum(output.total_num_scheduled_tokens > 0 for output in engine.outputs)
            assert steps > 3
            expected = (2 * steps, 2 * steps) if supported else (4 * steps, 0)
            assert (calls.build, calls.update) == expected
    assert found[0] == found[1]
    config = make_config(WINDOWS, disable_hybrid_kv_cache_manager=True)
    assert PoisonedEngine(config, make_model(config)).generate(random_prompts()) == found[0]


def test_re_pointed_metadata_has_the_table_of_its_own_group() -> None:
    config = make_config(WINDOWS)
    engine = PoisonedEngine(config, make_model(config))
    runner, seen = engine.runner, []
    original = runner._build_attention_metadata

    def watched(inputs: Any) -> Any:
        seen.append(original(inputs))
        return seen[-1]

    runner._build_attention_metadata = watched  # type: ignore[method-assign]
    engine.generate([random_prompts()[-1]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    metadata, slots = seen[0]
    groups = engine.engine.kv_cache_config.kv_cache_groups
    tables = [metadata[group.layer_names[0]].block_table[0].tolist() for group in groups]
    assert len({tuple(table) for table in tables}) == len(groups)
    for index, group in enumerate(groups):
        (block_ids,) = (new.block_ids[index] for new in engine.outputs[0].scheduled_new_reqs)
        assert tables[index][: len(block_ids)] == block_ids
        for name in group.layer_names:
            blocks, _ = metadata[name].write_where
            # The runner pads a step: what is past its own tokens has no slot, and is not written.
            assert (slots[name][len(blocks) :] == -1).all()
            assert torch.equal(blocks, slots[name][: len(blocks)] // BLOCK)
            assert blocks[::BLOCK].tolist() == block_ids


class HalfAttention(Attention):
    """Keeps its pages in half precision, whatever the model's dtype."""

    def get_page_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return replace(super().get_page_spec(vllm_config), dtype="float16")  # type: ignore[type-var]

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        assert key is not None
        assert value is not None
        return super().forward(query.half(), key.half(), value.half()).to(query.dtype)


def mixed_dtypes(config: VllmConfig) -> LLMEngine:
    model = make_model(config)
    former = attention(model, 1)
    model.get_submodule("model.layers.1.self_attn").attn = HalfAttention(
        former.num_heads,
        former.head_size,
        former.impl.scale,
        former.num_kv_heads,
        vllm_config=config,
        prefix=layer_name(1),
        per_layer_sliding_window=former.sliding_window,
    )
    return LLMEngine(config, model=model)


def poison(engine: LLMEngine) -> dict[str, Tensor]:
    """Make every byte 255, which is NaN in each dtype; returns the pages of each layer."""
    caches = {name: layer.kv_cache for name, layer in engine.model_runner.layers.items()}
    for cache in caches.values():
        cache.view(torch.uint8).fill_(255)
        assert cache.isnan().all()
    return caches


def answer(engine: LLMEngine, prompt: list[int]) -> list[int]:
    engine.add_request("x", prompt, GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return list(outputs[0].outputs[0].token_ids)


def test_new_blocks_are_zeroed_where_groups_differ_in_dtype() -> None:
    """A block of float32 pages may come back as one of float16 pages: its old bytes must not show."""
    engine = mixed_dtypes(make_config([None, 8, 8], num_blocks=30, budget=16))
    assert engine.kv_cache_config.needs_kv_cache_zeroing
    caches = poison(engine)
    assert {cache.dtype for cache in caches.values()} == {torch.float32, torch.float16}
    prompt = random_prompts()[3][:13]  # the last block of each group is not full
    engine.add_request("a", prompt, GREEDY)
    engine.step()
    handed_out = engine.scheduler.kv_cache_manager.get_block_ids("a")
    for group, ids in zip(engine.kv_cache_config.kv_cache_groups, handed_out, strict=True):
        size = group.kv_cache_spec.block_size
        for name in group.layer_names:
            pages = caches[name][ids]  # [blocks, 2, size, heads, head_size]
            tokens = pages.transpose(1, 2).flatten(0, 1).flatten(1)
            assert len(tokens) == len(ids) * size > len(prompt)
            assert tokens[: len(prompt)].ne(0).any(1).all(), name
            assert (tokens[len(prompt) :] == 0).all(), name
    everyone = {block for ids in handed_out for block in ids}
    never = [block for block in range(30) if block not in everyone]
    assert all(cache[never].isnan().all() for cache in caches.values()), "a block that nobody was given was touched"
    engine.abort_request("a")
    first = answer(engine, prompt)
    for _ in range(3):  # other groups get the blocks now
        assert engine.reset_prefix_cache()
        answer(engine, random_prompts()[4])
        assert engine.reset_prefix_cache()
        assert answer(engine, prompt) == first


def test_two_dtypes_in_one_group_need_no_care() -> None:
    """Pages of unlike layers of one group never overlap."""
    engine = mixed_dtypes(make_config([None, None, None], num_blocks=20))
    assert len(engine.kv_cache_config.kv_cache_groups) == 1
    fresh = answer(engine, random_prompts()[3])
    assert engine.reset_prefix_cache()
    poison(engine)
    assert answer(engine, random_prompts()[3]) == fresh


def test_nothing_is_zeroed_where_no_spec_needs_it() -> None:
    config = make_config([None, 8, 8])
    engine = PoisonedEngine(config, make_model(config))
    engine.generate(random_prompts())
    assert not engine.engine.kv_cache_config.needs_kv_cache_zeroing
    assert not any(output.new_block_ids_to_zero for output in engine.outputs)


def test_hybrid_memory_off_gives_the_same_tokens_from_one_group(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 9, "layer_types": kinds, "num_hidden_layers": 4}
    folder = save_tiny("qwen2", tmp_path, seed=2, **windows)
    tokens, groups = [], []
    for off in (False, True):
        llm = LLM(
            str(folder), dtype="float32", block_size=BLOCK, num_gpu_blocks_override=200, max_model_len=96,
            max_num_batched_tokens=24, max_num_seqs=8, disable_hybrid_kv_cache_manager=off,
        )  # fmt: skip
        for layer in llm.llm_engine.model_runner.layers.values():
            layer.kv_cache.fill_(torch.nan)
        outputs = [llm.generate(random_prompts(), GREEDY, use_tqdm=False) for _ in range(2)]
        tokens.append([[output.outputs[0].token_ids for output in each] for each in outputs])
        groups.append(len(llm.llm_engine.kv_cache_config.kv_cache_groups))
    assert groups == [4, 1]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] == tokens[0][1]


@pytest.mark.parametrize("hybrid_off", [False, True])
def test_memory_for_less_than_a_block_of_each_group(hybrid_off: bool) -> None:
    """The null block takes one; a request needs a block of each group at once."""
    settings: dict[str, Any] = {"num_gpu_blocks_override": None, "disable_hybrid_kv_cache_manager": hybrid_off}
    probe = make_config(WINDOWS, disable_hybrid_kv_cache_manager=hybrid_off)
    pool = LLMEngine(probe, model=make_model(probe)).kv_cache_config
    block = pool.kv_cache_tensors[0].size // pool.num_blocks
    for given, says in {
        block - 1: rf"No available memory for the cache blocks.*{block - 1} bytes.*null block takes {block}",
        2 * block
        - 1: rf"{block - 1} available .{2 * block - 1} bytes are given, of which the null block takes {block}",
        2 * block: rf"{block} available .{2 * block} bytes are given",
    }.items():
        config = make_config(WINDOWS, kv_cache_memory_bytes=given, **settings)
        with pytest.raises(ValueError, match=says):
            LLMEngine(config, model=make_model(config))


def test_a_window_of_nothing_is_refused_by_the_layer_that_has_it() -> None:
    for window in (0, -3):
        config = make_config([None, None])
        options = {"vllm_config": config, "prefix": layer_name(1)}
        with pytest.raises(ValueError, match=rf"{layer_name(1)}: sliding_window must be above 0, got {window}"):
            Attention(2, 8, 1.0, **options, per_layer_sliding_window=window)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"{layer_name(1)}: attention_chunk_size must be above 0, got {window}"):
            Attention(2, 8, 1.0, **options, attention_chunk_size=window)  # type: ignore[arg-type]


class OddLayer(Attention):
    """A layer of a kind that nobody knows."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return "sideways"


def test_an_unknown_kind_of_layer_is_named() -> None:
    config = make_config([None, None])
    model = make_model(config)
    model.get_submodule("model.layers.1.self_attn").attn = OddLayer(
        4, 16, 0.25, 2, vllm_config=config, prefix=layer_name(1)
    )
    with pytest.raises(TypeError, match=rf"layer {layer_name(1)}: .*'sideways'"):
        LLMEngine(config, model=model)
