"""Tiny Llama variants for the worker's tests: windows in some layers, layers that read another layer's pages, and an
engine around them in which every slot that nobody wrote holds NaN."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minivllm.attention.layer import Attention
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.engine import LLMEngine
from minivllm.models.llama import AttentionOptions, LlamaForCausalLM
from minivllm.sampling.params import SamplingParams
from tests.models.tiny import tiny_config, tiny_model

BLOCK, MAX_TOKENS = 4, 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def attention(model: nn.Module, index: int) -> Attention:
    found = model.get_submodule(layer_name(index))
    assert isinstance(found, Attention)
    return found


class WindowedLlama(LlamaForCausalLM):
    """Llama whose config names a window for each layer: hf_config.windows, None where a layer sees everything."""

    @staticmethod
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=hf_config.windows[layer_idx])


def make_config(windows: list[int | None], *, num_blocks: int = 200, budget: int = 64, **cache: Any) -> VllmConfig:
    hf_config = tiny_config("llama", num_hidden_layers=len(windows))
    hf_config.windows = windows
    return VllmConfig(
        model_config=ModelConfig(model="none", hf_config=hf_config, dtype="float32", max_model_len=64),
        cache_config=CacheConfig(**{"block_size": BLOCK, "num_gpu_blocks_override": num_blocks} | cache),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8),
    )


def share(model: nn.Module, index: int, target: str, config: VllmConfig, **options: Any) -> None:
    """Put in place of layer `index` one that reads the pages of `target`."""
    former = attention(model, index)
    given: dict[str, Any] = {
        "num_heads": former.num_heads,
        "num_kv_heads": former.num_kv_heads,
        "per_layer_sliding_window": former.sliding_window,
    } | options
    model.get_submodule(layer_name(index).removesuffix(".attn")).attn = Attention(
        head_size=former.head_size,
        scale=former.impl.scale,
        vllm_config=config,
        prefix=layer_name(index),
        kv_sharing_target_layer_name=target,
        **given,
    )


def make_model(config: VllmConfig, sharing: Mapping[int, int] | None = None) -> WindowedLlama:
    """A random model; sharing: layer index -> the index of the layer whose pages it reads."""
    model = WindowedLlama(vllm_config=config)
    reference = tiny_model("llama", seed=5, num_hidden_layers=config.model_config.hf_config.num_hidden_layers)
    model.load_weights(iter(reference.state_dict().items()))
    for index, target in (sharing or {}).items():
        share(model, index, layer_name(target), config)
    return model


def copy_instead(model: nn.Module, copies: Mapping[int, int]) -> None:
    """The same function as sharing, without it: a layer keeps pages of its own, and writes its target's K and V."""
    latest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for index, target in copies.items():

        def remember(_: nn.Module, args: Any, target: int = target) -> None:
            latest[target] = args[1], args[2]

        def replace(_: nn.Module, args: Any, target: int = target) -> Any:
            return args[0], *latest[target]

        attention(model, target).register_forward_pre_hook(remember)
        attention(model, index).register_forward_pre_hook(replace)


class PoisonedEngine:
    """An engine in which a block holds NaN until a token is written to it, each time that it is handed out."""

    def __init__(self, config: VllmConfig, model: nn.Module) -> None:
        self.engine = LLMEngine(config, model=model)
        self.runner = self.engine.model_runner
        self.outputs: list[SchedulerOutput] = []
        for layer in self.runner.layers.values():
            layer.kv_cache.fill_(torch.nan)
        self._execute = self.runner.execute_model
        self.runner.execute_model = self.execute  # type: ignore[method-assign]

    def execute(self, output: SchedulerOutput) -> Any:
        self.outputs.append(output)
        sizes = [group.kv_cache_spec.block_size for group in self.engine.kv_cache_config.kv_cache_groups]
        fresh: set[int] = set()
        for new in output.scheduled_new_reqs:
            for ids, size in zip(new.block_ids, sizes, strict=True):
                fresh.update(ids[-(-new.num_computed_tokens // size) :])
        cached = output.scheduled_cached_reqs
        for req_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            for ids, size in zip(new_ids or (), sizes, strict=new_ids is not None):
                fresh.update(ids[-(-computed // size) :] if req_id in cached.resumed_req_ids else ids)
        for layer in self.runner.layers.values():
            layer.kv_cache[sorted(fresh)] = torch.nan
        return self._execute(output)

    @property
    def preempted(self) -> list[str]:
        return [req_id for output in self.outputs for req_id in output.preempted_req_ids]

    def generate(self, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        first = len(self.outputs)
        for index, prompt in enumerate(prompts):
            self.engine.add_request(f"{first}-{index}", prompt, params)
        done: dict[str, list[int]] = {}
        self.num_cached: dict[int, int] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
                    self.num_cached[int(output.request_id.split("-")[1])] = output.num_cached_tokens or 0
        manager = self.engine.scheduler.kv_cache_manager
        manager.check_integrity()
        assert manager.block_pool.get_num_free_blocks() == self.engine.kv_cache_config.num_blocks - 1
        return [done[f"{first}-{index}"] for index in range(len(prompts))]


def random_prompts(lengths: tuple[int, ...] = (1, 4, 5, 17, 33, 49)) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 160) for _ in range(length)] for length in lengths]
