"""Mistral: Llama where every layer sees a sliding window only, if the config has one.

Mirrors `vllm/model_executor/models/mistral.py`, without Mistral's own checkpoint and tokenizer format.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from minivllm.models.llama import AttentionOptions, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window in every layer.

    Mirrors: vllm/model_executor/models/mistral.py MistralForCausalLM.
    """

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=hf_config.sliding_window)
