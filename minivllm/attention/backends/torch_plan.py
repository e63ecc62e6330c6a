"""What the TORCH backend computes in a step: which requests, in which pieces, over which keys, under which masks.

Nothing here depends on a layer's weights or pages, so that one plan serves all layers of a step. Decoding requests
are put together in buckets of like lengths; a prefilling request is a piece of its own, cut in tiles of queries, so
that scores stay small and keys after a tile are never touched.

Mirrors none: vLLM's CPU kernel splits its work in C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import torch
from torch import Tensor

from minivllm.attention.backend import AttentionMetadata
from minivllm.attention.metadata import CommonAttentionMetadata

TILE = 128  # query tokens of one prefill tile: its scores stay in the cache
MAX_GATHERED_KEYS = 16_384  # of one bucket, unless a single row has more
BUCKET_COST = 300_000  # elements of padding in K that cost as much time as one more bucket


@dataclass(slots=True, kw_only=True)
class Tile:
    """Queries of a piece that share a range of its keys. mask is added to the scores of the last `width` of them.

    Mirrors: none; this backend is ours.
    """

    tokens: slice | Tensor  # of the step; [B * T]
    keys: slice
    mask: Tensor | None  # [T, width], or [B, 1, 1, 1, width]; 0 or -inf
    first_query: Tensor  # [B, 1] int64, position of each row's first query


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is gathered at once: B decoding requests, or one prefilling request.

    Mirrors: none; this backend is ours.
    """

    rows: Tensor  # [B, 1] int64, rows of the block table
    positions: Tensor  # [B, num_keys] int64, of each key in its request
    tiles: list[Tile]


