"""Block tables: slots against a plain loop, capacity, borders, wide numbers, buffers that stay in place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.worker.block_table import BlockTable, MultiGroupBlockTable, block_table_width, context_parallel_slots


def make_table(block_size: int = 4, rows: int = 4, width: int = 8, tokens: int = 64, **options: int) -> BlockTable:
    return BlockTable(block_size, rows, width, tokens, "cpu", **options)


def slots_of(table: BlockTable, computed: list[int], scheduled: list[int]) -> list[int]:
    """Run compute_slot_mapping on consecutive positions; check the tail; return the live slots."""
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    ranges = [np.arange(c, c + s, dtype=np.int64) for c, s in zip(computed, scheduled, strict=True)]
    table.slot_mapping.fill_(-77)
    table.compute_slot_mapping(len(scheduled), starts, np.concatenate(ranges))
    assert table.slot_mapping[starts[-1] :].eq(-1).all()
    return table.slot_mapping[: starts[-1]].tolist()


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    kernel_divisor = draw(st.sampled_from([d for d in range(1, block_size + 1) if block_size % d == 0]))
    requests = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=6))
    return block_size, kernel_divisor, requests


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 2**32 - 1))
def test_slots_match_a_loop(batch: tuple[int, int, list[tuple[int, int]]], seed: int) -> None:
    """vLLM #51017: the slot mapping is compared with the definition, token by token."""
    block_size, kernel_block_size, requests = batch
    rng = np.random.default_rng(seed)
    width = -(-60 // block_size)
    table = BlockTable(block_size, len(requests) + 1, width, 128, "cpu", kernel_block_size=kernel_block_size)
    expected = []
    for row, (computed, scheduled) in enumerate(requests):
        needed = -(-(computed + scheduled) // block_size)
        blocks = rng.integers(1, 1000, needed).tolist()
        table.add_row(blocks[: needed // 2], row)
        table.append_row(blocks[needed // 2 :], row)
        for position in range(computed, computed + scheduled):
            expected.append(blocks[position // block_size] * block_size + position % block_size)
    table.commit_block_table(len(requests))
    assert slots_of(table, [c for c, _ in requests], [s for _, s in requests]) == expected
    # The kernel's smaller blocks must lead to the same slots.
    kernel_table = table.get_device_tensor(len(requests))
    through_kernel = [
        int(kernel_table[row, position // kernel_block_size]) * kernel_block_size + position % kernel_block_size
        for row, (computed, scheduled) in enumerate(requests)
        for position in range(computed, computed + scheduled)
    ]
    assert through_kernel == expected


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_last_token_at_a_block_border(length: int) -> None:
    """MinivLLM 76: the slot was wrong when length % block_size == 0."""
    table = make_table()
    blocks = [11, 7, 29, 3, 5][: -(-length // 4)]
    table.add_row(blocks, 0)
    position = length - 1
    assert slots_of(table, [position], [1]) == [blocks[position // 4] * 4 + position % 4]
    # The next token needs a new block exactly when this one ended its own.
    if length % 4 == 0:
        with pytest.raises(ValueError, match=f"position {length} of row 0 has no block"):
            slots_of(table, [length], [1])
    else:
        assert slots_of(table, [length], [1]) == [blocks[-1] * 4 + length % 4]


def test_position_past_the_row_never_reads_the_neighbour() -> None:
    """vLLM #54296: past its own width, a row's next cell is the neighbour's first."""
    table = make_table(block_size=4, rows=3, width=2)
    table.add_row([5, 6], 0)
    table.add_row([7, 8], 1)
    with pytest.raises(ValueError, match=r"position 8 of row 0 has no block: the row holds 2 blocks of 4 tokens"):
        slots_of(table, [8], [1])
    with pytest.raises(ValueError, match="position 8 of row 1"):
        slots_of(table, [0, 6], [3, 4])
    table.add_row([5], 0)  # the stale 6 behind the row's end is no block of the row either
    with pytest.raises(ValueError, match="position 4 of row 0"):
        slots_of(table, [4], [1])
    with pytest.raises(ValueError, match="position -1 of row 0"):
        slots_of(table, [-1], [1])


def test_a_full_row_refuses_more() -> None:
    """vLLM #50287, #10730: an append past the row's end wrote into the next request."""
    table = make_table(width=3)
    table.add_row([9, 9, 9], 1)
    table.add_row([1, 2], 0)
    for blocks in ([3, 4], [3, 4, 5]):
        with pytest.raises(ValueError, match=r"row 0 would hold \d blocks, but its capacity is 3 .* max_model_len"):
            table.append_row(blocks, 0)
    assert table.get_row(0) == [1, 2]
    assert table.get_row(1) == [9, 9, 9]
    table.append_row([3], 0)
    with pytest.raises(ValueError, match="capacity is 3"):
        table.append_row([4], 0)
    assert table.get_numpy_array().tolist() == [[1, 2, 3], [9, 9, 9], [0, 0, 0], [0, 0, 0]]


def test_rows_and_ids_outside_their_range() -> None:
    table = make_table(rows=2)
    with pytest.raises(ValueError, match="row -1 is negative"):
        table.append_row([1], -1)
    with pytest.raises(IndexError):
        table.append_row([1], 2)
    with pytest.raises(ValueError, match="block id -1"):
        table.append_row([-1], 0)
    with pytest.raises(ValueError, match="block id -5"):
        table.append_row([1, -5], 0)
    for blocks in ([2**31], [1, 2**31]):
        with pytest.raises((ValueError, OverflowError)):
            table.append_row(blocks, 0)
    assert table.num_blocks_per_row.tolist() == [0, 0]


def test_slots_past_int32() -> None:
    """vLLM #1486: a block id fits int32, block_id * block_size does not."""
    table = make_table(block_size=16)
    table.add_row([2**28 + 3, 2**31 - 1], 0)
    assert table.slot_mapping.dtype == torch.int64
    assert slots_of(table, [14], [4]) == [
        (2**28 + 3) * 16 + 14,
        (2**28 + 3) * 16 + 15,
        (2**31 - 1) * 16,
        (2**31 - 1) * 16 + 1,
    ]


def test_row_starts_past_int32() -> None:
    """vLLM #50427: row * width passes 2**31 in a large table. The table here is small, the row's number is not."""
    table = make_table(rows=3, width=2)
    table.add_row([5], 2)
    assert table._row_starts.dtype == np.int64
    table._row_starts = table._row_starts * 2**30
    asked: list[int] = []

    def take(cells: np.ndarray) -> np.ndarray:
        asked.extend(cells.tolist())
        return np.full(len(cells), 5, dtype=np.int32)

    table._flat = SimpleNamespace(take=take)
    assert slots_of(table, [0, 0, 1], [0, 0, 2]) == [21, 22]
    assert asked == [2 * 2 * 2**30] * 2


def test_malformed_steps_are_refused() -> None:
    table = make_table(tokens=4)
    table.add_row([1, 2], 0)
    with pytest.raises(ValueError, match="5 tokens in one step, but the slot buffer holds 4"):
        slots_of(table, [0], [5])
    with pytest.raises(ValueError, match="query_start_loc ends at 3 for 1 requests and 2 positions"):
        table.compute_slot_mapping(1, np.array([0, 3], dtype=np.int32), np.array([0, 1]))
    with pytest.raises(ValueError, match="on meta"):
        table.compute_slot_mapping(1, torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64, device="meta"))


def test_tensors_are_taken_as_numpy_is() -> None:
    table = make_table()
    table.add_row([3, 4], 0)
    table.compute_slot_mapping(1, torch.tensor([0, 3, 0, 0], dtype=torch.int32), torch.tensor([3, 4, 5]))
    assert table.slot_mapping[:4].tolist() == [15, 16, 17, -1]


def test_buffers_stay_where_they_are() -> None:
    """Captured graphs hold these addresses, and on the CPU the device tensor is the host's: no copy."""
    table = make_table(kernel_block_size=2)
    plain = make_table()
    addresses = [t.data_ptr() for t in (table.get_device_tensor(1), table.slot_mapping, plain.get_device_tensor(1))]
    for step in range(3):
        for each in (table, plain):
            each.add_row([step + 1, step + 2], 0)
            each.commit_block_table(1)
            slots_of(each, [0], [5])
    assert addresses == [
        t.data_ptr() for t in (table.get_device_tensor(1), table.slot_mapping, plain.get_device_tensor(1))
    ]
    assert plain.get_device_tensor(1).data_ptr() == plain.get_cpu_tensor().data_ptr()
    assert plain.get_device_tensor(1).dtype == torch.int32


def test_a_device_has_its_own_copy() -> None:
    """The "meta" device stands in for an accelerator: shapes and dtypes, no values."""
    table = BlockTable(4, 3, 2, 8, "meta", kernel_block_size=2)
    table.add_row([1, 2], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping(1, np.array([0, 8], dtype=np.int32), np.arange(8))
    assert (table.slot_mapping.device.type, table.get_cpu_tensor().device.type) == ("meta", "cpu")
    assert (table.get_device_tensor(2).device.type, table.get_device_tensor(2).shape) == ("meta", (2, 4))


def test_dummy_run_touches_no_live_row() -> None:
    """vLLM #37728, #49757: a dummy run wrote through the rows of requests that were still there."""
    table = make_table()
    table.add_row([3, 4], 0)
    slots_of(table, [0], [8])
    table.clear_slot_mapping()
    null = table.get_null_tensor(3)
    assert table.slot_mapping.eq(-1).all()
    assert null.shape == table.get_device_tensor(3).shape
    assert not null.any()
    null.fill_(99)
    assert table.get_row(0) == [3, 4]
    assert slots_of(table, [7], [1]) == [4 * 4 + 3]


def test_moved_and_cleared_rows_own_nothing() -> None:
    table = make_table()
    table.add_row([1, 2, 3], 3)
    table.move_row(3, 0)
    assert (table.get_row(0), table.get_row(3)) == ([1, 2, 3], [])
    table.append_row([8], 3)
    assert table.get_row(0) == [1, 2, 3]
    table.swap_row(0, 3)
    assert (table.get_row(0), table.get_row(3)) == ([8], [1, 2, 3])
    table.clear_row(3)
    assert not table.get_numpy_array()[3].any()


def test_kernel_blocks_must_divide() -> None:
    with pytest.raises(ValueError, match="kernel_block_size=3 does not divide block_size=4"):
        make_table(kernel_block_size=3)
    for name in ("block_size", "rows", "width", "tokens"):
        with pytest.raises(ValueError, match=r"at least 1, got .*0"):
            make_table(**{name: 0})


def test_kernel_table_past_the_live_columns_is_null_blocks() -> None:
    table = make_table(width=3, kernel_block_size=2)
    table.add_row([5], 0)
    table.commit_block_table(2)
    assert table.get_device_tensor(2).tolist() == [[10, 11, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("block_size", "blocks", "width"), [(16, 1, 8), (16, 8, 8), (16, 9, 16), (3, 1, 128), (256, 5, 5)]
)
def test_width_covers_whole_tiles(block_size: int, blocks: int, width: int) -> None:
    assert block_table_width(blocks, block_size) == width
    assert width * block_size % 128 == 0


def test_context_parallel_ranks_partition_the_tokens() -> None:
    table = np.array([[3, 5], [7, 0]], dtype=np.int32)
    starts, positions = np.array([0, 9, 12], dtype=np.int32), np.array([*range(9), *range(3)])
    per_rank = [
        context_parallel_slots(
            table, starts, positions, block_size=4, world_size=2, rank=rank, interleave=2, max_num_batched_tokens=16
        )
        for rank in range(2)
    ]
    stored = np.stack(per_rank) >= 0
    assert stored[:, :12].sum(axis=0).tolist() == [1] * 12
    assert not stored[:, 12:].any()
    for slots in per_rank:
        live = slots[slots >= 0].tolist()
        assert len(set(live)) == len(live)


def test_groups_are_edited_together() -> None:
    tables = MultiGroupBlockTable(3, 64, 32, "cpu", [4, 16], kernel_block_sizes=[4, 8])
    assert [t.max_num_blocks_per_req for t in tables.block_tables] == [32, 8]
    tables.add_row(([1, 2], [9]), 1)
    tables.append_row(([3], []), 1)
    tables.move_row(1, 0)
    tables.swap_row(0, 2)
    tables.commit_block_table(3)
    assert [t.get_row(2) for t in tables.block_tables] == [[1, 2, 3], [9]]
    tables.compute_slot_mapping(3, np.array([0, 0, 0, 2], dtype=np.int32), np.array([10, 11]))
    assert tables[0].slot_mapping[:3].tolist() == [14, 15, -1]
    assert tables[1].slot_mapping[:3].tolist() == [154, 155, -1]
    tables.clear_slot_mapping()
    assert all(t.slot_mapping.eq(-1).all() for t in tables.block_tables)
    tables.clear_row(2)
    assert [t.get_row(2) for t in tables.block_tables] == [[], []]
    with pytest.raises(ValueError, match="1 lists for 2 KV-cache groups"):
        tables.append_row(([1],), 0)
    with pytest.raises(ValueError, match="one value a KV-cache group"):
        MultiGroupBlockTable(3, 64, 32, "cpu", [4, 16], kernel_block_sizes=[4])
