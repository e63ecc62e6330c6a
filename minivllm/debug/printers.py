"""Shows what a model no longer sees in its arguments: attention metadata, slots and the pages of the KV cache.

Since caches and metadata moved into the forward context (vLLM #13887, #13555), a breakpoint in a model shows neither.
These functions return them as text, at any time: inside a forward (from a hook or a breakpoint), outside of one, and
in the profile run, which has no cache and no metadata yet. They change nothing and read only what they show.

Mirrors: none; vLLM has no such printers. May import anything below the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from minivllm.attention.layer_base import AttentionLayerBase
from minivllm.forward_context import get_forward_context, is_forward_context_available

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner

T = TypeVar("T")
LEGEND = "one mark a token: # data, . zeros, ! NaN or Inf"
NO_CONTEXT = "no forward context: nothing runs now. Call this from a hook, a backend or a breakpoint inside a forward."
UNBOUND = "no cache is bound yet (the profile run comes before the number of blocks is known)"


def describe_forward_context() -> str:
    """The context of the forward that is running: its layers, and each distinct metadata object and slot mapping."""
    if not is_forward_context_available():
        return NO_CONTEXT
    context = get_forward_context()
    lines = [f"forward context: {context.batch_descriptor}{', profile run' if context.is_profile_run else ''}"]
    metadata = context.attn_metadata or {}
    for name, layer in context.layers.items():
        lines.append(f"  {name}: {_cache_summary(layer.kv_cache)}{'' if name in metadata else '; no metadata'}")
    if context.attn_metadata is None:
        lines.append("attention metadata: None (attention writes nothing and returns zeros)")
    for names, shared in _by_identity(metadata):
        lines.append(f"{type(shared).__name__} of {_brief(names)}")
        lines += [f"  {name}: {_show(value)}" for name, value in _attributes(shared)]
    lines += [f"slot mapping of {_brief(names)}: {_show(slots)}" for names, slots in _by_identity(context.slot_mapping)]
    return "\n".join(lines)


def describe_kv_cache(
    source: AttentionLayerBase | ModelRunner | str, *, blocks: Sequence[int] | None = None, slots: Sequence[int] = ()
) -> str:
    """The pages of one layer, block by block; or, given a model runner, of its first layers and its requests' tables.

    source: a layer, a layer's name (inside a forward only), or a runner. blocks: block ids to draw; by default those
    that the current forward writes, or those of the runner's requests. slots: slots (block * block_size + offset)
    whose values are shown. ValueError where an id is outside the cache.
    """
    if isinstance(source, str):
        layers = get_forward_context().layers
        if source not in layers:
            raise ValueError(f"layer {source!r} is not in the forward context; it has {_brief(list(layers))}")
        source = layers[source]
    if isinstance(source, AttentionLayerBase):
        return "\n".join(_describe_layer(source, blocks, slots))
    config = getattr(source, "kv_cache_config", None)
    if config is None:
        return f"{_brief(list(source.layers))}: {UNBOUND}"
    lines = []
    for req_id, state in source.requests.items():
        tables = "; ".join(f"group {index} {ids}" for index, ids in enumerate(state.block_ids))
        lines.append(f"request {req_id}, {state.num_tokens} tokens, blocks: {tables}")
    for index, group in enumerate(config.kv_cache_groups):
        used = sorted({block for state in source.requests.values() for block in state.block_ids[index] if block})
        lines.append(f"group {index} ({group.kv_cache_spec.kind}): {_brief(group.layer_names)}. The first of them:")
        for name in group.layer_names[:1]:
            lines += _describe_layer(source.layers[name], used if blocks is None else blocks, slots)
    return "\n".join(lines)


def _describe_layer(layer: AttentionLayerBase, blocks: Sequence[int] | None, slots: Iterable[int]) -> list[str]:
    cache = layer.kv_cache  # [num_blocks, 2, block_size, num_kv_heads, head_size]
    lines = [f"{layer.layer_name}: {_cache_summary(cache)}"]
    if cache.numel() == 0:
        return lines
    num_blocks, block_size = cache.shape[0], cache.shape[2]
    if blocks is None:
        written = _slots_of_this_forward(layer.layer_name)
        blocks = sorted({slot // block_size for slot in written if slot >= 0})
    for block in blocks:
        _check_range(f"{layer.layer_name}: block", block, num_blocks)
        k, v = ("".join(_mark(cell) for cell in side) for side in cache[block])
        lines.append(f"  block {block:>4}  K {k}  V {v}")
    lines.append(f"  {LEGEND}" if blocks else "  no blocks to show: name some with blocks=[...]")
    for slot in slots:
        _check_range(f"{layer.layer_name}: slot", slot, num_blocks * block_size)
        block, offset = divmod(slot, block_size)
        for side, cell in zip("KV", cache[block, :, offset], strict=True):  # cell: [num_kv_heads, head_size]
            lines.append(f"  slot {slot} = block {block}, offset {offset}: {side} head 0 {_show(cell[0])}")
    return lines


def _slots_of_this_forward(layer_name: str) -> list[int]:
    if not is_forward_context_available():
        return []
    slots = get_forward_context().slot_mapping.get(layer_name)
    return [] if slots is None else [int(slot) for slot in slots.tolist()]


def _check_range(what: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise ValueError(f"{what} {value} is outside the cache, which has {limit}")


def _mark(cell: Tensor) -> str:
    return "!" if not bool(cell.isfinite().all()) else "#" if bool(cell.any()) else "."


def _cache_summary(cache: Tensor) -> str:
    if cache.numel() == 0:
        return UNBOUND
    size = cache.numel() * cache.element_size() / 2**20
    dtype = str(cache.dtype).removeprefix("torch.")
    return f"cache {list(cache.shape)} {dtype}, {size:.1f} MiB, stride {cache.stride()}"


def _by_identity(values: Mapping[str, T]) -> list[tuple[list[str], T]]:
    """Layers of one group share one object: name it once, with all its layers."""
    found: dict[int, tuple[list[str], T]] = {}
    for name, value in values.items():
        found.setdefault(id(value), ([], value))[0].append(name)
    return list(found.values())


def _brief(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} ... {names[-1]} ({len(names)} layers)"


def _attributes(value: object) -> list[tuple[str, object]]:
    names = [field.name for field in fields(value)] if is_dataclass(value) else sorted(vars(value))
    names = [name for name in names if not name.startswith("_")]
    return [(name, getattr(value, name)) for name in names]


def _show(value: object, limit: int = 12) -> str:
    """A tensor's shape, dtype and first values; anything else as it prints, shortened."""
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}..."
    flat = value.detach().flatten()[:limit].cpu()
    shown = [f"{item:.4g}" if isinstance(item, float) else str(item) for item in flat.tolist()]
    more = " ..." if value.numel() > limit else ""
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} {' '.join(shown)}{more}"
