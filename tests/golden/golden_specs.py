"""KV-cache specs as the golden files of the managers describe them."""

from typing import Any

from minivllm.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

_ATTENTION = {
    "full": FullAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "chunked_local": ChunkedLocalAttentionSpec,
}


def make_spec(given: dict[str, Any]) -> KVCacheSpec:
    """`type` and what only this type has; an unknown type or field raises."""
    given = dict(given)
    kind = given.pop("type")
    if kind == "mamba":
        return MambaSpec(shapes=((2,),), dtypes=("float32",), **given)
    return _ATTENTION[kind](num_kv_heads=1, head_size=8, dtype="float32", **given)


def make_kv_cache_config(groups: list[dict[str, Any]], num_blocks: int) -> KVCacheConfig:
    """One group for each entry, of one layer."""
    specs = [KVCacheGroupSpec(layer_names=(f"layer.{i}",), kv_cache_spec=make_spec(g)) for i, g in enumerate(groups)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=tuple(specs))
