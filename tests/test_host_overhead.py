"""The benchmark of host cost, small: its rows, its files, and that each round leaves the pool as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_overhead

COLUMNS = ["groups", "num_blocks", "requests", "steps", "allocate_slots_us", "attention_metadata_us"]


def test_rows_for_every_number_of_groups_and_size_of_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    arguments = ["--num-blocks", "40,80", "--requests", "3", "--rounds", "2", "--out", str(out)]
    assert host_overhead.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["groups"], row["num_blocks"]) for row in rows] == [(1, 40), (1, 80), (4, 40), (4, 80)]
    for row in rows:
        assert list(row) == COLUMNS
        assert (row["requests"], row["steps"]) == (3, 2 * host_overhead.BLOCK)
        assert row["allocate_slots_us"] > 0
        assert row["attention_metadata_us"] > 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {5}


@pytest.mark.parametrize("num_groups", host_overhead.LAYERS)
def test_a_round_fits_the_smallest_pool_and_leaves_nothing(num_groups: int) -> None:
    smallest = host_overhead.blocks_needed(num_groups, 17)  # one request more than a block has tokens
    manager, runner = host_overhead.build(num_groups, smallest, 17)
    for _ in range(2):
        allocate, metadata = host_overhead.run_round(manager, runner, 17)
        assert len(allocate) == len(metadata) == host_overhead.BLOCK
        manager.check_integrity()
        runner.input_batch.check_integrity()
        assert (manager.num_free_blocks, runner.input_batch.num_reqs) == (smallest - 1, 0)


def test_metadata_is_that_of_the_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, runner = host_overhead.build(4, 60, 3)
    seen = []
    original = runner._build_attention_metadata

    def watched(inputs: object) -> object:
        tables = [manager.get_block_ids(str(index)) for index in range(3)]
        built, _ = original(inputs)  # type: ignore[arg-type]
        seen.append(runner._seq_lens.cpu[:3].tolist())
        for group, entries in enumerate(runner.attn_groups):
            ids = tables[0][group]
            row = runner.input_batch.req_id_to_index["0"]
            assert built[entries[0].layer_names[0]].block_table[row][len(ids) - 1] == ids[-1]  # type: ignore[attr-defined]
        return built, {}

    monkeypatch.setattr(runner, "_build_attention_metadata", watched)
    host_overhead.run_round(manager, runner, 3)
    assert seen == [[17 + step, 18 + step, 19 + step] for step in range(host_overhead.BLOCK)]


def test_a_pool_too_small_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ValueError, match=r"a pool of 12 blocks is too small: 1 requests in 4 KV-cache groups need 13"):
        host_overhead.build(4, 12, 1)


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_overhead.main(["--rounds", "0"])
    assert "--rounds 0" in capsys.readouterr().err
