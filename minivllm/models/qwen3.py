"""Qwen3: Llama with a norm on each head of q and k, and sliding windows in the layers that the config names.

Mirrors `vllm/model_executor/models/qwen3.py`, without dual chunk attention.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from minivllm.models.llama import AttentionOptions, LlamaForCausalLM, layer_window


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normed q and k.

    Mirrors: vllm/model_executor/models/qwen3.py Qwen3ForCausalLM.
    """

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        bias = hf_config.attention_bias
        window = layer_window(hf_config, layer_idx)
        return AttentionOptions(qkv_bias=bias, output_bias=bias, qk_norm=True, sliding_window=window)