class BatchPlan:
    """Buckets, tiles and masks of one step, as far as they do not depend on a block table. Made when first asked for,
    once for each window: layers with several windows may share a group where hybrid memory is off.

    Mirrors: none; this backend is ours.
    """

    def __init__(self, common: CommonAttentionMetadata, key_elements: int, dtype: torch.dtype) -> None:
        self.starts: list[int] = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        self.seq_lens: list[int] = common.seq_lens_cpu[: common.num_reqs].tolist()
        self.num_tokens, self.causal = common.num_actual_tokens, common.causal
        self.key_elements = key_elements  # of one token's K
        self.dtype, self.device = dtype, common.block_table_tensor.device
        self._pieces: dict[tuple[int | None, int | None], list[Piece]] = {}
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    def pieces(self, window: int | None, chunk: int | None) -> list[Piece]:
        """All pieces of the step for layers with this sliding window or attention chunk."""
        if (window, chunk) not in self._pieces:
            decodes, pieces = [], []
            for row, seq_len in enumerate(self.seq_lens):
                num_queries = self.starts[row + 1] - self.starts[row]
                if num_queries == 1:
                    first = self._first_key(seq_len - 1, window, chunk)
                    decodes.append((seq_len - first, row))
                elif num_queries > 1:
                    pieces.append(self._prefill(row, num_queries, window, chunk))
            self._pieces[window, chunk] = [*self._decode_buckets(sorted(decodes, reverse=True)), *pieces]
        return self._pieces[window, chunk]

    @staticmethod
    def _first_key(position: int, window: int | None, chunk: int | None) -> int:
        """The earliest position that the query at `position` sees."""
        if chunk is not None:
            return position // chunk * chunk
        return 0 if window is None else max(0, position - window + 1)

    def _decode_buckets(self, decodes: list[tuple[int, int]]) -> Iterator[Piece]:
        """decodes: (keys, row), most keys first. A row opens a new bucket where padding would cost more than that."""
        bucket: list[tuple[int, int]] = []
        waste = 0
        for keys, row in decodes:
            longest = bucket[0][0] if bucket else keys
            waste += longest - keys
            full = (len(bucket) + 1) * longest > MAX_GATHERED_KEYS
            if bucket and (full or waste * self.key_elements > BUCKET_COST):
                yield self._decode_piece(bucket)
                bucket, waste = [], 0
            bucket.append((keys, row))
        if bucket:
            yield self._decode_piece(bucket)

    def _decode_piece(self, bucket: list[tuple[int, int]]) -> Piece:
        longest, shortest = bucket[0][0], bucket[-1][0]
        bucket = sorted(bucket, key=lambda item: item[1])
        tokens = [self.starts[row] for _, row in bucket]
        keys = self._column([keys for keys, _ in bucket])
        rows = self._column([row for _, row in bucket])
        last = self._column([self.seq_lens[row] - 1 for _, row in bucket])
        places = torch.arange(longest, device=self.device)
        mask = None
        if longest > shortest:
            mask = self._blank(len(bucket), longest).masked_fill_(places >= keys, -torch.inf)[:, None, None, None]
        in_order = tokens[-1] - tokens[0] == len(tokens) - 1
        tile = Tile(
            tokens=slice(tokens[0], tokens[-1] + 1) if in_order else torch.tensor(tokens, device=self.device),
            keys=slice(0, longest),
            mask=mask,
            first_query=last,
        )
        return Piece(rows=rows, positions=torch.minimum(last - keys + 1 + places, last), tiles=[tile])

    def _prefill(self, row: int, num_queries: int, window: int | None, chunk: int | None) -> Piece:
        end = self.seq_lens[row]
        begin = end - num_queries
        lowest = self._first_key(begin, window, chunk)
        tiles: list[Tile] = []
        at = begin
        while at < end:
            stop = min(at + TILE, end, end if chunk is None else (at // chunk + 1) * chunk)
            first = self._first_key(at, window, chunk)
            last = stop if self.causal else end  # one past the last key that is seen
            if not self.causal and window is not None:
                last = min(last, stop + window - 1)
            elif not self.causal and chunk is not None:
                last = min(last, (at // chunk + 1) * chunk)
            # Columns in which every query sees the key need no mask; without a window these are all before the tile.
            cut = window if window is not None and max(stop - first, last - at) > window else None
            masked = first if cut is not None else at
            hides = stop - at > 1 and (self.causal or cut is not None)
            token = self.starts[row] + at - begin
            tiles.append(
                Tile(
                    tokens=slice(token, token + stop - at),
                    keys=slice(first - lowest, last - lowest),
                    mask=self._mask(stop - at, at - masked, last - masked, cut) if hides else None,
                    first_query=self._column([at]),
                )
            )
            at = stop
        keys = max(tile.keys.stop for tile in tiles)
        positions = torch.arange(lowest, lowest + keys, device=self.device)
        return Piece(rows=self._column([row]), positions=positions[None], tiles=tiles)

    def _mask(self, num_queries: int, offset: int, num_keys: int, window: int | None) -> Tensor:
        """[num_queries, num_keys], 0 where a query sees a key and -inf elsewhere; query 0 is at key `offset`."""
        key = (num_queries, offset, num_keys, window)
        if key not in self._masks:
            queries = torch.arange(offset, offset + num_queries, device=self.device)[:, None]
            distance = queries - torch.arange(num_keys, device=self.device)
            hidden = distance < (0 if self.causal else -num_keys)
            if window is not None:
                hidden |= distance.abs() >= window
            self._masks[key] = self._blank(num_queries, num_keys).masked_fill_(hidden, -torch.inf)
        return self._masks[key]

    def _blank(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)[:, None]


@dataclass(slots=True, kw_only=True)
class TorchPagedMetadata(AttentionMetadata):
    """A plan and a block table; row numbers of what is gathered, made when first asked for.

    Mirrors: vllm/v1/attention/backends/cpu_attn.py CPUAttentionMetadata.
    """

    plan: BatchPlan
    block_table: Tensor  # [num_reqs, max_blocks] int32
    write_tokens: Tensor | None  # [n] int64, tokens that have a slot; None = all of them
    write_where: tuple[Tensor, Tensor]  # [n] int64 each: block, and place within it
    _gathers: dict[tuple[object, ...], list[tuple[Piece, Tensor]]] = field(default_factory=dict)

    def gathers(self, window: int | None, chunk: int | None, kv_cache: Tensor) -> list[tuple[Piece, Tensor]]:
        """Every piece with what it gathers: numbers of `head_rows(kv_cache)`, [2 * B * num_kv_heads * keys] int64.

        kv_cache: a layer's pages, [num_blocks, 2, block_size, num_kv_heads, head_size].
        """
        shape, strides = kv_cache.shape, kv_cache.stride()
        key = (window, chunk, shape[2], shape[3], strides)
        if key not in self._gathers:
            unit = gcd(*strides[:4])
            per_block, per_side, per_token, per_head = (stride // unit for stride in strides[:4])
            sides, heads = (torch.arange(n, device=self.block_table.device) for n in (2, shape[3]))
            within = (sides * per_side)[:, None, None, None] + (heads * per_head)[:, None]  # [2, 1, num_kv_heads, 1]
            self._gathers[key] = []
            for piece in self.plan.pieces(window, chunk):
                columns = piece.positions // shape[2]
                # int64 before the product: a block id fits int32, its address may not.
                tokens = self.block_table[piece.rows, columns].long() * per_block
                tokens += (piece.positions - columns * shape[2]) * per_token  # [B, keys]
                self._gathers[key].append((piece, (tokens[:, None] + within).flatten()))
        return self._gathers[key]


def head_rows(kv_cache: Tensor) -> Tensor:
    """A view of a layer's pages in which every head's vector is a row, whatever the layout or padding of the pages.

    [.., head_size]; rows lie as far apart as all strides of the pages have in common, so they may overlap.
    """
    strides, size = kv_cache.stride()[:4], kv_cache.shape[4]
    unit = gcd(*strides)
    last = sum((length - 1) * stride for length, stride in zip(kv_cache.shape, strides))
    return kv_cache.as_strided((last // unit + 1, size), (unit, 1))
