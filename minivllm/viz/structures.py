"""What each structure of the pipeline looks like: a frozen snapshot, taken with `of`, that draws itself.

In a notebook the last line of a cell shows the picture; `print` shows the same as text. A snapshot copies what it
shows, so that a list of them is a film of a structure that changes in place (`Stepper`). vLLM has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.viz.grid import Cell, Grid, ascii_grid, img, owner, svg_grid

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.attention.metadata import CommonAttentionMetadata
    from minivllm.core.block_pool import BlockPool
    from minivllm.core.kv_cache_interface import KVCacheConfig
    from minivllm.core.scheduler_output import SchedulerOutput
    from minivllm.worker.block_table import BlockTable

NOTHING = Cell("", "none")


class Structure:
    """What can be drawn.

    Mirrors: none; a base class of pictures.
    """

    def grid(self) -> Grid:
        """The picture's cells."""
        raise NotImplementedError(f"{type(self).__name__} draws nothing: give it a grid()")

    def __repr__(self) -> str:
        return ascii_grid(self.grid())

    def _repr_html_(self) -> str:
        return img(self.grid())


def svg(state: Structure) -> str:
    """The picture of a snapshot, as one SVG image."""
    return svg_grid(state.grid())


def _ints(values: Iterable[int] | Tensor) -> list[int]:
    return [int(value) for value in values]


@dataclass(frozen=True, slots=True, repr=False)
class BlockTableView(Structure):
    """Rows of a block table: which block holds which tokens of each request.

    Mirrors: none; a picture.
    """

    block_size: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]  # (request, block ids)

    @classmethod
    def of(cls, table: BlockTable, req_ids: Sequence[str]) -> BlockTableView:
        """The first rows of a table, one a name."""
        rows = tuple((req_id, tuple(table.get_row(row))) for row, req_id in enumerate(req_ids))
        return cls(table.block_size, rows)

    def grid(self) -> Grid:
        """One row a request, one column a block of its tokens."""
        size, width = self.block_size, max((len(ids) for _, ids in self.rows), default=0)

        def cells(row: int, ids: tuple[int, ...]) -> tuple[Cell, ...]:
            live = [Cell(str(block), owner(row)) if block else Cell("0 null", "null") for block in ids]
            return (*live, *[NOTHING] * (width - len(ids)))

        columns = tuple(f"{i * size}-{i * size + size - 1}" for i in range(width))
        rows = tuple((f"row {i}: {req_id}", cells(i, ids)) for i, (req_id, ids) in enumerate(self.rows))
        return Grid(f"block table, block_size {size}: the block id of each {size} positions", columns, rows)


