"""Block tables: for each row of the batch, the pages that hold its tokens, and from them each token's slot.

One table per KV-cache group. Buffers are made once and written in place, so that captured graphs keep reading the
right addresses. Rows are edited on the host; `commit_block_table` brings them to the device. A slot is the flat index
of a token in the cache, `block_id * block_size + position % block_size`; slots are computed here, in int64, and every
entry of the slot buffer that no token of the step owns is -1.

Mirrors vllm/v1/worker/block_table.py (0.32.0). Left out: the Triton and C++ slot kernels (numpy is quicker for what a
host prepares), and context parallelism inside the table (`context_parallel_slots` shows its rule).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minivllm.core.kv_cache_interface import cdiv

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.signedinteger[Any]]

PAD_SLOT_ID = -1
WIDTH_ALIGNMENT = 128  # tokens: some attention kernels read whole tiles of the table


class CpuGpuBuffer:
    """A host tensor, its numpy view, and its twin on the device. On the CPU the twin is the host tensor itself.

    With an accelerator the host side is pinned and copies are asynchronous: the host may write the buffer again only
    after the device has read it (the runner waits for the sampled tokens at the end of each step).

    Mirrors: vllm/v1/utils.py CpuGpuBuffer.
    Leaves out: copying back to the host.
    """

    __slots__ = ("cpu", "gpu", "np")

    def __init__(self, *size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        device = torch.device(device)
        self.cpu = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.gpu = self.cpu if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
        self.np: npt.NDArray[Any] = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> Tensor:
        """Bring the first n entries (None: all) to the device and return them there."""
        if self.gpu is not self.cpu:
            self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        return self.gpu[:n]


def block_table_width(max_num_blocks: int, block_size: int, alignment: int = WIDTH_ALIGNMENT) -> int:
    """Columns of a table for `max_num_blocks` blocks a row, so that a row spans a multiple of `alignment` tokens."""
    multiple = alignment // gcd(alignment, block_size)
    return cdiv(max_num_blocks, multiple) * multiple


def map_to_kernel_blocks(block_table: IntArray, blocks_per_kv_block: int, stride: int = 0) -> IntArray:
    """Cut manager blocks into the smaller blocks of the attention kernel.

    block_table: [num_reqs, width]; the result: [num_reqs, width * blocks_per_kv_block]. Kernel block j of manager
    block b is b * stride + j; a stride of 0 means blocks_per_kv_block, pages without a gap.
    """
    parts = np.arange(blocks_per_kv_block, dtype=block_table.dtype)
    kernel_blocks = block_table[:, :, None] * (stride or blocks_per_kv_block) + parts
    return kernel_blocks.reshape(block_table.shape[0], -1)


def context_parallel_slots(
    block_table: IntArray,  # [num_reqs, width] int32
    query_start_loc: IntArray,  # [num_reqs + 1] int32
    positions: IntArray,  # [num_tokens] int64
    *,
    block_size: int,
    world_size: int,
    rank: int,
    interleave: int,
    max_num_batched_tokens: int,
) -> npt.NDArray[np.int64]:  # [max_num_batched_tokens], -1 = not on this rank, or padding
    """Slots on one rank when the tokens of a sequence are dealt out to `world_size` ranks, `interleave` at a time.

    A block then covers block_size * world_size tokens of the sequence, of which each rank stores block_size.
    """
    rows = np.repeat(np.arange(len(query_start_loc) - 1), np.diff(query_start_loc))
    columns, offsets = np.divmod(positions.astype(np.int64), block_size * world_size)
    turn, within = np.divmod(offsets, interleave)
    local = turn // world_size * interleave + within
    slots = block_table[rows, columns].astype(np.int64) * block_size + local
    padded = np.full(max_num_batched_tokens, PAD_SLOT_ID, dtype=np.int64)
    padded[: len(slots)] = np.where(turn % world_size == rank, slots, PAD_SLOT_ID)
    return padded


def _host(values: IntArray | Tensor) -> IntArray:
    if not isinstance(values, Tensor):
        return values
    if values.device.type != "cpu":
        raise ValueError(f"slots are computed on the host, got a tensor on {values.device}: pass the host copy")
    return values.numpy()


class BlockTable:
    """The blocks of each row of the batch, for one KV-cache group.

    Entries at and past a row's length are stale or null: nothing may read them, and `compute_slot_mapping` raises
    rather than do so. Where the attention kernel wants blocks smaller than the manager's, rows hold the manager's ids
    and slots are computed from them; only the device tensor holds the kernel's ids, renewed by `commit_block_table`.

    Mirrors: vllm/v1/worker/block_table.py BlockTable.
    Leaves out: context parallelism (see `context_parallel_slots`), GPU slot kernels.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        kernel_block_size: int | None = None,
        kernel_block_stride: int = 0,
    ) -> None:
        sizes = (block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens)
        if min(sizes) < 1:
            raise ValueError(
                "block_size, max_num_reqs, max_num_blocks_per_req and max_num_batched_tokens must be at least 1, got"
                f" {', '.join(map(str, sizes))}"
            )
        kernel_block_size = block_size if kernel_block_size is None else kernel_block_size
        if kernel_block_size < 1 or block_size % kernel_block_size:
            raise ValueError(
                f"kernel_block_size={kernel_block_size} does not divide block_size={block_size}: take a multiple of it"
            )
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks_per_kv_block = block_size // kernel_block_size
        self.kernel_block_stride = kernel_block_stride or self.blocks_per_kv_block

        shape = (max_num_reqs, max_num_blocks_per_req)
        split = self.blocks_per_kv_block > 1 or self.kernel_block_stride > 1
        self.block_table = CpuGpuBuffer(*shape, dtype=torch.int32, device="cpu" if split else device)
        self.kernel_table = self.block_table
        if split:
            width = max_num_blocks_per_req * self.blocks_per_kv_block
            self.kernel_table = CpuGpuBuffer(max_num_reqs, width, dtype=torch.int32, device=device)
            self._expand(*shape)
            self.kernel_table.copy_to_gpu()
        self._slots = CpuGpuBuffer(max_num_batched_tokens, dtype=torch.int64, device=device)
        self.slot_mapping: Tensor = self._slots.gpu  # [max_num_batched_tokens] int64, -1 = no slot
        self.clear_slot_mapping()

        self.num_blocks_per_row: Int32Array = np.zeros(max_num_reqs, dtype=np.int32)
        # Reading and writing single items is several times quicker through a memoryview than through numpy.
        self._lengths = self.num_blocks_per_row.data
        self._flat: Int32Array = self.block_table.np.reshape(-1)
        self._cells = self._flat.data
        # int64: a row's first cell may lie past 2**31 cells (vLLM #50427).
        self._row_starts = np.arange(max_num_reqs, dtype=np.int64) * max_num_blocks_per_req

    def append_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Add blocks at the end of a row; more than the row can hold is refused and changes nothing."""
        start, count = self._lengths[row_idx], len(block_ids)
        end = start + count
        if end > self.max_num_blocks_per_req or row_idx < 0 or (count and min(block_ids) < 0):
            self._refuse(block_ids, row_idx, end)
        first = row_idx * self.max_num_blocks_per_req + start
        if count == 1:
            self._cells[first] = block_ids[0]
        else:
            self._cells[first : first + count] = array("i", block_ids)
        self._lengths[row_idx] = end

    def add_row(self, block_ids: Sequence[int], row_idx: int) -> None:
        """Replace the blocks of a row."""
        self._lengths[row_idx] = 0
        self.append_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Empty a row: its live entries become the null block."""
        self.block_table.np[row_idx, : self._lengths[row_idx]] = 0
        self._lengths[row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Put the blocks of row src into row tgt, and empty src."""
        length = self._lengths[src]
        table = self.block_table.np
        table[tgt, :length] = table[src, :length]
        self._lengths[tgt] = length
        self.clear_row(src)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        pair, reverse = [src, tgt], [tgt, src]
        self.block_table.np[pair] = self.block_table.np[reverse]
        self.num_blocks_per_row[pair] = self.num_blocks_per_row[reverse]

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the first `num_reqs` rows to the device; call it after the last edit of a step."""
        if self.kernel_table is not self.block_table:
            self._expand(num_reqs, int(self.num_blocks_per_row[:num_reqs].max(initial=0)))
        self.kernel_table.copy_to_gpu(num_reqs)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: IntArray | Tensor,  # [>= num_reqs + 1] int32, host
        positions: IntArray | Tensor,  # [num_tokens] int64, host; request by request
    ) -> None:
        """Write each token's slot into `slot_mapping`, on host and device, and -1 into the rest of the buffer.

        A position that the row has no block for raises ValueError: the next cell belongs to another row.
        """
        starts, where = _host(query_start_loc)[: num_reqs + 1], _host(positions)
        num_tokens = len(where)
        if num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"{num_tokens} tokens in one step, but the slot buffer holds {self.max_num_batched_tokens}:"
                " raise max_num_batched_tokens or schedule fewer"
            )
        if starts[-1] != num_tokens:
            raise ValueError(f"query_start_loc ends at {starts[-1]} for {num_reqs} requests and {num_tokens} positions")
        counts = np.diff(starts)
        columns = where // self.block_size
        outside = columns >= np.repeat(self.num_blocks_per_row[:num_reqs], counts)
        if num_tokens and (outside.any() or where.min() < 0):
            self._refuse_position(int(np.argmax(outside | (where < 0))), starts, where)
        cells = np.repeat(self._row_starts[:num_reqs], counts)
        cells += columns
        slots = self._slots.np
        # In place in int64: a block id fits int32, its slots may not (vLLM #1486).
        live = slots[:num_tokens]
        live[:] = self._flat.take(cells)
        live -= columns
        live *= self.block_size
        live += where  # block * size + (position - column * size)
        slots[num_tokens:] = PAD_SLOT_ID
        self._slots.copy_to_gpu()

    def clear_slot_mapping(self) -> None:
        """Make every slot -1, so that a dummy run writes nowhere."""
        self._slots.np.fill(PAD_SLOT_ID)
        self._slots.copy_to_gpu()

    def get_device_tensor(self, num_reqs: int) -> Tensor:  # [num_reqs, width] int32
        """What attention reads, as of the last commit: kernel blocks where the kernel's are smaller."""
        return self.kernel_table.gpu[:num_reqs]

    def get_null_tensor(self, num_reqs: int) -> Tensor:  # [num_reqs, width] int32
        """A table of null blocks for a dummy run: the live rows belong to real requests (vLLM #37728)."""
        return torch.zeros_like(self.get_device_tensor(num_reqs))

    def get_cpu_tensor(self) -> Tensor:  # [max_num_reqs, max_num_blocks_per_req] int32
        """The host table, in the manager's ids."""
        return self.block_table.cpu

    def get_numpy_array(self) -> Int32Array:  # [max_num_reqs, max_num_blocks_per_req]
        """The host table, in the manager's ids, as a numpy view."""
        return self.block_table.np

    def get_row(self, row_idx: int) -> list[int]:
        """The live blocks of one row, in the manager's ids."""
        return list(self.block_table.np[row_idx, : self._lengths[row_idx]].tolist())

    def _expand(self, num_reqs: int, num_columns: int) -> None:
        """Renew the kernel's ids of the live columns; those past every row's length are read by nobody."""
        self.kernel_table.np[:num_reqs, : num_columns * self.blocks_per_kv_block] = map_to_kernel_blocks(
            self.block_table.np[:num_reqs, :num_columns], self.blocks_per_kv_block, self.kernel_block_stride
        )

    def _refuse(self, block_ids: Sequence[int], row_idx: int, end: int) -> None:
        if row_idx < 0:
            raise ValueError(f"row {row_idx} is negative: rows are 0 to {self.max_num_reqs - 1}")
        if end <= self.max_num_blocks_per_req:
            raise ValueError(f"row {row_idx} was given block id {min(block_ids)}: the least is 0, the null block")
        raise ValueError(
            f"row {row_idx} would hold {end} blocks, but its capacity is {self.max_num_blocks_per_req} blocks of"
            f" {self.block_size} tokens: raise max_model_len, or stop the request sooner"
        )

    def _refuse_position(self, token: int, starts: IntArray, where: IntArray) -> None:
        row = int(np.searchsorted(starts, token, side="right")) - 1
        length = int(self.num_blocks_per_row[row])
        raise ValueError(
            f"position {where[token]} of row {row} has no block: the row holds {length} blocks of {self.block_size}"
            f" tokens, positions below {length * self.block_size}; append its blocks before computing slots"
        )


