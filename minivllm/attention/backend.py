"""What an attention backend is: three classes, and the metadata that joins them.

    AttentionBackend          says what it can do, and which classes do it (never instantiated)
    AttentionMetadataBuilder  one a group of layers: CommonAttentionMetadata -> the backend's metadata, once a step
    AttentionImpl             one a layer: writes K and V into the layer's pages, then attends

Subclasses are checked when they are defined (`override_check.py`), because the runner and the base classes call them
by the names written here. Mirrors vllm/v1/attention/backend.py (0.32.0). Left out: MLA and sparse base classes (they
come with their layers), quantised queries, outputs and caches, context parallelism, cascade attention, speculation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.attention.override_check import ChecksOverrides
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import KVCacheSpec

# What not every backend can do. The first five are options of AttentionImpl, by the same names.
AttentionFeature = Literal[
    "sliding_window", "attention_chunk_size", "logits_soft_cap", "alibi_slopes", "sinks", "non_causal", "kv_sharing"
]


class AttentionMetadata:
    """Base of what a builder returns: everything its impl needs to know of one step.

    Mirrors: vllm/v1/attention/backend.py AttentionMetadata.
    """

    __slots__ = ()


M = TypeVar("M", bound=AttentionMetadata)


class AttentionBackend(ChecksOverrides, ABC):
    """What a backend supports and the classes it is made of. An empty tuple means no limit.

    Mirrors: vllm/v1/attention/backend.py AttentionBackend.
    Leaves out: stride orders, cache dtypes other than the model's, device capabilities.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    supported_devices: ClassVar[tuple[str, ...]] = ()  # torch.device types
    supported_head_sizes: ClassVar[tuple[int, ...]] = ()
    supported_features: ClassVar[frozenset[AttentionFeature]] = frozenset()

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """The name by which users choose it, in capitals."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The class that computes."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class that prepares a step."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Shape of one layer's pages; num_blocks comes first."""

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, device: torch.device, features: Collection[AttentionFeature] = ()
    ) -> list[str]:
        """Why this backend cannot serve such a layer; empty if it can. An unknown feature raises ValueError."""
        if unknown := set(features) - set(get_args(AttentionFeature)):
            raise ValueError(f"unknown attention features {sorted(unknown)}; known are {get_args(AttentionFeature)}")
        name, reasons = cls.get_name(), []
        if cls.supported_dtypes and dtype not in cls.supported_dtypes:
            reasons.append(f"{name} has no kernel for {dtype}, only for {_names(cls.supported_dtypes)}")
        if cls.supported_devices and device.type not in cls.supported_devices:
            reasons.append(f"{name} does not run on {device.type!r}, only on {_names(cls.supported_devices)}")
        if cls.supported_head_sizes and head_size not in cls.supported_head_sizes:
            reasons.append(f"{name} has no kernel for head_size={head_size}: only {_names(cls.supported_head_sizes)}")
        if missing := sorted(set(features) - cls.supported_features):
            reasons.append(f"{name} does not support {_names(missing)}")
        return reasons


def _names(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


class AttentionMetadataBuilder(ChecksOverrides, ABC, Generic[M]):
    """Turns the batch into what one backend needs, once a step for all layers of an attention group.

    Mirrors: vllm/v1/attention/backend.py AttentionMetadataBuilder.
    Leaves out: drafting, cascade attention, levels of CUDA-graph support.
    """

    # If set, rows of at most so many query tokens are brought to the front of the batch.
    reorder_batch_threshold: int | None = None
    # Whether update_block_table may re-point metadata at another group's table instead of building anew.
    supports_update_block_table: ClassVar[bool] = False

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Metadata of one step. common_prefix_len: tokens that all requests share at their start, 0 if unknown.
        fast_build: few layers will use the result, so that building fast matters more than computing fast."""

    def update_block_table(
        self,
        metadata: M,
        blk_table: Tensor,  # [num_reqs, max_blocks] int32
        slot_mapping: Tensor,  # [num_tokens] int64, -1 = no slot
    ) -> M:
        """The same step for a group that differs only by its table; `metadata` itself stays as it is."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot re-point metadata at another block table: build() anew for each group"
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata whose tensors a captured graph goes on reading; by default what build() makes."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


@dataclass(eq=False)
class AttentionImpl(ChecksOverrides, ABC, Generic[M]):
    """Computes attention for one layer.

    Mirrors: vllm/v1/attention/backend.py AttentionImpl.
    Leaves out: quantised outputs, fused rope and cache writes, context parallelism.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    _: KW_ONLY
    sliding_window: int | None = None  # tokens seen, the query's own included
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None  # [num_heads] float32
    sinks: Tensor | None = None  # [num_heads]: a logit that takes part in the softmax and has no value

    @abstractmethod
    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,  # [num_tokens, num_heads, head_size]
        key: Tensor | None,  # [num_tokens, num_kv_heads, head_size]
        value: Tensor | None,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: Tensor,  # get_kv_cache_shape()
        attn_metadata: M,
        output: Tensor,  # [num_tokens, num_heads, head_size], every row of it is written
    ) -> Tensor:
        """Attend over the pages, where K and V of this step already are. Returns `output`.

        key and value are this step's, or None in a layer that shares another's cache. Rows past the step's tokens
        are padding: their output is 0.
        """

    @abstractmethod
    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,  # [>= num_tokens, num_kv_heads, head_size]
        value: Tensor,  # [>= num_tokens, num_kv_heads, head_size]
        kv_cache: Tensor,
        slot_mapping: Tensor,  # [num_tokens] int64, -1 = no slot, written nowhere
        attn_metadata: M,
    ) -> None:
        """Write K and V of this step to their slots."""

    def reserve_workspace(self, query: Tensor, vllm_config: VllmConfig) -> None:
        """Take the memory that the largest step will need. Called in the profile run, which has no metadata and no
        cache, so that what is left for the KV cache is measured truthfully. query: as in forward()."""
