"""Tiny random models of each family, made offline with Transformers, and one full prefill of ours without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.config import CacheConfig, ModelConfig, VllmConfig
from minivllm.forward_context import collect_layers, set_forward_context

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCORE_SCALE = 24  # query_pre_attn_scalar, which is not head_dim
# What is particular to a family. head_dim 32 is not hidden_size / heads: q is wider than the hidden state.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {
        "num_hidden_layers": 4,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "logit_scale": 0.3,
    },
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 22,
        "query_pre_attn_scalar": SCORE_SCALE,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 13,
        "query_pre_attn_scalar": SCORE_SCALE,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "head_dim": 32,
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "intermediate_size": [96, 80, 96, 64, 96, 80],
        "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.75, 0.0],
        "vocab_size_per_layer_input": 150,
        "hidden_size_per_layer_input": 24,
        "altup_num_inputs": 3,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        "final_logit_softcapping": 10.0,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 11,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "llama": {},
    "llama4_text": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 20,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


def tiny_config(arch: str, **settings: Any) -> Any:
    """A Transformers config of family `arch`, a key of FAMILIES, changed by `settings`."""
    return AutoConfig.for_model(arch, **COMMON | FAMILIES[arch] | settings)


def tiny_model(arch: str, seed: int = 0, **settings: Any) -> Any:
    """The Transformers model with every parameter random, norms and biases too, so that none can be forgotten."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(arch, **settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.uniform_(0.5, 1.5)
            elif "embed" in name:  # where embeddings are scaled up, a model would say its last token again and again
                param.normal_(0.0, 0.2 / getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0))
            else:
                param.normal_(0.0, 0.2 if "bias" in name else 1.5 * param.shape[-1] ** -0.5)
    return model


def save_tiny(arch: str, path: Path, seed: int = 0, **settings: Any) -> Path:
    """Save such a model to folder `path` as config.json and model.safetensors (no tokenizer). Returns the folder."""
    tiny_model(arch, seed, **settings).save_pretrained(path)
    return path


def tiny_vllm_config(model: str, hf_config: Any, *, block_size: int = 8, **settings: Any) -> VllmConfig:
    """A float32 config for the CPU; `settings` go to ModelConfig."""
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": hf_config.max_position_embeddings} | settings
    model_config = ModelConfig(model=model, hf_config=hf_config, **fields)
    return VllmConfig(model_config=model_config, cache_config=CacheConfig(block_size=block_size))


@torch.inference_mode()
def prefill(model: nn.Module, vllm_config: VllmConfig, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits, [length, vocab], of each prompt, all computed in one step through pages that held NaN."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    block_size = vllm_config.cache_config.block_size
    needed = [-(-int(length) // block_size) for length in lengths]
    num_blocks = 1 + sum(needed)
    order = (1 + torch.randperm(num_blocks - 1)).to(torch.int32)
    table = torch.zeros(len(prompts), max(needed), dtype=torch.int32)
    for row, ids in enumerate(order.split(needed)):
        table[row, : len(ids)] = ids
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=torch.zeros_like(lengths),
        num_reqs=len(prompts),
        num_actual_tokens=len(positions),
        max_query_len=int(lengths.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table,
        slot_mapping=slots,
    )
    layers, metadata = collect_layers(model), {}
    for name, layer in layers.items():
        if layer.kv_sharing_target_layer_name is not None:
            layer.kv_cache = layers[layer.kv_sharing_target_layer_name].kv_cache
            metadata[name] = metadata[layer.kv_sharing_target_layer_name]
            continue
        spec, backend = layer.get_kv_cache_spec(vllm_config), layer.get_attn_backend()
        shape = backend.get_kv_cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        layer.kv_cache = torch.full(shape, torch.nan, dtype=getattr(torch, spec.dtype))
        builder = backend.get_builder_cls()(spec, [name], vllm_config, torch.device(vllm_config.device))
        metadata[name] = builder.build(0, common)
    input_ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    with set_forward_context(metadata, layers=layers, slot_mapping=dict.fromkeys(layers, slots)):
        hidden = model(input_ids, positions)
    return list(model.compute_logits(hidden).split(lengths.tolist()))  # type: ignore[operator]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors, against the largest value."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
