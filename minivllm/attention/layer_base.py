"""What the worker may ask of a layer that keeps a KV cache or a state, whatever kind of layer it is.

Mirrors vllm/model_executor/layers/attention_layer_base.py (0.32.0).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from minivllm.attention.backend import AttentionBackend
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import KVCacheSpec


class AttentionLayerBase(nn.Module):
    """A layer known by name in the forward context, which owns its pages.

    layer_name: its dotted path in the model. num_heads: query heads, 0 where the layer has none. kv_cache: its pages,
    empty until the runner binds them. kv_sharing_target_layer_name: the layer whose pages it reads, if not its own.

    Mirrors: vllm/model_executor/layers/attention_layer_base.py AttentionLayerBase.
    """

    num_heads: int
    kv_cache: Tensor
    kv_sharing_target_layer_name: str | None = None

    def __init__(self, layer_name: str, num_heads: int = 0) -> None:
        super().__init__()
        if not layer_name:
            raise ValueError(
                f"{type(self).__name__} needs a name, by which it finds its cache: pass prefix, the layer's dotted"
                " path in the model"
            )
        self.layer_name = layer_name
        self.num_heads = num_heads
        self.kv_cache = torch.empty(0, device="cpu")

    @abstractmethod
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What the layer keeps, or None if it keeps nothing of its own."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_kv_cache_spec")

    def get_page_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """What the pages that it reads hold, whether they are its own or another layer's."""
        return self.get_kv_cache_spec(vllm_config)

    @abstractmethod
    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that shapes its pages and builds its metadata."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_attn_backend")
