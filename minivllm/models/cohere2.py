"""Cohere2 (Command R7B): attention and MLP side by side on one norm, and rotary embedding only where a window slides.

Mirrors `vllm/model_executor/models/commandr.py`, whose class serves Cohere 1 and 2.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from typing_extensions import override

from minivllm.config import VllmConfig
from minivllm.layers.norm import RMSNorm
from minivllm.models.llama import (
    AttentionOptions,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
    Rope,
    layer_window,
)


class LayerNorm(RMSNorm):
    """LayerNorm without a bias, which is RMSNorm of what is left when the mean is taken away.

    Mirrors: vllm/model_executor/models/commandr.py LayerNorm.
    """

    @override
    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size], any float dtype -> the same
        wide = x.float()
        return super().forward(wide - wide.mean(-1, keepdim=True)).to(x.dtype)


class Cohere2DecoderLayer(nn.Module):
    """Attention and MLP, both on the same normed input, and both added to the residual stream.

    Mirrors: vllm/model_executor/models/commandr.py CohereDecoderLayer.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = options.norm(hf_config.hidden_size, hf_config.layer_norm_eps)
        self.self_attn = LlamaAttention(hf_config, options, vllm_config=vllm_config, prefix=f"{prefix}.self_attn")
        self.mlp = LlamaMLP(hf_config)

    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        normed = self.input_layernorm(hidden)
        return cast(Tensor, self.self_attn(normed, rope).add_(hidden).add_(self.mlp(normed)))


class Cohere2Model(LlamaModel):
    """Embedding, layers, last norm.

    Mirrors: vllm/model_executor/models/commandr.py CohereModel.
    """

    layer_cls = Cohere2DecoderLayer


class Cohere2ForCausalLM(LlamaForCausalLM):
    """Cohere2 with its output projection, the logits scaled.

    Mirrors: vllm/model_executor/models/commandr.py CohereForCausalLM.
    Leaves out: Cohere 1 with its normed q and k, quantized and LoRA checkpoints.
    """

    model_cls = Cohere2Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logit_scale = float(vllm_config.model_config.hf_config.logit_scale)

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        bias, window = hf_config.attention_bias, layer_window(hf_config, layer_idx)
        return AttentionOptions(
            qkv_bias=bias,
            output_bias=bias,
            norm=LayerNorm,
            sliding_window=window,
            rope="none" if window is None else "interleaved",
        )

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, hidden_size] -> [n, vocab_size]
        return super().compute_logits(hidden).mul_(self.logit_scale)
