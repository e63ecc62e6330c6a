"""Which layers share a block table: from the layers' specs to KV-cache groups.

All groups draw blocks from one pool, so a block must have the same bytes in each of them. Layers of one kind make one
group. Layers of several kinds are first brought to one page size (`unify_kv_cache_spec_page_size`), then dealt out into
groups of about equal size, so that little of a block is left unused. No torch here.

Mirrors the grouping half of vllm/v1/core/kv_cache_utils.py (0.32.0). Left out: groups of draft models, hidden-state
layers, groupings made for one model (DeepSeek V4, GLM 5).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from minivllm.core.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SpecsDifferError,
    UniformTypeKVCacheSpecs,
    cdiv,
)

# LBNHC: every layer has a region of its own. BLHNC: every block holds a page of each layer.
KVCacheLayout = Literal["LBNHC", "BLHNC"]
LayerSpecs = Mapping[str, KVCacheSpec]


def get_kv_cache_groups(
    kv_cache_specs: LayerSpecs, *, disable_hybrid: bool = False, layout: KVCacheLayout = "LBNHC"
) -> list[KVCacheGroupSpec]:
    """Put every layer into a group. disable_hybrid: windowed layers keep all blocks, so that one group is enough."""
    specs = dict(kv_cache_specs)
    if not specs:
        return []
    if disable_hybrid and not _fits_one_group(specs):
        specs = _promote_to_full_attention(specs)
    if _is_uniform_spec(specs):
        return [_group(specs, specs)]
    if UniformTypeKVCacheSpecs.is_uniform_type(specs):
        return [uniform_type_group(specs)]
    if layout == "BLHNC" and len({spec.page_size_bytes for spec in specs.values()}) > 1:
        return _packed_groups(specs)
    try:
        specs = unify_kv_cache_spec_page_size(specs)
    except NotImplementedError:
        promoted = _promote_beside_mla(specs)
        if promoted is None:
            raise
        return [uniform_type_group(promoted)]
    return _groups_of_one_page_size(specs)


def _group(specs: LayerSpecs, names: Collection[str]) -> KVCacheGroupSpec:
    members = [specs[name] for name in names]
    return KVCacheGroupSpec(layer_names=tuple(names), kv_cache_spec=type(members[0]).merge(members))


def uniform_type_group(specs: LayerSpecs) -> KVCacheGroupSpec:
    """One group of layers whose pages differ in size only."""
    block_size = next(iter(specs.values())).block_size
    spec = UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=dict(specs))
    return KVCacheGroupSpec(layer_names=tuple(specs), kv_cache_spec=spec)


def _is_uniform_spec(specs: LayerSpecs) -> bool:
    """Whether one spec can stand for all layers. A plain ValueError of `merge` is the caller's to see."""
    try:
        _group(specs, specs)
    except SpecsDifferError:
        return False
    return True


def _fits_one_group(specs: LayerSpecs) -> bool:
    return _is_uniform_spec(specs) or UniformTypeKVCacheSpecs.is_uniform_type(specs)


def _promote_to_full_attention(specs: LayerSpecs) -> dict[str, KVCacheSpec]:
    """Windowed layers allocated as full attention; what they compute stays as it was."""
    full_block_sizes = {spec.block_size for spec in specs.values() if isinstance(spec, FullAttentionSpec)}
    promoted = dict(specs)
    for name, spec in specs.items():
        if full_block_sizes and isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
            block_size = next(iter(full_block_sizes)) if len(full_block_sizes) == 1 else spec.block_size
            shared: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(AttentionSpec)}
            if spec.page_size_padded is not None:
                grown = spec.real_page_size_bytes * block_size // spec.block_size
                shared["page_size_padded"] = max(spec.page_size_padded, grown)
            shared["block_size"] = block_size
            for window in ("sliding_window", "attention_chunk_size"):
                shared[window] = getattr(spec, window, None)
            promoted[name] = FullAttentionSpec(**shared)
    if not _fits_one_group(promoted):
        kinds = Counter(f"{spec.kind}, block size {spec.block_size}" for spec in promoted.values())
        raise ValueError(
            "Failed to promote local KV cache specs to one unified type. Hybrid memory is off, but these layers cannot"
            f" share one group: {dict(kinds)}. Set disable_hybrid_kv_cache_manager=False"
        )
    return promoted


def _promote_beside_mla(specs: LayerSpecs) -> dict[str, KVCacheSpec] | None:
    """MLA pages cannot be padded; beside plain sliding layers one group still works, at the cost of their blocks."""
    kinds = {spec.kind for spec in specs.values()}
    if not {"mla_attention", "sliding_window"} <= kinds or "chunked_local_attention" in kinds:
        return None
    try:
        promoted = _promote_to_full_attention(specs)
    except ValueError:
        return None
    return promoted if UniformTypeKVCacheSpecs.is_uniform_type(promoted) else None


