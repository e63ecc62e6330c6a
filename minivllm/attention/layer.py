"""The attention layer that models call: query, key, value in, attention out, and nothing of caches or batches.

    forward ─► unified_kv_cache_update        writes K and V into the layer's pages, returns an empty tensor
            └► unified_attention_with_output  takes that tensor, attends over the pages, fills `output`

Both are opaque to `torch.compile`: they find metadata, slots and pages by the layer's name in the forward context, so
a model compiles with fullgraph=True and nothing of a step becomes part of the graph. The empty tensor is an artificial
dependency: without it a compiler could attend before the write, as the two ops share no data that it can see.

Ops are made with torch.library.Library: one call costs 2.5 µs, against 28 µs with torch.library.custom_op.
Mirrors vllm/model_executor/layers/attention/attention.py (0.32.0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from minivllm.attention.backend import AttentionBackend, AttentionImpl
from minivllm.attention.layer_base import AttentionLayerBase
from minivllm.attention.selector import get_attn_backend
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from minivllm.forward_context import get_attention_context


class Attention(AttentionLayerBase):
    """Multi-head, grouped-query or multi-query attention over paged K and V.

    scale: factor of the scores. per_layer_sliding_window: tokens a query sees, itself included. attention_chunk_size:
    a query sees only its own chunk. kv_sharing_target_layer_name: an earlier layer whose pages are read instead; then
    nothing is written, and key and value may be None.

    Mirrors: vllm/model_executor/layers/attention/attention.py Attention.
    Leaves out: quantised caches, encoder attention, V heads of another size.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        alibi_slopes: Sequence[float] | None = None,
        per_layer_sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        sinks: Tensor | None = None,  # [num_heads], often a parameter that is loaded later
        attention_chunk_size: int | None = None,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        super().__init__(prefix, num_heads)
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = per_layer_sliding_window
        self.attention_chunk_size = attention_chunk_size
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.vllm_config = vllm_config
        options: dict[str, Any] = {
            "sliding_window": per_layer_sliding_window,
            "attention_chunk_size": attention_chunk_size,
            "logits_soft_cap": logits_soft_cap,
            # On the layer's device, whatever the default device is while a model is built.
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, device=vllm_config.device),
            "sinks": sinks,
        }
        sizes = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
        for name, number in {**sizes, **options}.items():
            if isinstance(number, int | float) and number <= 0:
                raise ValueError(f"{prefix}: {name} must be above 0, got {number}")
            if isinstance(number, Tensor) and number.shape != (num_heads,):
                raise ValueError(f"{prefix}: {name} must have one value a head, {num_heads}, got {list(number.shape)}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{prefix}: num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        if per_layer_sliding_window is not None and attention_chunk_size is not None:
            raise ValueError(f"{prefix}: a layer has either a sliding window or a chunk, not both")
        if kv_sharing_target_layer_name == prefix:
            raise ValueError(f"{prefix} cannot share its own KV cache: name an earlier layer, or None")
        features: list[Any] = [name for name, value in options.items() if value is not None]
        if kv_sharing_target_layer_name is not None:
            features.append("kv_sharing")
        dtype = getattr(torch, vllm_config.model_config.dtype)
        name = vllm_config.attention_backend
        self.attn_backend = get_attn_backend(head_size, dtype, vllm_config.device, name, features)
        make_impl = self.attn_backend.get_impl_cls()
        self.impl: AttentionImpl[Any] = make_impl(num_heads, head_size, scale, num_kv_heads, **options)

    @override
    def forward(
        self,
        query: Tensor,  # [num_tokens, num_heads * head_size]
        key: Tensor | None,  # [num_tokens, num_kv_heads * head_size]
        value: Tensor | None,  # [num_tokens, num_kv_heads * head_size]
    ) -> Tensor:  # [num_tokens, num_heads * head_size]
        query = query.view(-1, self.num_heads, self.head_size)
        written: Tensor | None = None
        if self.kv_sharing_target_layer_name is None:
            if key is None or value is None:
                raise ValueError(f"{self.layer_name} writes its own KV cache: key and value must not be None")
            key = key.view(-1, self.num_kv_heads, self.head_size)
            value = value.view(-1, self.num_kv_heads, self.head_size)
            written = _kv_cache_update(key, value, self.layer_name)
        else:
            key = value = None  # what this layer projects is not what its target's pages hold
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _attention_with_output(query, key, value, output, self.layer_name, written)
        return output.view(-1, self.num_heads * self.head_size)

    @override
    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    @override
    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return None if self.kv_sharing_target_layer_name is not None else self.get_page_spec(vllm_config)

    @override
    def get_page_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        page: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": vllm_config.model_config.dtype,
        }
        keep_all = vllm_config.cache_config.disable_hybrid_kv_cache_manager
        if self.sliding_window is not None and not keep_all:
            return SlidingWindowSpec(**page, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None and not keep_all:
            return ChunkedLocalAttentionSpec(**page, attention_chunk_size=self.attention_chunk_size)
        return FullAttentionSpec(
            **page, sliding_window=self.sliding_window, attention_chunk_size=self.attention_chunk_size
        )

    @override
    def extra_repr(self) -> str:
        heads = f"{self.layer_name}, heads={self.num_heads}/{self.num_kv_heads}, head_size={self.head_size}"
        return f"{heads}, backend={self.attn_backend.get_name()}"


def unified_kv_cache_update(key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    """Write K and V, [num_tokens, num_kv_heads, head_size], to the slots of this step.

    Mirrors: vllm/model_executor/layers/attention/attention.py unified_kv_cache_update.
    """
    metadata, layer, kv_cache, slot_mapping = get_attention_context(layer_name)
    if metadata is not None:
        if slot_mapping is None:
            raise RuntimeError(
                f"layer {layer_name!r} has metadata but no slot mapping in this forward: give set_forward_context"
                " slot_mapping with an entry for each layer"
            )
        impl = cast(Attention, layer).impl
        impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping, metadata)
    return key.new_empty(0)


def unified_attention_with_output(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    output: Tensor,
    layer_name: str,
    kv_cache_dummy_dep: Tensor | None = None,
) -> None:
    """Attend over the layer's pages into `output`; query and output are [num_tokens, num_heads, head_size].

    Without metadata (profile run) the output is zeros, and the workspace of the largest step is taken.

    Mirrors: vllm/model_executor/layers/attention/attention.py unified_attention_with_output.
    """
    metadata, layer, kv_cache, _ = get_attention_context(layer_name)
    impl = cast(Attention, layer).impl
    if metadata is None:
        output.zero_()
        impl.reserve_workspace(query, cast(Attention, layer).vllm_config)
    else:
        impl.forward(layer, query, key, value, kv_cache, metadata, output)


def _register_ops() -> Any:
    make_library: Any = torch.library.Library  # has no annotations
    library = make_library("minivllm", "FRAGMENT")
    library.define("unified_kv_cache_update(Tensor key, Tensor value, str layer_name) -> Tensor")
    library.define(
        "unified_attention_with_output(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, str layer_name,"
        " Tensor? kv_cache_dummy_dep=None) -> ()"
    )
    ops: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "unified_kv_cache_update": (unified_kv_cache_update, lambda key, *_: key.new_empty(0)),
        "unified_attention_with_output": (unified_attention_with_output, lambda *_: None),
    }
    for name, (op, fake) in ops.items():
        for device_type in ("CPU", "CUDA"):
            library.impl(name, torch.no_grad()(op), device_type)  # pages are no part of an autograd graph
        torch.library.register_fake(f"minivllm::{name}", fake, lib=library)
    return library


_library = _register_ops()  # ops live as long as this object
# The overload itself: asking the op's packet for it at each call takes twice as long as the call.
_kv_cache_update = torch.ops.minivllm.unified_kv_cache_update.default
_attention_with_output = torch.ops.minivllm.unified_attention_with_output.default
