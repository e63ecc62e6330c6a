"""A random paged batch and brute-force attention over it: the definition of right for attention backends.

The reference sees each request's whole K and V and a rule for who sees whom; it knows nothing of pages. The batch has
the same numbers in pages that are scattered over a cache in which everything unowned is NaN.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minivllm.attention.layer import Attention
from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.forward_context import collect_layers, set_forward_context


def make_config(*, dtype: str = "float32", block_size: int = 4, max_model_len: int = 256, **options) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model="none", hf_config=None, dtype=dtype, max_model_len=max_model_len),
        cache_config=CacheConfig(block_size=block_size, **options),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
    )


def make_layer(config: VllmConfig, prefix: str = "layers.0.attn", **options) -> Attention:
    options = {"num_heads": 4, "head_size": 8, "scale": 0.35, "num_kv_heads": 2, **options}
    return Attention(**options, vllm_config=config, prefix=prefix)


def visible(query: int, key: int, seq_len: int, *, causal: bool, window: int | None, chunk: int | None) -> bool:
    """Whether the token at position `query` sees the one at `key`."""
    if key >= seq_len or (causal and key > query):
        return False
    if window is not None and abs(query - key) >= window:
        return False
    return chunk is None or query // chunk == key // chunk


def brute_force(layer: Attention, query: Tensor, keys: Tensor, values: Tensor, first: int, causal: bool) -> Tensor:
    """query: [T, num_heads, D] of one request, at positions first, first + 1, ...; keys, values: [len, kv_heads, D]."""
    impl, out = layer.impl, torch.zeros(query.shape, dtype=torch.float64)
    group = layer.num_heads // layer.num_kv_heads
    for t, at in enumerate(range(first, first + len(query))):
        seen = [
            j
            for j in range(len(keys))
            if visible(at, j, len(keys), causal=causal, window=layer.sliding_window, chunk=layer.attention_chunk_size)
        ]
        for h in range(layer.num_heads):
            scores = keys[seen, h // group].double() @ query[t, h].double() * impl.scale
            if impl.logits_soft_cap is not None:
                scores = impl.logits_soft_cap * torch.tanh(scores / impl.logits_soft_cap)
            if impl.alibi_slopes is not None:
                scores -= impl.alibi_slopes[h].double() * torch.tensor([abs(at - j) for j in seen])
            weights = scores.exp()
            total = weights.sum()
            if impl.sinks is not None:
                total += impl.sinks[h].double().exp()
            out[t, h] = weights / total @ values[seen, h // group].double()
    return out


@dataclass
class PagedBatch:
    """requests: (tokens already computed, tokens of this step). Pages are dealt out at random; `padding` tokens
    follow the real ones, in slot -1 and full of NaN."""

    layer: Attention
    config: VllmConfig
    requests: list[tuple[int, int]]
    causal: bool = True
    padding: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    page_gap: int = 0  # elements between pages
    cache: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        layer, size = self.layer, self.config.cache_config.block_size
        lengths = [computed + new for computed, new in self.requests]
        counts = [math.ceil(length / size) for length in lengths]
        num_blocks = sum(counts) + 5
        page = 2 * size * layer.num_kv_heads * layer.head_size
        backing = torch.full((num_blocks * (page + self.page_gap),), math.nan, dtype=self.dtype)
        shape = layer.get_attn_backend().get_kv_cache_shape(num_blocks, size, layer.num_kv_heads, layer.head_size)
        inner = torch.empty(shape[1:], device="meta").stride()
        self.cache = backing.as_strided(shape, (page + self.page_gap, *inner))
        ids = rng.sample(range(1, num_blocks), sum(counts))
        # Stale columns name blocks of others, or none at all.
        self.table = torch.full((len(lengths), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
        slots: list[int] = []
        self.keys, self.values, self.queries = [], [], []
        for row, (computed, new) in enumerate(self.requests):
            blocks, ids = ids[: counts[row]], ids[counts[row] :]
            self.table[row, : len(blocks)] = torch.tensor(blocks)
            k, v = torch.randn(2, computed + new, layer.num_kv_heads, layer.head_size).to(self.dtype)
            where = [blocks[position // size] * size + position % size for position in range(computed + new)]
            for position in range(computed):
                block, offset = divmod(where[position], size)
                self.cache[block, 0, offset], self.cache[block, 1, offset] = k[position], v[position]
            slots += where[computed:]
            self.keys.append(k)
            self.values.append(v)
            self.queries.append(torch.randn(new, layer.num_heads, layer.head_size).to(self.dtype))
        self.num_tokens = len(slots)
        self.slot_mapping = torch.tensor(slots + [-1] * self.padding, dtype=torch.int64)
        starts = [0]
        for _, new in self.requests:
            starts.append(starts[-1] + new)
        self.starts = starts
        self.common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32),
            num_computed_tokens_cpu=torch.tensor([c for c, _ in self.requests], dtype=torch.int32),
            num_reqs=len(lengths),
            num_actual_tokens=self.num_tokens,
            max_query_len=max(new for _, new in self.requests),
            max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
            causal=self.causal,
        )

    def new_tokens(self, sequences: list[Tensor]) -> Tensor:
        """The last tokens of each request, and NaN for padding."""
        parts = [s[len(s) - new :] for s, (_, new) in zip(sequences, self.requests, strict=True)]
        tail = torch.full((self.padding, *parts[0].shape[1:]), math.nan, dtype=self.dtype)
        return torch.cat([*parts, tail])

    def builder(self):
        spec = self.layer.get_kv_cache_spec(self.config)
        cls = self.layer.get_attn_backend().get_builder_cls()
        return cls(spec, [self.layer.layer_name], self.config, torch.device("cpu"))

    def run(self, metadata=None, model: nn.Module | None = None) -> Tensor:
        """[num_tokens + padding, num_heads, D] through the layer and its ops."""
        layer, model = self.layer, self.layer if model is None else model
        layer.kv_cache = self.cache
        if metadata is None:
            metadata = self.builder().build(common_prefix_len=0, common_attn_metadata=self.common)
        query, key, value = (self.new_tokens(x).flatten(1) for x in (self.queries, self.keys, self.values))
        with set_forward_context(
            {layer.layer_name: metadata},
            layers=collect_layers(model),
            slot_mapping={layer.layer_name: self.slot_mapping},
        ):
            out = model(query, key, value)
        return out.view(-1, layer.num_heads, layer.head_size)

    def expected(self) -> Tensor:
        """[num_tokens, num_heads, D], by brute force in float64."""
        parts = [
            brute_force(self.layer, query, k, v, computed, self.causal)
            for query, k, v, (computed, _) in zip(self.queries, self.keys, self.values, self.requests, strict=True)
        ]
        return torch.cat(parts)
