"""The persistent batch: rows come, go and move without being shared, lost or overrun."""

import random

import numpy as np
import pytest
import torch

from minivllm.sampling.params import SamplingParams
from minivllm.worker.input_batch import CachedRequestState, InputBatch


def make_batch(rows: int = 4, max_model_len: int = 32, block_sizes: tuple[int, ...] = (4, 8)) -> InputBatch:
    return InputBatch(rows, max_model_len, 64, "cpu", 1000, block_sizes)


def make_state(name: str, prompt_len: int = 5, outputs: int = 0, groups: int = 2) -> CachedRequestState:
    base = sum(name.encode()) * 10 % 900
    return CachedRequestState(
        req_id=name,
        prompt_token_ids=[base + i for i in range(prompt_len)],
        sampling_params=SamplingParams(),
        block_ids=tuple([base + 7 * group + i for i in range(2)] for group in range(groups)),
        num_computed_tokens=prompt_len - 1,
        output_token_ids=[base + 50 + i for i in range(outputs)],
        generator=torch.Generator(),
    )


def test_add_fills_every_field() -> None:
    batch = make_batch()
    state = make_state("a", prompt_len=3, outputs=2)
    assert batch.add_request(state) == 0
    assert batch.req_ids == ["a"]
    assert batch.req_id_to_index == {"a": 0}
    assert batch.token_ids_cpu[0, :5].tolist() == state.prompt_token_ids + state.output_token_ids
    assert (batch.num_tokens[0], batch.num_prompt_tokens[0], batch.num_computed_tokens_cpu[0]) == (5, 3, 2)
    assert [batch.block_table[g].get_row(0) for g in range(2)] == list(state.block_ids)
    assert batch.state(0) is state
    batch.check_integrity()


def test_holes_are_reused_before_the_end() -> None:
    batch = make_batch(rows=4)
    for name in "abcd":
        batch.add_request(make_state(name))
    assert batch.remove_request("c") == 2
    assert batch.remove_request("a") == 0
    assert batch.remove_request("a") is None
    assert batch.add_request(make_state("e")) == 0
    batch.condense()
    assert batch.req_ids == ["e", "b", "d"]
    batch.check_integrity()


def test_condense_moves_the_last_rows_into_the_first_holes() -> None:
    batch = make_batch(rows=6)
    for name in "abcdef":
        batch.add_request(make_state(name, prompt_len=3 + ord(name) % 5))
    for name in "acf":
        batch.remove_request(name)
    batch.condense()
    assert batch.req_ids == ["e", "b", "d"]
    batch.check_integrity()
    for name in "ebd":
        batch.remove_request(name)
    batch.condense()
    assert (batch.num_reqs, batch.req_ids) == (0, [])
    assert not batch.block_table[0].num_blocks_per_row.any()
    batch.check_integrity()


def test_swapping_twice_is_the_identity_and_shares_nothing() -> None:
    """vLLM #43894, #48419: after a swap or a condense two rows were one array."""
    batch = make_batch()
    long, short = make_state("long", prompt_len=20, outputs=3), make_state("short", prompt_len=2)
    batch.add_request(long)
    batch.add_request(short)
    before = (batch.token_ids_cpu.copy(), batch.num_tokens.copy(), batch.block_table[0].get_numpy_array().copy())
    batch.swap_states(0, 1)
    assert batch.req_ids == ["short", "long"]
    batch.check_integrity()
    batch.append_token(0, 111)
    batch.append_token(1, 222)
    batch.check_integrity()
    assert (short.output_token_ids, long.output_token_ids[-1]) == ([111], 222)
    batch.swap_states(1, 0)
    batch.swap_states(1, 1)
    batch.check_integrity()
    assert batch.req_ids == ["long", "short"]
    assert batch.token_ids_cpu[0, :23].tolist() == before[0][0, :23].tolist()
    assert batch.num_tokens.tolist() == (before[1] + [1, 1, 0, 0]).tolist()
    assert batch.block_table[0].get_numpy_array().tolist() == before[2].tolist()


