"""What one layer keeps in the KV cache, and how the layers of a model share one pool of blocks.

Specs are values: a layer says what a page of its cache holds (`page_size_bytes`) and how much one request may need at
most. Grouping (`kv_cache_groups.py`) reads nothing else of a model. No torch here: a dtype is its name.

Mirrors vllm/v1/kv_cache_interface.py (0.32.0). Left out: CrossAttentionSpec and EncoderOnlyAttentionSpec (encoder-
decoder models), SinkFullAttentionSpec, SlidingWindowMLASpec and other specs of single models, quantised pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, NewType, Self

from typing_extensions import override

from minivllm.config import VllmConfig, dtype_size

BlockId = NewType("BlockId", int)
Slot = NewType("Slot", int)
MambaCacheMode = Literal["none", "align", "all"]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class SpecsDifferError(ValueError):
    """Layers cannot share one spec, so they belong to different groups.

    Mirrors: none; vLLM raises AssertionError.
    """


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The cache of one layer. block_size: tokens a block. page_size_padded: bytes a page takes instead of its own
    size, so that groups of unequal pages share a pool.

    Mirrors: vllm/v1/kv_cache_interface.py KVCacheSpec.
    """

    _kind: ClassVar[str] = ""
    _positive: ClassVar[tuple[str, ...]] = ("block_size",)  # fields that must be at least 1
    _same: ClassVar[tuple[str, ...]] = ("block_size",)  # what layers of one type have in common
    block_size: int
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        for name in self._positive:
            value, optional = getattr(self, name), getattr(type(self), name, 0) is None
            if not (isinstance(value, int) and value >= 1) and not (optional and value is None):
                raise ValueError(f"{type(self).__name__}.{name} must be an integer of at least 1, got {value!r}")
        real = self.real_page_size_bytes  # refuses an unknown dtype
        if self.page_size_padded is not None and self.page_size_padded < real:
            raise ValueError(
                f"{type(self).__name__}.page_size_padded={self.page_size_padded} is below the page's own {real} bytes:"
                " raise it, or leave it None"
            )

    @property
    def kind(self) -> str:
        """The kind of attention, such as "sliding_window"."""
        return self._kind

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block of this layer that hold data."""
        raise NotImplementedError(f"{type(self).__name__} does not define real_page_size_bytes")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, padding included."""
        return self.page_size_padded or self.real_page_size_bytes

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """The most blocks one request holds at once, where a step computes at most `max_in_flight_tokens` of it.

        The one source for both sizing the pool and admitting a request, so that what fits at the start fits later.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define max_blocks_per_request")

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """The most bytes one request of max_model_len tokens needs in this layer."""
        max_model_len = vllm_config.model_config.max_model_len
        in_flight = vllm_config.scheduler_config.max_num_batched_tokens
        return self.max_blocks_per_request(max_model_len, in_flight) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The same layer with another block size; padding grows in proportion."""
        padded = self.page_size_padded and self.page_size_padded * block_size // self.block_size
        return replace(self, block_size=block_size, page_size_padded=padded)

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """Whether `other` always needs the same number of blocks of the same number of tokens."""
        return type(other) is type(self) and all(getattr(other, name) == getattr(self, name) for name in self._same)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """The one spec that stands for all of `specs` in a group; SpecsDifferError where there is none."""
        for spec in specs[1:]:
            if spec != specs[0]:
                raise SpecsDifferError(f"layers of one KV cache group must have one spec, got {specs[0]} and {spec}")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps K and V of `num_kv_heads` heads for every token.

    head_size_v: V's head size where it differs from K's. dtype: of the stored elements.

    Mirrors: vllm/v1/kv_cache_interface.py AttentionSpec.
    Leaves out: kv_quant_mode and packed states of quantised caches.
    """

    _positive: ClassVar[tuple[str, ...]] = ("block_size", "num_kv_heads", "head_size")
    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        super().__post_init__()

    @property
    @override
    def real_page_size_bytes(self) -> int:
        head_sizes = self.head_size + (self.head_size_v or 0)
        return self.block_size * self.num_kv_heads * head_sizes * dtype_size(self.dtype)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept.

    Also stands in for a sliding or chunked layer whose blocks are all kept (hybrid memory off): `sliding_window` or
    `attention_chunk_size` then say what the layer computes.

    Mirrors: vllm/v1/kv_cache_interface.py FullAttentionSpec.
    Leaves out: non_causal (prefix language models).
    """

    _kind: ClassVar[str] = "full_attention"
    _positive: ClassVar[tuple[str, ...]] = (*AttentionSpec._positive, "sliding_window", "attention_chunk_size")
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @override
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(max_model_len, self.block_size)

    @override
    def is_same_type(self, other: KVCacheSpec) -> bool:
        return isinstance(other, FullAttentionSpec) and other.block_size == self.block_size

    @classmethod
    @override
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for all; a window that only some layers have becomes the group's.

        Two different windows are refused with a plain ValueError: they are full attention only because hybrid memory
        is off, so splitting them into groups is not what was asked for.
        """
        if not all(isinstance(spec, FullAttentionSpec) for spec in specs):
            raise SpecsDifferError(
                f"full attention cannot share a group with {[type(spec).__name__ for spec in specs]}"
            )
        windows = {spec.sliding_window for spec in specs} - {None}
        chunks = {spec.attention_chunk_size for spec in specs} - {None}
        if len(windows) > 1 or len(chunks) > 1:
            raise ValueError(
                "All attention layers in the same KV cache group must have the same window size."
                f" Got sliding windows {windows or '{}'} and chunks {chunks or '{}'} among layers allocated as full"
                " attention: set disable_hybrid_kv_cache_manager=False"
            )
        merged = super().merge([replace(spec, sliding_window=None, attention_chunk_size=None) for spec in specs])
        if windows and chunks:
            raise SpecsDifferError(f"sliding windows {windows} and chunks {chunks} cannot share one spec")
        return replace(merged, sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None))


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent vector a token, from which K and V are both read: V takes no room of its own.

    Mirrors: vllm/v1/kv_cache_interface.py MLAAttentionSpec.
    Leaves out: the packed fp8 formats (cache_dtype_str), compressed and aligned pages.
    """

    _kind: ClassVar[str] = "mla_attention"
    head_size_v: int | None = 0


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Only the last `sliding_window` tokens are read (the token itself included); older blocks are given back.

    Mirrors: vllm/v1/kv_cache_interface.py SlidingWindowSpec.
    Leaves out: extra_retained_tokens (speculative decoding).
    """

    _kind: ClassVar[str] = "sliding_window"
    _positive: ClassVar[tuple[str, ...]] = (*AttentionSpec._positive, "sliding_window")
    _same: ClassVar[tuple[str, ...]] = ("block_size", "sliding_window")
    sliding_window: int

    @override
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        # One block more, because a window may start in the middle of its first block.
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token reads only its own chunk of `attention_chunk_size` tokens; blocks of earlier chunks are given back.

    Mirrors: vllm/v1/kv_cache_interface.py ChunkedLocalAttentionSpec.
    """

    _kind: ClassVar[str] = "chunked_local_attention"
    _positive: ClassVar[tuple[str, ...]] = (*AttentionSpec._positive, "attention_chunk_size")
    _same: ClassVar[tuple[str, ...]] = ("block_size", "attention_chunk_size")
    attention_chunk_size: int

    @override
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(min(self.attention_chunk_size + max_in_flight_tokens, max_model_len), self.block_size)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A layer whose state has a fixed size: a "page" is one copy of that state, whatever block_size says.

    mamba_cache_mode: "none" keeps one state a request; "align" also the last one at a block border, for prefix hits;
    "all" one a block.

    Mirrors: vllm/v1/kv_cache_interface.py MambaSpec.
    Leaves out: mamba_type (the layer's backend knows it), speculative and checkpoint blocks.
    """

    _kind: ClassVar[str] = "mamba"
    _same: ClassVar[tuple[str, ...]] = ("block_size", "page_size_bytes")
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_cache_mode: MambaCacheMode = "none"

    def __post_init__(self) -> None:
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ValueError(f"MambaSpec needs a dtype for each state, got shapes {self.shapes}, dtypes {self.dtypes}")
        if self.mamba_cache_mode not in ("none", "align", "all"):
            raise ValueError(f"mamba_cache_mode must be 'none', 'align' or 'all', got {self.mamba_cache_mode!r}")
        super().__post_init__()

    @property
    @override
    def real_page_size_bytes(self) -> int:
        return sum(prod(shape) * dtype_size(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @override
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        if self.mamba_cache_mode == "all":
            return cdiv(max_model_len, self.block_size)
        return 2 if self.mamba_cache_mode == "align" else 1


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that need the same blocks but pages of different sizes: one group, one table, a page per layer.

    Mirrors: vllm/v1/kv_cache_interface.py UniformTypeKVCacheSpecs.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        if not self.is_uniform_type(self.kv_cache_specs):
            raise SpecsDifferError(f"these layers do not have one type of KV cache: {dict(self.kv_cache_specs)}")
        super().__post_init__()

    def __hash__(self) -> int:
        return hash((self.block_size, tuple(self.kv_cache_specs.items())))

    @staticmethod
    def is_uniform_type(kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether all layers always need the same number of blocks of the same number of tokens."""
        specs = list(kv_cache_specs.values())
        return bool(specs) and all(specs[0].is_same_type(spec) for spec in specs)

    @property
    def first_spec(self) -> KVCacheSpec:
        """The spec by which the scheduler knows the whole group."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    @override
    def kind(self) -> str:
        kinds = {spec.kind for spec in self.kv_cache_specs.values()}
        # Only MLA beside full attention mixes kinds within one type.
        return kinds.pop() if len(kinds) == 1 else FullAttentionSpec._kind

    @property
    @override
    def real_page_size_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    @override
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        specs = self.kv_cache_specs.values()
        return max(spec.max_blocks_per_request(max_model_len, max_in_flight_tokens) for spec in specs)


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """Where layers lie in the one backing allocation of `size` bytes, which all tensors of a config share.

    The page of block b of layers[i] starts at byte offset + i * layer_stride + b * block_stride. Tensors of different
    groups overlap: a block belongs to one group at a time.

    Mirrors: vllm/v1/kv_cache_interface.py KVCacheTensor.
    """

    size: int
    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the spec by which the KV-cache manager knows them.

    Mirrors: vllm/v1/kv_cache_interface.py KVCacheGroupSpec.
    Leaves out: the marks of draft-model groups and of groups sent to other machines.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """Every layer's own spec, by name."""
        spec = self.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return {name: spec.kv_cache_specs[name] for name in self.layer_names}
        return dict.fromkeys(self.layer_names, spec)


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The pool (num_blocks counts the null block 0), where each layer's pages lie, and the groups.

    Mirrors: vllm/v1/kv_cache_interface.py KVCacheConfig.
    """

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def layer_specs(self) -> dict[str, KVCacheSpec]:
        """Every layer's own spec, by name."""
        return {name: spec for group in self.kv_cache_groups for name, spec in group.layer_specs().items()}

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed: a Mamba state is read before it is written, and where layers differ in
        dtype a reused block's stale bytes may read as NaN."""
        specs = self.layer_specs().values()
        dtypes = {spec.dtype for spec in specs if isinstance(spec, AttentionSpec)}
        return len(dtypes) > 1 or any(isinstance(spec, MambaSpec) for spec in specs)
