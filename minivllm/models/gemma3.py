"""Gemma 3, its text part: Gemma 2 with normed q and k, no cap on scores, and a rope setting for each layer type.

Five layers of a sliding window to one that sees everything, as `layer_types` says. Mirrors
`vllm/model_executor/models/gemma3.py`.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from minivllm.models.gemma2 import Gemma2ForCausalLM, gemma_options
from minivllm.models.llama import AttentionOptions


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3 with its output projection.

    Mirrors: vllm/model_executor/models/gemma3.py Gemma3ForCausalLM.
    Leaves out: images, bidirectional attention.
    """

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        return gemma_options(hf_config, layer_idx, qk_norm=True)