class MultiGroupBlockTable:
    """One BlockTable a KV-cache group, edited together. `block_ids` is a tuple with one list a group.

    max_num_blocks: most blocks a row of each group, where that is not max_model_len / block_size (Mamba keeps one).

    Mirrors: vllm/v1/worker/block_table.py MultiGroupBlockTable.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_blocks: Sequence[int] | None = None,
    ) -> None:
        kernel_sizes = block_sizes if kernel_block_sizes is None else kernel_block_sizes
        most = [cdiv(max_model_len, size) for size in block_sizes] if max_num_blocks is None else max_num_blocks
        if not len(block_sizes) == len(kernel_sizes) == len(most):
            raise ValueError(
                f"one value a KV-cache group is needed, got block_sizes={list(block_sizes)},"
                f" kernel_block_sizes={list(kernel_sizes)}, max_num_blocks={list(most)}"
            )
        self.block_tables = [
            BlockTable(size, max_num_reqs, block_table_width(blocks, size), max_num_batched_tokens, device, kernel_size)
            for size, kernel_size, blocks in zip(block_sizes, kernel_sizes, most, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.block_tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self.block_tables[group]

    def append_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        """Add blocks at the end of a row of every group."""
        if len(block_ids) != len(self.block_tables):
            raise ValueError(f"block_ids has {len(block_ids)} lists for {len(self.block_tables)} KV-cache groups")
        for table, ids in zip(self.block_tables, block_ids):
            table.append_row(ids, row_idx)

    def add_row(self, block_ids: Sequence[Sequence[int]], row_idx: int) -> None:
        """Replace the blocks of a row of every group."""
        self.clear_row(row_idx)
        self.append_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Empty a row in every group."""
        for table in self.block_tables:
            table.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Put row src into row tgt in every group, and empty src."""
        for table in self.block_tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows in every group."""
        for table in self.block_tables:
            table.swap_row(src, tgt)

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the first `num_reqs` rows of every group to the device."""
        for table in self.block_tables:
            table.commit_block_table(num_reqs)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: IntArray | Tensor,  # [>= num_reqs + 1] int32, host
        positions: IntArray | Tensor,  # [num_tokens] int64, host
    ) -> None:
        """Write every group's slots."""
        for table in self.block_tables:
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)

    def clear_slot_mapping(self) -> None:
        """Make every slot of every group -1, for a dummy run."""
        for table in self.block_tables:
            table.clear_slot_mapping()