@dataclass(frozen=True, slots=True, repr=False)
class SlotMappingView(Structure):
    """The step's tokens, and the slot of each.

    Mirrors: none; a picture.
    """

    block_size: int
    tokens: tuple[tuple[str, int, int], ...]  # (request, position, slot); "" and -1 for padding

    @classmethod
    def of(
        cls,
        table: BlockTable,
        req_ids: Sequence[str],
        query_start_loc: Iterable[int] | Tensor,  # [num_reqs + 1]
        positions: Iterable[int] | Tensor,  # [num_tokens]
        padded_to: int = 0,
    ) -> SlotMappingView:
        """The slots that `table` has computed; padded_to shows that many entries of its buffer."""
        starts, where = _ints(query_start_loc), _ints(positions)
        names = [req_id for i, req_id in enumerate(req_ids) for _ in range(starts[i + 1] - starts[i])]
        padding = max(padded_to - len(where), 0)
        slots = _ints(table.slot_mapping[: len(where) + padding])
        tokens = zip([*names, *[""] * padding], [*where, *[-1] * padding], slots, strict=True)
        return cls(table.block_size, tuple(tokens))

    def grid(self) -> Grid:
        """One column a token; block * block_size + offset = slot."""
        order = {name: i for i, name in enumerate(dict.fromkeys(name for name, _, _ in self.tokens if name))}
        size = self.block_size

        def row(values: list[int], padding: str = "") -> tuple[Cell, ...]:
            return tuple(
                Cell(str(value), owner(order[name])) if name else Cell(padding, "none")
                for value, (name, _, _) in zip(values, self.tokens, strict=True)
            )

        slots = [slot for _, _, slot in self.tokens]
        rows = (
            ("position", row([position for _, position, _ in self.tokens])),
            ("block", row([slot // size for slot in slots])),
            ("offset", row([slot % size for slot in slots])),
            ("slot", row(slots, "-1")),
        )
        columns = tuple(name or "pad" for name, _, _ in self.tokens)
        return Grid(f"slot mapping, block_size {size}: slot = block * {size} + offset", columns, rows)


@dataclass(frozen=True, slots=True, repr=False)
class CacheView(Structure):
    """The memory itself: which token lies in which slot of which block.

    Mirrors: none; a picture.
    """

    block_size: int
    num_blocks: int
    tokens: tuple[tuple[int, str, int], ...]  # (slot, request, position)

    @classmethod
    def of(cls, num_blocks: int, block_size: int, requests: Mapping[str, tuple[Sequence[int], int]]) -> CacheView:
        """requests: name -> (block ids, number of tokens)."""
        tokens = tuple(
            (blocks[position // block_size] * block_size + position % block_size, name, position)
            for name, (blocks, length) in requests.items()
            for position in range(length)
        )
        return cls(block_size, num_blocks, tokens)

    def grid(self) -> Grid:
        """One row a block, one column an offset in it; a cell names a token by request and position."""
        order = {name: i for i, name in enumerate(dict.fromkeys(name for _, name, _ in self.tokens))}
        held: dict[int, list[tuple[str, int]]] = {}
        for slot, name, position in self.tokens:
            held.setdefault(slot, []).append((name, position))

        def cell(slot: int) -> Cell:
            owners = held.get(slot)
            if not owners:
                return Cell("null", "null") if slot < self.block_size else NOTHING
            names = "+".join(name for name, _ in owners)
            return Cell(f"{names} {owners[0][1]}", owner(order[owners[0][0]]))

        size = self.block_size
        title = f"KV cache of one layer: {self.num_blocks} blocks of {size} slots; a cell is request and position"
        starts = range(0, self.num_blocks * size, size)
        rows = tuple(
            (f"block {slot // size}: slot {slot}", tuple(map(cell, range(slot, slot + size)))) for slot in starts
        )
        return Grid(title, tuple(f"+{offset}" for offset in range(size)), rows)


@dataclass(frozen=True, slots=True, repr=False)
class KVPoolView(Structure):
    """The block pool: reference counts, hashes, and the free queue in order.

    Mirrors: none; a picture.

    Hashes are named h0, h1, ... in the order of their blocks: their bytes differ from run to run, equality does not.

    """

    ref_counts: tuple[int, ...]
    hashes: tuple[str, ...]  # "" where a block has none
    free_queue: tuple[int, ...]  # next to be handed out first

    @classmethod
    def of(cls, pool: BlockPool) -> KVPoolView:
        """All blocks of a pool."""
        names: dict[object, str] = {}
        labels = [
            "" if block.block_hash is None else names.setdefault(block.block_hash, f"h{len(names)}")
            for block in pool.blocks
        ]
        free = tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
        return cls(tuple(block.ref_cnt for block in pool.blocks), tuple(labels), free)

    def grid(self) -> Grid:
        """One column a block."""
        places = {block: place for place, block in enumerate(self.free_queue)}

        def state(block: int) -> tuple[str, str]:
            if block == 0:
                return "null", "null"
            if block not in places:
                return "used", "used"
            return ("cached", "cached") if self.hashes[block] else ("free", "free")

        states = [state(block) for block in range(len(self.ref_counts))]
        queue = [f"{places[block]}" if block in places else "" for block in range(len(states))]

        def row(values: Iterable[object]) -> tuple[Cell, ...]:
            return tuple(Cell(str(value), kind) for value, (_, kind) in zip(values, states, strict=True))

        named = {"state": [name for name, _ in states], "ref_cnt": self.ref_counts, "hash": self.hashes}
        rows = tuple((label, row(values)) for label, values in {**named, "free place": queue}.items())
        order = " -> ".join(map(str, self.free_queue)) or "empty"
        title = f"KV pool: {len(states)} blocks, {len(self.free_queue)} free"
        return Grid(title, tuple(map(str, range(len(states)))), rows, (f"free queue: {order}",))


@dataclass(frozen=True, slots=True, repr=False)
class GroupLayoutView(Structure):
    """The KV-cache groups, and which of their layers share the same bytes.

    Mirrors: none; a picture.
    """

    num_blocks: int
    groups: tuple[str, ...]  # one description a group
    layers: tuple[tuple[int, int, str], ...]  # (first byte, group, layer)

    @classmethod
    def of(cls, config: KVCacheConfig) -> GroupLayoutView:
        """Every layer of a configuration at its place."""
        group_of = {name: i for i, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
        layers = sorted(
            (tensor.offset + i * tensor.layer_stride, group_of[name], name)
            for tensor in config.kv_cache_tensors
            for i, name in enumerate(tensor.layers)
        )
        kinds = tuple(
            f"{type(group.kv_cache_spec).__name__}, block_size {group.kv_cache_spec.block_size},"
            f" page {group.kv_cache_spec.page_size_bytes} B"
            for group in config.kv_cache_groups
        )
        return cls(config.num_blocks, kinds, tuple(layers))

    def grid(self) -> Grid:
        """One column a group, one row a place in the backing memory."""
        at = {(start, group): name for start, group, name in self.layers}

        def cell(start: int, group: int) -> Cell:
            name = at.get((start, group))
            return NOTHING if name is None else Cell(name, owner(group))

        columns = range(len(self.groups))
        starts = dict.fromkeys(start for start, _, _ in self.layers)
        rows = tuple((f"byte {start}", tuple(cell(start, group) for group in columns)) for start in starts)
        notes = tuple(f"group {i}: {kind}" for i, kind in enumerate(self.groups))
        title = f"KV-cache groups over one allocation of {self.num_blocks} blocks a layer"
        return Grid(title, tuple(f"group {i}" for i in columns), rows, notes)


@dataclass(frozen=True, slots=True, repr=False)
class TimelineView(Structure):
    """Steps of the scheduler: how many tokens of whom.

    Mirrors: none; a picture.
    """

    steps: tuple[
        tuple[tuple[str, str, int], ...], ...
    ]  # a step's (request, "prefill" | "decode" | "preempted", tokens)

    @classmethod
    def of(cls, outputs: Sequence[SchedulerOutput]) -> TimelineView:
        """Steps from the first on: prompt lengths are learnt from the step that brought a request."""
        prompts: dict[str, int] = {}
        steps = []
        for output in outputs:
            new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
            prompts.update({data.req_id: len(data.prompt_token_ids) for data in new})
            computed = {data.req_id: data.num_computed_tokens for data in new}
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            step = [
                (req_id, "prefill" if computed[req_id] < prompts[req_id] else "decode", count)
                for req_id, count in output.num_scheduled_tokens.items()
            ]
            steps.append((*step, *((req_id, "preempted", 0) for req_id in output.preempted_req_ids or ())))
        return cls(tuple(steps))

    def grid(self) -> Grid:
        """One row a request, one column a step."""
        names = list(dict.fromkeys(name for step in self.steps for name, _, _ in step))
        cells: dict[tuple[str, int], Cell] = {}
        for i, step in enumerate(self.steps):
            for name, kind, count in step:
                cells[name, i] = Cell(f"{kind[0].upper()} {count}" if count else "preempted", kind)
        totals = tuple(Cell(str(sum(count for _, _, count in step))) for step in self.steps)
        rows = [(name, tuple(cells.get((name, i), NOTHING) for i in range(len(self.steps)))) for name in names]
        columns = tuple(f"step {i}" for i in range(len(self.steps)))
        title = "scheduler: tokens of each request in each step (P prefill, D decode)"
        return Grid(title, columns, (*rows, ("tokens", totals)))


@dataclass(frozen=True, slots=True, repr=False)
class AttentionMetadataView(Structure):
    """CommonAttentionMetadata, request by request.

    Mirrors: none; a picture.
    """

    requests: tuple[tuple[str, int, int, int, tuple[int, ...]], ...]  # name, query start, query end, seq_len, blocks
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, common: CommonAttentionMetadata, req_ids: Sequence[str], block_size: int) -> AttentionMetadataView:
        """block_size: to know how many entries of a block-table row are live."""
        starts, lengths = _ints(common.query_start_loc), _ints(common.seq_lens)
        table = [_ints(row[: -(-length // block_size)]) for row, length in zip(common.block_table_tensor, lengths)]
        requests = zip(req_ids, starts, starts[1:], lengths, map(tuple, table))
        return cls(tuple(requests), common.max_query_len, common.max_seq_len)

    def grid(self) -> Grid:
        """One row a request."""

        def row(index: int) -> tuple[Cell, ...]:
            _, start, end, length, blocks = self.requests[index]
            texts = (f"{start}:{end}", end - start, length - end + start, length, ",".join(map(str, blocks)))
            return tuple(Cell(str(text), owner(index)) for text in texts)

        title = f"attention metadata: {len(self.requests)} requests, {self.requests[-1][2]} tokens"
        columns = ("rows of query", "query_len", "computed before", "seq_len", "blocks")
        rows = tuple((request[0], row(i)) for i, request in enumerate(self.requests))
        return Grid(title, columns, rows, (f"max_query_len {self.max_query_len}, max_seq_len {self.max_seq_len}",))