def unify_kv_cache_spec_page_size(specs: LayerSpecs) -> dict[str, KVCacheSpec]:
    """Bring all pages to the largest one's bytes: by more tokens a block where that divides, else by padding.

    A Mamba state does not grow with the block size, so it is always padded. NotImplementedError for an MLA layer that
    would need padding: its kernels read whole token rows.
    """
    largest = max(spec.page_size_bytes for spec in specs.values())
    unified: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        page = spec.page_size_bytes
        if page != largest and (isinstance(spec, MambaSpec) or largest % page):
            if isinstance(spec, MLAAttentionSpec):
                raise NotImplementedError(
                    f"Layer {name}: page size is not divisible by the maximum page size and cannot be padded. Padding"
                    f" is only supported for non-MLA attention layers. Its page is {page} bytes, the largest {largest}:"
                    " choose a block size or dtype with which the first divides the second"
                )
            unified[name] = replace(spec, page_size_padded=largest)
        else:
            unified[name] = spec.copy_with_new_block_size(spec.block_size * (largest // page))
    return unified


def _groups_of_one_page_size(specs: LayerSpecs) -> list[KVCacheGroupSpec]:
    """Layers that can share a spec, dealt out into groups of about as many layers as the smallest bucket has."""
    buckets: list[list[str]] = []
    for same in names_by_spec(specs).values():
        for bucket in buckets:
            try:
                _group(specs, [*bucket, *same])
            except ValueError:
                continue
            bucket.extend(same)
            break
        else:
            buckets.append(same)
    sizes = [len(bucket) for bucket in buckets]
    # A few layers more in one bucket (a draft model's, say) should not split it into two groups.
    group_size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[KVCacheGroupSpec] = []
    for bucket in buckets:
        count = cdiv(len(bucket), group_size)
        # Strided, so that each stage of a pipeline has its share of every group.
        groups += [_group(specs, bucket[i::count]) for i in range(count)]
    return groups


def _packed_groups(specs: LayerSpecs) -> list[KVCacheGroupSpec]:
    """BLHNC: unequal pages lie side by side in a block, so nothing is unified; groups only need similar bytes a block.

    A bucket with as many layers of each page size is a pattern that repeats, and is split by whole repeats.
    """
    buckets: list[dict[int, list[str]]] = []  # layers of one type, by page bytes
    for name, spec in specs.items():
        for bucket in buckets:
            if _first_spec(specs, bucket).is_same_type(spec):
                break
        else:
            bucket = {}
            buckets.append(bucket)
        bucket.setdefault(spec.page_size_bytes, []).append(name)
    # 0 repeats: no pattern. A pattern of several page sizes stays whole; longer ones are split towards its length.
    repeats = [len(next(iter(b.values()))) if len(set(map(len, b.values()))) == 1 else 0 for b in buckets]
    floor = max((count for b, count in zip(buckets, repeats, strict=True) if len(b) > 1), default=0)
    splits = [1] * len(buckets)
    if floor:
        best = min(range(floor, max(repeats) + 1), key=lambda d: (sum(-count % d for count in repeats), -d))
        splits = [max(1, cdiv(count, best)) for count in repeats]
    # Mamba states can be split one by one, so they fill the blocks that the others need anyway.
    mamba = [isinstance(_first_spec(specs, bucket), MambaSpec) for bucket in buckets]
    widest = max(
        sum(page * (1 if is_mamba else cdiv(len(names), n)) for page, names in bucket.items())
        for bucket, n, is_mamba in zip(buckets, splits, mamba, strict=True)
    )
    groups: list[KVCacheGroupSpec] = []
    for bucket, n, is_mamba in zip(buckets, splits, mamba, strict=True):
        members = {name: specs[name] for name in specs if any(name in names for names in bucket.values())}
        if is_mamba:
            n = max(n, cdiv(len(members), max(1, widest // next(iter(bucket)))))
        pattern = list(zip(*bucket.values(), strict=True)) if n > 1 else [tuple(members)]
        groups += [uniform_type_group({name: specs[name] for row in pattern[i::n] for name in row}) for i in range(n)]
    return groups


def _first_spec(specs: LayerSpecs, bucket: Mapping[int, list[str]]) -> KVCacheSpec:
    return specs[next(iter(bucket.values()))[0]]


def names_by_spec(specs: LayerSpecs) -> dict[KVCacheSpec, list[str]]:
    """The layers of each spec, in order of first appearance."""
    found: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        found[spec].append(name)
    return found
