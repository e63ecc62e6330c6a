"""The Llama family: Llama, SmolLM2, and, through `AttentionOptions`, Mistral, Qwen2, Qwen3 and Gemma.

One pass takes every scheduled token of the batch as one flat row: [num_tokens], whoever it belongs to. Only the
attention layers know which tokens belong together, and they learn it from the forward context.

Mirrors `vllm/model_executor/models/llama.py`, without pipeline parallelism, LoRA and quantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from minivllm.attention.layer import Attention
from minivllm.config import VllmConfig
from minivllm.layers.activation import get_act_and_mul
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import MergedLinear, ReplicatedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import apply_rotary, apply_rotary_interleaved, get_rope, rope_layer_types
from minivllm.models.weights import load_weights

Rope = tuple[Tensor, ...]  # cos and sin of the step's positions, each [num_tokens, 1, rotary_dim]; a family may add


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What the attention of one layer has beyond plain Llama's.

    scale: of the scores; None is 1 / sqrt(head size). norm: the class of every norm in the layer. sinks: one learned
    score a head, which takes its share of attention and gives nothing. rope: which dimensions turn as a pair: i and
    i + half the head, neighbours, or none.

    Mirrors: none; vLLM writes an attention class for each model.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    norm: type[RMSNorm] = RMSNorm
    attention_chunk_size: int | None = None
    sinks: bool = False
    rope: Literal["halves", "interleaved", "none"] = "halves"

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 token or null, got {self.sliding_window}")


def layer_window(hf_config: Any, layer_idx: int) -> int | None:
    """The sliding window of one layer by the config's `layer_types`; None where it sees everything."""
    if len(hf_config.layer_types) != hf_config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(hf_config.layer_types)} layers, but num_hidden_layers is"
            f" {hf_config.num_hidden_layers}"
        )
    kind, window = hf_config.layer_types[layer_idx], hf_config.sliding_window
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise ValueError(f"layer {layer_idx} is a {kind!r} layer; this model has full_attention and sliding_attention")
    if window is None or window < 1:
        raise ValueError(
            f"layer {layer_idx} is a sliding_attention layer, but sliding_window is {window}: it must be at least 1"
        )
    return int(window)


class LlamaAttention(nn.Module):
    """Projections, rotary embedding and attention of one layer.

    Mirrors: vllm/model_executor/models/llama.py LlamaAttention.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        hidden_size = hf_config.hidden_size
        self.num_heads, self.num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        self.head_size = head_size_of(hf_config)
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.qk_size = q_size + kv_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(hidden_size, parts, bias=options.qkv_bias)
        self.o_proj = ReplicatedLinear(q_size, hidden_size, bias=options.output_bias)
        self.qk_norm = options.qk_norm
        if self.qk_norm:
            self.q_norm = options.norm(self.head_size, hf_config.rms_norm_eps)
            self.k_norm = options.norm(self.head_size, hf_config.rms_norm_eps)
        self.rope_kind = options.rope
        self.sinks = nn.Parameter(torch.empty(self.num_heads), requires_grad=False) if options.sinks else None
        self.attn = Attention(
            self.num_heads,
            self.head_size,
            self.head_size**-0.5 if options.scale is None else options.scale,
            self.num_kv_heads,
            vllm_config=vllm_config,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=options.sliding_window,
            attention_chunk_size=options.attention_chunk_size,
            sinks=self.sinks,
            logits_soft_cap=options.logits_soft_cap,
        )

    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        qkv = self.qkv_proj(hidden)
        # The heads of q and k lie side by side, so they are turned together.
        qk = qkv[:, : self.qk_size].view(-1, self.num_heads + self.num_kv_heads, self.head_size)
        if self.qk_norm:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        qk = self.turn(qk, rope)
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, self.qk_size :]
        return cast(Tensor, self.o_proj(self.attn(q, k, v)))

    def turn(self, qk: Tensor, rope: Rope) -> Tensor:  # [num_tokens, num_heads + num_kv_heads, head_size] -> the same
        """Tell the heads of q and k their positions."""
        if self.rope_kind == "none":
            return qk
        return (apply_rotary if self.rope_kind == "halves" else apply_rotary_interleaved)(qk, *rope[:2])


class LlamaMLP(nn.Module):
    """Gated MLP: down(act(gate(x)) * up(x)). size: of what lies between, None for the config's intermediate_size.

    Mirrors: vllm/model_executor/models/llama.py LlamaMLP.
    """

    def __init__(self, hf_config: Any, size: int | None = None) -> None:
        super().__init__()
        hidden_size, size = hf_config.hidden_size, size or hf_config.intermediate_size
        bias = getattr(hf_config, "mlp_bias", False)
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": size, "up_proj": size}, bias)
        self.down_proj = ReplicatedLinear(size, hidden_size, bias)
        self.act_fn = get_act_and_mul(getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_up_proj(hidden))))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream.

    Mirrors: vllm/model_executor/models/llama.py LlamaDecoderLayer.
    """

    mlp_cls: type[nn.Module] = LlamaMLP

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = options.norm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.self_attn = LlamaAttention(hf_config, options, vllm_config=vllm_config, prefix=f"{prefix}.self_attn")
        self.post_attention_layernorm = options.norm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.mlp = self.mlp_cls(hf_config)

    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        hidden = self.self_attn(self.input_layernorm(hidden), rope).add_(hidden)
        return cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)).add_(hidden))