def test_random_life_of_a_batch() -> None:
    """Whatever the order of arrivals, departures, swaps and tokens, each row holds its own request."""
    rng = random.Random(5)
    batch = make_batch(rows=8)
    present: dict[str, CachedRequestState] = {}
    for step in range(400):
        for name in rng.sample(sorted(present), rng.randint(0, min(3, len(present)))):
            batch.remove_request(name)
            del present[name]
        while len(present) < 8 and rng.random() < 0.6:
            state = make_state(f"{step}-{len(present)}-{rng.randint(0, 9999)}", rng.randint(1, 12), rng.randint(0, 3))
            if state.req_id not in present:
                batch.add_request(state)
                present[state.req_id] = state
        batch.condense()
        if len(present) > 1:
            batch.swap_states(*rng.sample(range(len(present)), 2))
        for row in range(batch.num_reqs):
            if batch.num_tokens[row] < batch.max_model_len:
                batch.append_token(row, rng.randint(0, 999))
        batch.check_integrity()
        assert {batch.state(row).req_id: batch.state(row) for row in range(batch.num_reqs)} == present
        assert sorted(batch.req_id_to_index.values()) == list(range(len(present)))


def test_a_refused_request_leaves_the_batch_as_it_was() -> None:
    batch = make_batch(rows=2, max_model_len=16, block_sizes=(4, 8))
    batch.add_request(make_state("a"))
    with pytest.raises(ValueError, match="'a' is already in row 0"):
        batch.add_request(make_state("a"))
    with pytest.raises(ValueError, match=r"17 tokens, a row holds max_model_len=16.*shorten the prompt"):
        batch.add_request(make_state("long", prompt_len=17))
    too_many = make_state("wide")
    too_many.block_ids = ([1], list(range(100)))  # the second group is too long, the first is not
    with pytest.raises(ValueError, match="row 1 would hold 100 blocks"):
        batch.add_request(too_many)
    with pytest.raises(ValueError, match="1 lists for 2"):
        batch.add_request(make_state("few", groups=1))
    batch.check_integrity()
    batch.add_request(make_state("b"))
    with pytest.raises(ValueError, match="finds all 2 rows taken: raise max_num_seqs"):
        batch.add_request(make_state("c"))
    batch.check_integrity()
    assert batch.req_ids == ["a", "b"]


def test_tokens_stop_at_max_model_len() -> None:
    """vLLM #50287: one token too many is the first token of the next row."""
    batch = make_batch(rows=2, max_model_len=6)
    batch.add_request(make_state("a", prompt_len=5))
    batch.add_request(make_state("b", prompt_len=5))
    batch.append_token(0, 1)
    with pytest.raises(ValueError, match=r"'a' already holds max_model_len=6 tokens: finish it"):
        batch.append_token(0, 2)
    batch.check_integrity()


def test_a_new_batch_follows_a_changed_max_model_len() -> None:
    """vLLM #46787: the batch kept the size of an earlier max_model_len."""
    for max_model_len in (64, 16, 1024):
        batch = make_batch(max_model_len=max_model_len, block_sizes=(16,))
        assert batch.token_ids_cpu.shape == (4, max_model_len)
        assert batch.block_table[0].max_num_blocks_per_req * 16 >= max_model_len
        batch.add_request(make_state("a", prompt_len=max_model_len - 1, groups=1))
        batch.append_token(0, 5)
        with pytest.raises(ValueError, match=f"max_model_len={max_model_len}"):
            batch.append_token(0, 5)


