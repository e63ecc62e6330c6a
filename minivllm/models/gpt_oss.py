"""GPT-OSS: Llama with attention sinks, a sliding window in every second layer, and a mixture of experts as MLP.

Experts are run unquantized, as `layers/fused_moe.py` does it; the published checkpoints in MXFP4 are refused when they
are loaded, as every quantized one. Mirrors `vllm/model_executor/models/gpt_oss.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from minivllm.layers.fused_moe import FusedExperts
from minivllm.layers.linear import ReplicatedLinear
from minivllm.models.llama import AttentionOptions, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel, layer_window


class SwigluOAIAndMul(nn.Module):
    """gate * sigmoid(alpha * gate) * (up + 1), both clamped first; gate and up alternate.

    Mirrors: vllm/model_executor/layers/activation.py SwigluOAIAndMul.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:  # [n, 2 * size] -> [n, size]
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class GptOssMoE(nn.Module):
    """A router, and experts of which each token runs the best `num_experts_per_tok`, weighed by a softmax over these.

    Mirrors: vllm/model_executor/models/gpt_oss.py MLPBlock.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        num_experts, hidden_size = hf_config.num_local_experts, hf_config.hidden_size
        self.top_k = checked_top_k(hf_config)
        self.router = ReplicatedLinear(hidden_size, num_experts, bias=True)
        act = SwigluOAIAndMul(getattr(hf_config, "swiglu_alpha", 1.702), getattr(hf_config, "swiglu_limit", 7.0))
        self.experts = FusedExperts(num_experts, hidden_size, hf_config.intermediate_size, act, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        scores, experts = self.router(hidden).topk(self.top_k, dim=-1)
        return cast(Tensor, self.experts(hidden, experts, scores.softmax(-1)))


class GptOssDecoderLayer(LlamaDecoderLayer):
    """Attention and experts, each behind a norm and added to the residual stream.

    Mirrors: vllm/model_executor/models/gpt_oss.py TransformerBlock.
    """

    mlp_cls = GptOssMoE


class GptOssModel(LlamaModel):
    """Embedding, layers, last norm.

    Mirrors: vllm/model_executor/models/gpt_oss.py GptOssModel.
    """

    layer_cls = GptOssDecoderLayer


class GptOssForCausalLM(LlamaForCausalLM):
    """GPT-OSS with its output projection.

    Mirrors: vllm/model_executor/models/gpt_oss.py GptOssForCausalLM.
    Leaves out: quantized (MXFP4) experts, expert parallelism.
    """

    model_cls = GptOssModel

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        bias, window = getattr(hf_config, "attention_bias", True), layer_window(hf_config, layer_idx)
        return AttentionOptions(qkv_bias=bias, output_bias=bias, sinks=True, sliding_window=window)


def checked_top_k(hf_config: Any) -> int:
    """How many experts a token runs. Raises ValueError where the config asks for more than there are, or for none."""
    top_k, num_experts = int(hf_config.num_experts_per_tok), int(hf_config.num_local_experts)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"num_experts_per_tok must be 1 to num_local_experts={num_experts}, got {top_k}")
    return top_k
