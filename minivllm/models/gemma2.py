"""Gemma 2: Llama with norms before and after attention and MLP, soft caps, and every second layer on a sliding window.

Mirrors `vllm/model_executor/models/gemma2.py`.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import override

from minivllm.config import VllmConfig
from minivllm.layers.norm import RMSNorm
from minivllm.models.llama import (
    AttentionOptions,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    Rope,
    layer_window,
)


class GemmaRMSNorm(RMSNorm):
    """RMSNorm whose stored weight is the factor minus one.

    Mirrors: vllm/model_executor/layers/layernorm.py GemmaRMSNorm.
    Leaves out: the fused residual addition.
    """

    offset = 1.0

    @override
    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size], any float dtype -> the same
        if self._scale is not None:
            return super().forward(x)
        factor = self.weight.float() + self.offset  # in 16 bits the sum would lose what the weight holds
        return nn.functional.rms_norm(x.float(), self.shape, factor, self.eps).to(x.dtype)


class Gemma2DecoderLayer(LlamaDecoderLayer):
    """Attention and MLP, each between two norms and then added to the residual stream.

    Mirrors: vllm/model_executor/models/gemma2.py Gemma2DecoderLayer.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(hf_config, options, vllm_config=vllm_config, prefix=prefix)
        self.pre_feedforward_layernorm = options.norm(hf_config.hidden_size, hf_config.rms_norm_eps)
        self.post_feedforward_layernorm = options.norm(hf_config.hidden_size, hf_config.rms_norm_eps)

    @override
    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        attended = self.self_attn(self.input_layernorm(hidden), rope)
        hidden = self.post_attention_layernorm(attended).add_(hidden)
        mixed = self.mlp(self.pre_feedforward_layernorm(hidden))
        return cast(Tensor, self.post_feedforward_layernorm(mixed).add_(hidden))


class Gemma2Model(LlamaModel):
    """Embeddings times the root of their size, and Gemma's layers.

    Mirrors: vllm/model_executor/models/gemma2.py Gemma2Model.
    """

    layer_cls = Gemma2DecoderLayer

    @staticmethod
    @override
    def embed_scale(hf_config: Any) -> float:
        return float(hf_config.hidden_size**0.5)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Gemma 2 with its output projection, the logits softly capped.

    Mirrors: vllm/model_executor/models/gemma2.py Gemma2ForCausalLM.
    Leaves out: bidirectional attention.
    """

    model_cls: type[LlamaModel] = Gemma2Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.soft_cap: float | None = vllm_config.model_config.hf_config.final_logit_softcapping
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"final_logit_softcapping must be above 0 or null, got {self.soft_cap}")

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        return gemma_options(hf_config, layer_idx, logits_soft_cap=hf_config.attn_logit_softcapping)

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size] -> [n, vocab_size]
        logits = super().compute_logits(hidden)
        if self.soft_cap is None:
            return logits
        return logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def gemma_options(hf_config: Any, layer_idx: int, **more: Any) -> AttentionOptions:
    """What attention has in Gemma 2 and in Gemma 3, and `more`."""
    if getattr(hf_config, "use_bidirectional_attention", False):
        raise ValueError("use_bidirectional_attention is true: such a model embeds texts, it does not generate")
    if hf_config.query_pre_attn_scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar must be above 0, got {hf_config.query_pre_attn_scalar}")
    return AttentionOptions(
        qkv_bias=hf_config.attention_bias,
        output_bias=hf_config.attention_bias,
        sliding_window=layer_window(hf_config, layer_idx),
        scale=hf_config.query_pre_attn_scalar**-0.5,
        norm=GemmaRMSNorm,
        **more,
    )
