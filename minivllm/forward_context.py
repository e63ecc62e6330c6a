"""The seam between worker and model: what a forward pass needs and its arguments do not carry.

The runner enters `set_forward_context`, the model runs, and a layer that keeps a cache asks for its metadata, slots
and pages by its own name. So `model(input_ids, positions)` knows nothing of caches or batches, and `torch.compile`
traces it whole: only the opaque ops in `attention/layer.py` look here.

The context is a ContextVar: each thread and each asyncio task has its own, so that engines in several threads of one
process do not see each other's steps. Custom ops run in the calling thread, compiled or not, and find it.

Mirrors vllm/forward_context.py (0.32.0). Left out: data parallelism, microbatches, CUDA-graph modes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from minivllm.attention.layer_base import AttentionLayerBase

if TYPE_CHECKING:
    from minivllm.attention.backend import AttentionMetadata


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The shape of a batch, as far as a captured graph depends on it. num_reqs None: any number; uniform: all
    requests have the same number of tokens.

    Mirrors: vllm/forward_context.py BatchDescriptor.
    Leaves out: LoRA.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """One forward pass. attn_metadata is None where no attention is computed (profile run): layers return zeros.

    Mirrors: vllm/forward_context.py ForwardContext.
    Leaves out: data parallelism, microbatches, CUDA-graph modes, mixture-of-experts bookkeeping.
    """

    layers: Mapping[str, AttentionLayerBase]
    attn_metadata: dict[str, AttentionMetadata] | None
    slot_mapping: dict[str, Tensor]  # each [num_tokens] int64, -1 = no slot
    batch_descriptor: BatchDescriptor | None = None
    is_profile_run: bool = False


_current: ContextVar[ForwardContext | None] = ContextVar("minivllm_forward_context", default=None)


@contextmanager
def set_forward_context(
    attn_metadata: dict[str, AttentionMetadata] | None,
    *,
    layers: Mapping[str, AttentionLayerBase],
    slot_mapping: dict[str, Tensor] | None = None,
    batch_descriptor: BatchDescriptor | None = None,
    is_profile_run: bool = False,
) -> Iterator[ForwardContext]:
    """Make this the context of the forward passes inside the `with`; the former one returns afterwards, come what may.

    Mirrors: vllm/forward_context.py set_forward_context.
    """
    context = ForwardContext(
        layers=layers,
        attn_metadata=attn_metadata,
        slot_mapping={} if slot_mapping is None else slot_mapping,
        batch_descriptor=batch_descriptor,
        is_profile_run=is_profile_run,
    )
    former = _current.get()
    _current.set(context)
    try:
        yield context
    finally:
        # Not reset(token): a generator suspended inside the `with` may be closed in another context.
        _current.set(former)


def is_forward_context_available() -> bool:
    """Whether a forward pass is running in this thread or task."""
    return _current.get() is not None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass; RuntimeError outside of one."""
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "no forward context is set in this thread: run the model inside"
            " `with set_forward_context(attn_metadata, layers=collect_layers(model), slot_mapping=...):`"
            " (attn_metadata=None runs it without a cache). A thread that you start yourself has no context of its"
            " own: enter it there"
        )
    return context


def collect_layers(model: nn.Module) -> dict[str, AttentionLayerBase]:
    """Every layer of a model that keeps a cache, by name; ValueError where two layers have one name."""
    layers: dict[str, AttentionLayerBase] = {}
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, AttentionLayerBase):
            name = module.layer_name
            if name in layers:
                raise ValueError(
                    f"duplicate layer name {name!r}: the modules {paths[name]!r} and {path!r} both have it, and would"
                    " share one KV cache. Give each its own dotted path as prefix"
                )
            layers[name], paths[name] = module, path
    return layers


def get_attention_context(
    layer_name: str,
) -> tuple[AttentionMetadata | None, AttentionLayerBase, Tensor, Tensor | None]:
    """(metadata, layer, its pages, its slots) of one layer; the metadata is None for all layers or for none.

    Mirrors: vllm/model_executor/layers/attention/attention.py get_attention_context.
    """
    context = get_forward_context()
    layer = context.layers.get(layer_name)
    if layer is None:
        raise RuntimeError(
            f"layer {layer_name!r} is not in the forward context, which has {_listed(context.layers)}: pass"
            " layers=collect_layers(model) of the model that is running"
        )
    if context.attn_metadata is None:
        return None, layer, layer.kv_cache, None
    metadata = context.attn_metadata.get(layer_name)
    if metadata is None:
        raise RuntimeError(
            f"layer {layer_name!r} has no attention metadata in this forward; these layers have it:"
            f" {_listed(context.attn_metadata)}. Build metadata for every KV-cache group and give each of its layers"
            " an entry, or pass attn_metadata=None for a run without a cache"
        )
    if layer.kv_cache.numel() == 0:
        raise RuntimeError(
            f"layer {layer_name!r} has metadata but no KV cache yet: bind its pages (initialize_kv_cache) first, or"
            " pass attn_metadata=None for a run without a cache"
        )
    return metadata, layer, layer.kv_cache, context.slot_mapping.get(layer_name)


def _listed(layers: Mapping[str, object], limit: int = 8) -> str:
    names = list(layers)
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