def test_sampling_metadata_is_made_when_rows_change() -> None:
    batch = make_batch()
    states = {name: make_state(name, prompt_len=3 + i) for i, name in enumerate("abc")}
    for i, state in enumerate(states.values()):
        state.sampling_params = SamplingParams(temperature=min(0.5 + i, 2.0))
        batch.add_request(state)

    def temperatures(rows: list[int] | None = None) -> list[float]:
        metadata = batch.sampling_metadata(None if rows is None else np.array(rows))
        owners = [batch.state(row) for row in (range(batch.num_reqs) if rows is None else rows)]
        assert [row.prompt_token_ids for row in metadata.rows] == [owner.prompt_token_ids for owner in owners]
        assert all(row.output_token_ids is owner.output_token_ids for row, owner in zip(metadata.rows, owners))
        assert all(row.generator is owner.generator for row, owner in zip(metadata.rows, owners))
        return metadata.temperature.tolist()

    assert temperatures() == [0.5, 1.5, 2.0]
    first = batch.sampling_metadata()
    batch.append_token(0, 9)
    assert batch.sampling_metadata() is first
    assert first.rows[0].output_token_ids == [9]
    assert temperatures([2, 0]) == [2.0, 0.5]
    assert temperatures([2, 0]) == [2.0, 0.5]
    batch.swap_states(0, 2)
    assert temperatures([2, 0]) == [0.5, 2.0]
    batch.remove_request("c")
    batch.condense()
    assert temperatures() == [0.5, 1.5]
    second = batch.sampling_metadata()
    batch.add_request(states["c"])
    assert batch.sampling_metadata() is not second
    assert temperatures() == [0.5, 1.5, 2.0]


def test_rows_without_a_request_are_refused() -> None:
    batch = make_batch()
    batch.add_request(make_state("a"))
    for row in (-1, 1, 9):
        with pytest.raises(ValueError, match=f"row {row} holds no request; rows in use: \\[0\\]"):
            batch.append_token(row, 1)
        with pytest.raises(ValueError, match="holds no request"):
            batch.swap_states(0, row)


def test_dummy_run_after_a_condense_reads_and_writes_no_stale_row() -> None:
    """vLLM #37728: the rows left behind by a condense still pointed at pages in use."""
    batch = make_batch(block_sizes=(4,))
    for name in "abc":
        batch.add_request(make_state(name, groups=1))
    batch.remove_request("a")
    batch.condense()
    table = batch.block_table[0]
    table.commit_block_table(4)
    assert not table.get_device_tensor(4)[2:].any()
    with pytest.raises(ValueError, match="position 0 of row 2 has no block"):
        table.compute_slot_mapping(4, np.array([0, 1, 2, 3, 4], dtype=np.int32), np.zeros(4, dtype=np.int64))


def breakages() -> list[tuple[str, str]]:
    return [
        ("batch.token_ids_cpu[1, 0] += 1", "row 1 .*tokens are not"),
        ("batch.num_tokens[0] -= 1", "row 0 .*tokens are not"),
        ("batch.num_tokens[3] = 1", "row 3 .no request.: its tokens"),
        ("batch.num_prompt_tokens[0] = 9", "num_prompt_tokens 9"),
        ("batch.num_computed_tokens_cpu[1] = 99", "99 of 5 tokens computed"),
        ("batch.num_computed_tokens_cpu[3] = 1", "1 of 0 tokens computed"),
        ("batch.block_table[1].append_row([5], 0)", "row 0 .*holds blocks"),
        ("batch.block_table[0].append_row([5], 2)", "row 2 .no request.: holds blocks"),
        ("batch.req_id_to_index['a'] = 1", "req_id_to_index"),
        ("batch.state(1).block_ids = batch.state(0).block_ids", "share one list"),
        ("batch.state(1).output_token_ids = batch.state(0).output_token_ids", "share one list"),
    ]


@pytest.mark.parametrize(("breakage", "message"), breakages())
def test_check_integrity_finds(breakage: str, message: str) -> None:
    batch = make_batch()
    batch.add_request(make_state("a"))
    batch.add_request(make_state("b"))
    batch.check_integrity()
    exec(breakage, {"batch": batch})
    with pytest.raises(RuntimeError, match=message):
        batch.check_integrity()