class LlamaModel(nn.Module):
    """Embedding, layers, last norm. Rotary tables are one for all layers, or one a layer type.

    Mirrors: vllm/model_executor/models/llama.py LlamaModel.
    """

    layer_cls: type[nn.Module] = LlamaDecoderLayer

    def __init__(self, options: list[AttentionOptions], *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        hf_config = model_config.hf_config
        self.embed_tokens = VocabEmbedding(hf_config.vocab_size, hf_config.hidden_size, self.embed_scale(hf_config))
        kinds: list[str | None] = [*rope_layer_types(hf_config)]
        self.rotary_embs = nn.ModuleList(
            get_rope(
                hf_config,
                head_size=head_size_of(hf_config),
                max_position=model_config.max_model_len,
                dtype=getattr(torch, model_config.dtype),
                device=torch.device(vllm_config.device),
                layer_type=kind,
            )
            for kind in kinds or [None]
        )
        self.rope_index = [kinds.index(kind) for kind in hf_config.layer_types] if kinds else [0] * len(options)
        self.layers = nn.ModuleList(
            self.layer_cls(hf_config, each, vllm_config=vllm_config, prefix=f"{prefix}.layers.{index}")
            for index, each in enumerate(options)
        )
        self.norm = options[0].norm(hf_config.hidden_size, norm_eps_of(hf_config))

    @staticmethod
    def embed_scale(hf_config: Any) -> float:
        """The factor on embeddings of token ids."""
        return 1.0

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens] int32 or int64
        positions: Tensor,  # [num_tokens] int64
        inputs_embeds: Tensor | None = None,  # [num_tokens, hidden_size], instead of input_ids
    ) -> Tensor:  # [num_tokens, hidden_size]
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        ropes = [each(positions) for each in self.rotary_embs]
        for layer, index in zip(self.layers, self.rope_index, strict=True):
            hidden = layer(hidden, ropes[index])
        return cast(Tensor, self.norm(hidden))


class LlamaForCausalLM(nn.Module):
    """A Llama model with its output projection.

    Mirrors: vllm/model_executor/models/llama.py LlamaForCausalLM.
    Leaves out: pipeline parallelism, LoRA, speculative heads, Mistral's own checkpoint format.
    """

    model_cls: type[LlamaModel] = LlamaModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        hf_config = vllm_config.model_config.hf_config
        options = [self.attention_options(hf_config, index) for index in range(hf_config.num_hidden_layers)]
        self.model = self.model_cls(options, vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        self.lm_head = LMHead(hf_config.hidden_size, hf_config.vocab_size)
        if hf_config.tie_word_embeddings:
            self.lm_head.tie_weights(self.model.embed_tokens)

    @staticmethod
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        """What the attention of one layer has; other families override this."""
        bias = getattr(hf_config, "attention_bias", False)
        return AttentionOptions(qkv_bias=bias, output_bias=bias)

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens] int32 or int64
        positions: Tensor,  # [num_tokens] int64
        inputs_embeds: Tensor | None = None,  # [num_tokens, hidden_size], instead of input_ids
    ) -> Tensor:  # [num_tokens, hidden_size]
        return cast(Tensor, self.model(input_ids, positions, inputs_embeds))

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size] -> [n, vocab_size]
        return cast(Tensor, self.lm_head(hidden))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter from (checkpoint name, tensor) pairs; a name too many or too few raises ValueError."""
        load_weights(self, weights)


def head_size_of(hf_config: Any) -> int:
    """Dimensions of one head: the config's own `head_dim`, else an equal share of the hidden size."""
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)


def norm_eps_of(hf_config: Any) -> float:
    """What norms add to a variance: configs of LayerNorm models have another name for it."""
    return float(hf_config.layer_norm_eps if hasattr(hf_config, "layer_norm_eps") else hf_config.rms_norm_eps)
