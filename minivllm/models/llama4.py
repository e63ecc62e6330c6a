"""Llama 4, its text part: chunks of local attention, layers without positions, experts in some or in all layers.

Most layers turn q and k and see only their own chunk. The others, as `no_rope_layers` says, see everything and turn
nothing; there q grows with the position instead, so that attention stays sharp over long sequences.

Mirrors `vllm/model_executor/models/llama4.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from minivllm.config import VllmConfig
from minivllm.layers.activation import get_act_and_mul
from minivllm.layers.fused_moe import FusedExperts
from minivllm.layers.linear import ReplicatedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.models.llama import (
    AttentionOptions,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    Rope,
)


class Llama4Rope(nn.Module):
    """cos and sin of the step's positions, and the factor on q where q and k are not turned, [num_tokens, 1, 1].

    Mirrors: none; each layer of vLLM computes the factor itself (`_get_attn_scale`).
    """

    def __init__(self, rotary_emb: nn.Module, floor_scale: float, attn_scale: float) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb
        self.floor_scale, self.attn_scale = floor_scale, attn_scale

    def forward(self, positions: Tensor) -> Rope:  # [num_tokens] int64
        cos, sin = self.rotary_emb(positions)
        floors = torch.floor((positions.float() + 1.0) / self.floor_scale)
        return cos, sin, (floors.log1p() * self.attn_scale + 1.0).view(-1, 1, 1)


class Llama4Attention(LlamaAttention):
    """Turned layers: rotary embedding, then each head of q and k to a root mean square of 1. Others: q by a factor.

    Mirrors: vllm/model_executor/models/llama4.py Llama4Attention.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(hf_config, options, vllm_config=vllm_config, prefix=prefix)
        self.l2_eps: float | None = hf_config.rms_norm_eps if hf_config.use_qk_norm else None
        self.tempered: bool = hf_config.attn_temperature_tuning

    @override
    def turn(self, qk: Tensor, rope: Rope) -> Tensor:  # [num_tokens, num_heads + num_kv_heads, head_size] -> the same
        if self.rope_kind != "none":
            qk = super().turn(qk, rope)
            return qk if self.l2_eps is None else F.rms_norm(qk.float(), (self.head_size,), None, self.l2_eps).to(qk)
        if not self.tempered:
            return qk
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return torch.cat(((q * rope[2]).to(q.dtype), k), dim=1)


class Llama4MoE(nn.Module):
    """One expert for each token, fed with the token times the sigmoid of its score, and an expert shared by all.

    Mirrors: vllm/model_executor/models/llama4.py Llama4MoE.
    Leaves out: more than one expert for each token, which no checkpoint has.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        num_experts, hidden_size = hf_config.num_local_experts, hf_config.hidden_size
        if hf_config.num_experts_per_tok != 1:
            raise ValueError(f"num_experts_per_tok must be 1 in Llama 4, got {hf_config.num_experts_per_tok}")
        self.router = ReplicatedLinear(hidden_size, num_experts)
        act = get_act_and_mul(hf_config.hidden_act)
        self.experts = FusedExperts(num_experts, hidden_size, hf_config.intermediate_size, act)
        self.shared_expert = LlamaMLP(hf_config)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        score, expert = self.router(hidden).max(-1, keepdim=True)
        # The weight goes into the expert, not onto what comes out of it.
        routed = self.experts(hidden * score.float().sigmoid().to(hidden.dtype), expert, torch.ones_like(score))
        return cast(Tensor, self.shared_expert(hidden).add_(routed))


class Llama4DecoderLayer(nn.Module):
    """Attention, then experts or a plain MLP, each behind a norm and added to the residual stream.

    Mirrors: vllm/model_executor/models/llama4.py Llama4DecoderLayer.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.self_attn = Llama4Attention(hf_config, options, vllm_config=vllm_config, prefix=f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)
        sparse = int(prefix.rpartition(".")[2]) in hf_config.moe_layers
        self.feed_forward = Llama4MoE(hf_config) if sparse else LlamaMLP(hf_config, hf_config.intermediate_size_mlp)

    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.self_attn(self.input_layernorm(hidden), rope).add_(hidden)
        return cast(Tensor, self.feed_forward(self.post_attention_layernorm(hidden)).add_(hidden))


class Llama4Model(LlamaModel):
    """Embedding, layers, last norm.

    Mirrors: vllm/model_executor/models/llama4.py Llama4Model.
    """

    layer_cls = Llama4DecoderLayer

    def __init__(self, options: list[AttentionOptions], *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(options, vllm_config=vllm_config, prefix=prefix)
        hf_config = vllm_config.model_config.hf_config
        if hf_config.floor_scale < 1:
            raise ValueError(f"floor_scale must be at least 1 token, got {hf_config.floor_scale}")
        rope = Llama4Rope(self.rotary_embs[0], hf_config.floor_scale, hf_config.attn_scale)
        self.rotary_embs = nn.ModuleList([rope])


class Llama4ForCausalLM(LlamaForCausalLM):
    """Llama 4 with its output projection.

    Mirrors: vllm/model_executor/models/llama4.py Llama4ForCausalLM.
    Leaves out: images, quantized checkpoints, expert parallelism.
    """

    model_cls = Llama4Model

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        bias, chunk = hf_config.attention_bias, layer_chunk(hf_config, layer_idx)
        return AttentionOptions(
            qkv_bias=bias,
            output_bias=bias,
            attention_chunk_size=chunk,
            rope="interleaved" if hf_config.no_rope_layers[layer_idx] else "none",
        )


def layer_chunk(hf_config: Any, layer_idx: int) -> int | None:
    """The chunk of one layer by the config's `layer_types`, in tokens; None where it sees everything."""
    kinds, chunk = hf_config.layer_types, hf_config.attention_chunk_size
    for name in ("layer_types", "no_rope_layers"):
        entries = len(getattr(hf_config, name))
        if entries < hf_config.num_hidden_layers:
            raise ValueError(f"{name} has {entries} entries for num_hidden_layers={hf_config.num_hidden_layers}")
    if kinds[layer_idx] == "full_attention":
        return None
    if kinds[layer_idx] != "chunked_attention":
        raise ValueError(
            f"layer {layer_idx} is a {kinds[layer_idx]!r} layer; this model has full_attention and chunked_attention"
        )
    if chunk is None or chunk < 1:
        raise ValueError(
            f"layer {layer_idx} is a chunked_attention layer, but attention_chunk_size is {chunk}; it must be 1 or more"
        )
    return int(chunk)
