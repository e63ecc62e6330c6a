"""slot_mapping.json: rows, slots, kernel blocks, table widths, context-parallel slots."""

from typing import Any

import numpy as np
import pytest
from golden_cases import cases

from minivllm.worker.block_table import BlockTable, block_table_width, context_parallel_slots, map_to_kernel_blocks

PLAIN = {
    "prefill_partial_last_block",
    "chunked_prefill",
    "decode",
    "mixed",
    "mixed_with_extra_blocks",
    "null_blocks",
}
FIELDS = {"id", "kind"}
BATCH_FIELDS = FIELDS | {"block_size", "requests", "query_start_loc", "positions", "slot_mapping"}


def batch_of(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """query_start_loc and positions derived from the requests, checked against the file's."""
    scheduled = [request["num_scheduled"] for request in case["requests"]]
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    ranges = [np.arange(r["num_computed"], r["num_computed"] + r["num_scheduled"]) for r in case["requests"]]
    positions = np.concatenate(ranges).astype(np.int64)
    assert starts.tolist() == case["query_start_loc"]
    assert positions.tolist() == case["positions"]
    return starts, positions


def filled_table(case: dict[str, Any], width: int, **options: int) -> BlockTable:
    num_tokens = len(case["positions"])
    table = BlockTable(case["block_size"], len(case["requests"]) + 2, width, num_tokens + 3, "cpu", **options)
    for row, request in enumerate(case["requests"]):
        table.add_row(request["block_ids"], row)
    return table


def check_slots(table: BlockTable, case: dict[str, Any]) -> None:
    starts, positions = batch_of(case)
    table.slot_mapping.fill_(-77)
    table.commit_block_table(len(case["requests"]))
    table.compute_slot_mapping(len(case["requests"]), starts, positions)
    assert table.slot_mapping.tolist() == case["slot_mapping"] + [-1] * 3


def run_plain(case: dict[str, Any]) -> None:
    assert set(case) == BATCH_FIELDS
    check_slots(filled_table(case, max(len(r["block_ids"]) for r in case["requests"])), case)


def run_kernel_blocks(case: dict[str, Any]) -> None:
    tables = {"kernel_block_size", "kernel_block_stride", "manager_block_table", "kernel_block_table"}
    assert set(case) == BATCH_FIELDS | tables
    size, stride = case["kernel_block_size"], case["kernel_block_stride"]
    rows, width = np.array(case["manager_block_table"], dtype=np.int32), len(case["manager_block_table"][0])
    table = filled_table(case, width, kernel_block_size=size, kernel_block_stride=stride)
    check_slots(table, case)
    assert table.get_numpy_array()[: len(rows)].tolist() == rows.tolist()
    assert table.get_device_tensor(len(rows)).tolist() == case["kernel_block_table"]
    expanded = map_to_kernel_blocks(rows, case["block_size"] // size, stride)
    assert expanded.tolist() == case["kernel_block_table"]


def run_row_ops(case: dict[str, Any]) -> None:
    assert set(case) == FIELDS | {"num_rows", "width", "ops", "rows", "num_blocks_per_row"}
    table = BlockTable(4, case["num_rows"], case["width"], 1, "cpu")
    for name, *arguments in case["ops"]:
        if name in ("add_row", "append_row"):
            row, ids = arguments
            getattr(table, name)(ids, row)
        elif name in ("move_row", "swap_row", "clear_row"):
            getattr(table, name)(*arguments)
        else:
            raise NotImplementedError(f"row operation {name!r} is not known")
    assert table.get_numpy_array().tolist() == case["rows"]
    assert table.num_blocks_per_row.tolist() == case["num_blocks_per_row"]


def run_width(case: dict[str, Any]) -> None:
    assert set(case) == FIELDS | {"rows"}
    for max_num_blocks, block_size, aligned, unaligned in case["rows"]:
        assert block_table_width(max_num_blocks, block_size) == aligned
        assert block_table_width(max_num_blocks, block_size, alignment=1) == unaligned


def run_context_parallel(case: dict[str, Any]) -> None:
    sharding = {"cp_world_size", "cp_rank", "cp_interleave", "max_num_batched_tokens"}
    assert set(case) == BATCH_FIELDS | sharding
    starts, positions = batch_of(case)
    width = max(len(r["block_ids"]) for r in case["requests"])
    rows = [r["block_ids"] + [0] * (width - len(r["block_ids"])) for r in case["requests"]]
    slots = context_parallel_slots(
        np.array(rows, dtype=np.int32),
        starts,
        positions,
        block_size=case["block_size"],
        world_size=case["cp_world_size"],
        rank=case["cp_rank"],
        interleave=case["cp_interleave"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
    )
    assert slots.tolist() == case["slot_mapping"]
    if case["cp_world_size"] == 1:
        table = BlockTable(case["block_size"], len(rows), width, case["max_num_batched_tokens"], "cpu")
        for row, request in enumerate(case["requests"]):
            table.add_row(request["block_ids"], row)
        table.compute_slot_mapping(len(rows), starts, positions)
        assert table.slot_mapping.tolist() == case["slot_mapping"]


@pytest.mark.parametrize("case", cases("slot_mapping"))
def test_slot_mapping(case: dict[str, Any]) -> None:
    special = {
        "kernel_blocks": run_kernel_blocks,
        "row_ops": run_row_ops,
        "block_table_width": run_width,
        "context_parallel": run_context_parallel,
    }
    kind = case["kind"]
    if kind in PLAIN:
        run_plain(case)
    elif kind in special:
        special[kind](case)
    else:
        raise NotImplementedError(f"slot_mapping kind {kind!r} is not known")
