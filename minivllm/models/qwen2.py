"""Qwen2: Llama with biases on q, k and v, and sliding windows in the layers that the config names.

Mirrors `vllm/model_executor/models/qwen2.py`, without dual chunk attention.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from minivllm.models.llama import AttentionOptions, LlamaForCausalLM, layer_window


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with q, k and v biases.

    Mirrors: vllm/model_executor/models/qwen2.py Qwen2ForCausalLM.
    """

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=True, sliding_window=layer_window(hf_config, layer_idx))
