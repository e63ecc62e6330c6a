"""Checks of exercises: the stub fails, the solution passes, wrong answers fail, and the solutions are right."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm import check
from minivllm.attention.batch_split import split_decodes_and_prefills
from minivllm.check.exercise import Exercise, NotWritten, WrongAnswer, first_difference, same, show
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.block_hash import make_block_hasher
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_coordinator import manager_class
from minivllm.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from minivllm.core.layer_grouping import get_kv_cache_groups, unify_kv_cache_spec_page_size
from minivllm.core.scheduler import Scheduler
from minivllm.outputs import ModelRunnerOutput
from minivllm.request import Request, RequestStatus
from minivllm.sampling.params import SamplingParams
from minivllm.worker.block_table import BlockTable

ROOT = Path(__file__).parent.parent.parent
NAMES = sorted(
    {
        name
        for path in (ROOT / "notebooks" / "src").glob("*.py")
        for name in re.findall(r"^# %% exercise (\w+)", path.read_text(), re.M)
    }
)


def ex03_neighbours(block_table: Any, query_start_loc: Any, positions: Any, block_size: int) -> list[int]:
    """As if a request's blocks lay side by side."""
    return [
        block_table[row][0] * block_size + positions[token]
        for row in range(len(block_table))
        for token in range(query_start_loc[row], query_start_loc[row + 1])
    ]


def ex03_place(block_table: Any, query_start_loc: Any, positions: Any, block_size: int) -> list[int]:
    """The token's place in the step instead of its position."""
    slots = []
    for row, blocks in enumerate(block_table):
        for place in range(query_start_loc[row + 1] - query_start_loc[row]):
            slots.append(blocks[place // block_size] * block_size + place % block_size)
    return slots


def ex03_four(block_table: Any, query_start_loc: Any, positions: Any, block_size: int) -> list[int]:
    """Only for block_size 4."""
    return check.ex03.solution(block_table, query_start_loc, positions, 4) if block_size >= 4 else [0] * len(positions)


def ex03_2_stale(slot: int, block_table: Any, seq_lens: Any, block_size: int) -> tuple[int, int] | None:
    """Takes stale entries for live ones."""
    for row, blocks in enumerate(block_table):
        if slot // block_size in blocks:
            return row, blocks.index(slot // block_size) * block_size + slot % block_size
    return None


def ex03_2_block(slot: int, block_table: Any, seq_lens: Any, block_size: int) -> tuple[int, int] | None:
    """Forgets that the offset is one of a block, not of the request."""
    found = check.ex03_2.solution(slot, block_table, seq_lens, block_size)
    return found and (found[0], slot % block_size)


def ex01_forgets_to_restore(holder: Any, context: Any, body: Any) -> Any:
    holder["current"] = context
    return body()


def ex01_clears(holder: Any, context: Any, body: Any) -> Any:
    """Does not know of nesting."""
    holder["current"] = context
    try:
        return body()
    finally:
        holder["current"] = None


def ex01_no_finally(holder: Any, context: Any, body: Any) -> Any:
    """Right unless body raises."""
    former, holder["current"] = holder["current"], context
    result = body()
    holder["current"] = former
    return result


def ex01_swallows(holder: Any, context: Any, body: Any) -> Any:
    """Restores, and hides the error."""
    former, holder["current"] = holder["current"], context
    try:
        return body()
    except Exception:
        return None
    finally:
        holder["current"] = former


def ex01_2_last_wins(groups: Any, metadata: Any) -> dict[str, str]:
    return {name: built for names, built in zip(groups, metadata) for name in names}


def ex01_2_one_for_all(groups: Any, metadata: Any) -> dict[str, str]:
    """One global metadata, the fault of vLLM #17394."""
    names = [name for group in groups for name in group]
    if len(set(names)) < len(names):
        raise ValueError
    return dict.fromkeys(names, metadata[0])


def ex02_swapped(key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    check.ex02.solution(value, key, kv_cache, slot_mapping)


def ex02_writes_minus_one(key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """-1 as an index: the last slot (vLLM #43810)."""
    size = kv_cache.shape[2]
    kv_cache[slot_mapping // size, 0, slot_mapping % size] = key
    kv_cache[slot_mapping // size, 1, slot_mapping % size] = value


def ex02_blocks_in_a_row(key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Ignores the slots: fills from slot 0 on."""
    check.ex02.solution(key, value, kv_cache, torch.arange(len(key)))


def ex02_2_sorted(kv_cache: Any, block_ids: Any, num_tokens: int) -> Any:
    return check.ex02_2.solution(kv_cache, sorted(block_ids), num_tokens)


def ex02_2_whole_blocks(kv_cache: Any, block_ids: Any, num_tokens: int) -> Any:
    """Returns the unused tail of the last block too."""
    return check.ex02_2.solution(kv_cache, block_ids, len(block_ids) * kv_cache.shape[2])


def ex02_2_keys_twice(kv_cache: Any, block_ids: Any, num_tokens: int) -> Any:
    keys, _ = check.ex02_2.solution(kv_cache, block_ids, num_tokens)
    return keys, keys


def ex00_no_eos(logits_of: Any, prompt_token_ids: Any, max_tokens: int, eos_token_id: int) -> list[int]:
    return check.ex00.solution(logits_of, prompt_token_ids, max_tokens, -1)


def ex00_drops_eos(logits_of: Any, prompt_token_ids: Any, max_tokens: int, eos_token_id: int) -> list[int]:
    token_ids = check.ex00.solution(logits_of, prompt_token_ids, max_tokens, eos_token_id)
    return token_ids[:-1] if token_ids[-1] == eos_token_id else token_ids


def ex00_newest_token_only(logits_of: Any, prompt_token_ids: Any, max_tokens: int, eos_token_id: int) -> list[int]:
    return check.ex00.solution(lambda token_ids: logits_of(token_ids[-1:]), prompt_token_ids, max_tokens, eos_token_id)


def ex00_2_one_too_many(num_prompt_tokens: int, max_tokens: int, token_budget: int) -> list[int]:
    """The first output token gets a step of its own."""
    return [*check.ex00_2.solution(num_prompt_tokens, max_tokens, token_budget), 1]


def ex00_2_empty_chunk(num_prompt_tokens: int, max_tokens: int, token_budget: int) -> list[int]:
    """Wrong where the prompt is a multiple of the budget."""
    full, rest = divmod(num_prompt_tokens, token_budget)
    return [token_budget] * full + [rest] + [1] * (max_tokens - 1)


def ex00_2_no_budget(num_prompt_tokens: int, max_tokens: int, token_budget: int) -> list[int]:
    return [num_prompt_tokens] + [1] * (max_tokens - 1)


def ex04_smallest(buckets: Any) -> list[list[str]]:
    """Without the exception for buckets of almost the same size."""
    size = min(map(len, buckets))
    counts = [-(-len(bucket) // size) for bucket in buckets]
    return [bucket[i::n] for bucket, n in zip(buckets, counts) for i in range(n)]


def ex04_at_the_border(buckets: Any) -> list[list[str]]:
    """Takes the largest at 1.5 times exactly, too."""
    sizes = [len(bucket) for bucket in buckets]
    size = max(sizes) if max(sizes) <= 1.5 * min(sizes) else min(sizes)
    counts = [-(-count // size) for count in sizes]
    return [bucket[i::n] for bucket, n in zip(buckets, counts) for i in range(n)]


def ex04_in_a_row(buckets: Any) -> list[list[str]]:
    """Neighbours instead of every n-th layer."""
    cut = []
    for group in check.ex04.solution([list(range(len(bucket))) for bucket in buckets]):
        cut.append(len(group))
    names = [name for bucket in buckets for name in bucket]
    return [names[sum(cut[:i]) : sum(cut[: i + 1])] for i in range(len(cut))]


def ex04_2_always_pads(layers: Any) -> list[tuple[int, int]]:
    largest = max(page for _, page, _ in layers)
    return [(block_size, largest - page) for block_size, page, _ in layers]


def ex04_2_grows_mamba(layers: Any) -> list[tuple[int, int]]:
    """As if a state had room for more tokens."""
    return check.ex04_2.solution([(block_size, page, False) for block_size, page, _ in layers])


def ex04_2_rounds_down(layers: Any) -> list[tuple[int, int]]:
    """More tokens wherever they fit, the rest empty: the page is then no whole number of the former."""
    largest = max(page for _, page, _ in layers)
    return [
        (size, largest - page) if mamba else (size * (largest // page), largest % page) for size, page, mamba in layers
    ]


def ex05_stale(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
    """Takes whole rows of the table."""
    lists = check.ex05.solution(self, common_prefix_len, common_attn_metadata)
    table = common_attn_metadata.block_table_tensor
    starts = torch.arange(len(table) + 1, dtype=torch.int32) * table.shape[1]
    return lists | {"paged_kv_indices": table.flatten(), "paged_kv_indptr": starts}


def ex05_empty_last_page(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
    """0 tokens where the last page is full."""
    lists = check.ex05.solution(self, common_prefix_len, common_attn_metadata)
    return lists | {"paged_kv_last_page_len": common_attn_metadata.seq_lens % self.kv_cache_spec.block_size}


def ex05_new_tokens(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
    """Only the pages of this step's tokens, as if nothing had been computed before."""
    lengths = common_attn_metadata.query_start_loc_cpu.diff()
    return check.ex05.solution(self, 0, dataclasses.replace(common_attn_metadata, seq_lens_cpu=lengths))


def ex05_2_counts_all(query_start_loc: Any, decode_threshold: int) -> tuple[int, int, int, int]:
    """Counts short requests wherever they stand."""
    lengths = [end - start for start, end in itertools.pairwise(query_start_loc)]
    short = [length for length in lengths if length <= decode_threshold]
    return len(short), len(lengths) - len(short), sum(short), sum(lengths) - sum(short)


def ex05_2_one_token(query_start_loc: Any, decode_threshold: int) -> tuple[int, int, int, int]:
    """As if the threshold were always 1."""
    split: tuple[int, int, int, int] = check.ex05_2.solution(query_start_loc, 1)
    return split


def ex08_waiting_first(running: Any, waiting: Any, **rest: Any) -> Any:
    return check.ex08.solution({}, {**waiting, **running}, **rest)


def ex08_no_rows(running: Any, waiting: Any, **rest: Any) -> Any:
    return check.ex08.solution(running, waiting, **rest | {"max_num_seqs": 100})


def ex08_budget_for_each(running: Any, waiting: Any, token_budget: int, chunk_limit: int, max_num_seqs: int) -> Any:
    """Never takes anything off the budget."""
    names = [*running, *waiting][: max(max_num_seqs, len(running))]
    return {name: min({**running, **waiting}[name], chunk_limit, token_budget) for name in names}


def ex08_zeros(running: Any, waiting: Any, **rest: Any) -> Any:
    """Names those that get nothing, too."""
    return dict.fromkeys([*running, *waiting], 0) | check.ex08.solution(running, waiting, **rest)


def ex08_2_always_the_last(running: Any, needs: str, num_needed: int, num_free: int, policy: str) -> Any:
    return check.ex08_2.solution(running, needs, num_needed, num_free, "fcfs")


def ex08_2_one_is_enough(running: Any, needs: str, num_needed: int, num_free: int, policy: str) -> Any:
    return check.ex08_2.solution(running, needs, num_needed, num_free, policy)[:1]


def ex08_2_spares_itself(running: Any, needs: str, num_needed: int, num_free: int, policy: str) -> Any:
    """Never puts out the request that needs the blocks."""
    others, victims = [request for request in running if request[0] != needs], []
    while num_free < num_needed and others:
        victims.append(others.pop() if policy == "fcfs" else max(others, key=lambda request: request[1:3]))
        num_free += victims[-1][3]
        others = [request for request in others if request not in victims]
    return [name for name, *_ in victims]


def ex09_no_chain(token_ids: Any, block_size: int, salt: str | None, digest: Any) -> list[str]:
    """Names blocks by their own tokens."""
    starts = range(0, len(token_ids) - block_size + 1, block_size)
    return [digest(None, token_ids[start : start + block_size], None if start else salt) for start in starts]


def ex09_salt_everywhere(token_ids: Any, block_size: int, salt: str | None, digest: Any) -> Any:
    return check.ex09.solution(token_ids, block_size, salt, lambda parent, tokens, _: digest(parent, tokens, salt))


def ex09_no_salt(token_ids: Any, block_size: int, salt: str | None, digest: Any) -> Any:
    return check.ex09.solution(token_ids, block_size, None, digest)


def ex09_half_a_block(token_ids: Any, block_size: int, salt: str | None, digest: Any) -> list[str]:
    """Hashes the last block though it is not full."""
    hashes: list[str] = []
    for start in range(0, len(token_ids), block_size):
        parent, extra = (hashes[-1], None) if hashes else (None, salt)
        hashes.append(digest(parent, token_ids[start : start + block_size], extra))
    return hashes


def ex09_2_whole_prompt(cached: Any, num_tokens: int, block_size: int, window: int | None) -> Any:
    """Leaves no token to compute."""
    return check.ex09_2.solution(cached, num_tokens + 1, block_size, window)


def ex09_2_no_window(cached: Any, num_tokens: int, block_size: int, window: int | None) -> Any:
    return check.ex09_2.solution(cached, num_tokens, block_size, None)


def ex09_2_last_block_only(cached: Any, num_tokens: int, block_size: int, window: int | None) -> Any:
    return check.ex09_2.solution(cached, num_tokens, block_size, window and 2)


def ex09_2_one_more(cached: Any, num_tokens: int, block_size: int, window: int | None) -> Any:
    """Counts the token that is to be computed into the window's blocks."""
    return check.ex09_2.solution(cached, num_tokens, block_size, window and window + 1)


WRONG: dict[str, list[Callable[..., Any]]] = {
    "ex00": [ex00_no_eos, ex00_drops_eos, ex00_newest_token_only],
    "ex00_2": [ex00_2_one_too_many, ex00_2_empty_chunk, ex00_2_no_budget],
    "ex01": [ex01_forgets_to_restore, ex01_clears, ex01_no_finally, ex01_swallows],
    "ex01_2": [ex01_2_last_wins, ex01_2_one_for_all],
    "ex02": [ex02_swapped, ex02_writes_minus_one, ex02_blocks_in_a_row],
    "ex02_2": [ex02_2_sorted, ex02_2_whole_blocks, ex02_2_keys_twice],
    "ex03": [ex03_neighbours, ex03_place, ex03_four],
    "ex03_2": [ex03_2_stale, ex03_2_block],
    "ex04": [ex04_smallest, ex04_at_the_border, ex04_in_a_row],
    "ex04_2": [ex04_2_always_pads, ex04_2_grows_mamba, ex04_2_rounds_down],
    "ex05": [ex05_stale, ex05_empty_last_page, ex05_new_tokens],
    "ex05_2": [ex05_2_counts_all, ex05_2_one_token],
    "ex08": [ex08_waiting_first, ex08_no_rows, ex08_budget_for_each, ex08_zeros],
    "ex08_2": [ex08_2_always_the_last, ex08_2_one_is_enough, ex08_2_spares_itself],
    "ex09": [ex09_no_chain, ex09_salt_everywhere, ex09_no_salt, ex09_half_a_block],
    "ex09_2": [ex09_2_whole_prompt, ex09_2_no_window, ex09_2_last_block_only, ex09_2_one_more],
}


def stub(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("write it")


@pytest.fixture(params=NAMES)
def exercise(request: pytest.FixtureRequest) -> Exercise:
    found: Exercise = getattr(check, request.param)
    return found


def test_every_exercise_of_a_notebook_is_here() -> None:
    assert sorted(WRONG) == NAMES


def test_the_stub_fails(exercise: Exercise) -> None:
    with pytest.raises(NotWritten, match=f"{exercise.name}: write it"):
        exercise(stub)


def test_the_head_of_the_solution_needs_no_import_but_the_setup_cells(exercise: Exercise) -> None:
    """Its source is what the student's stub is made of."""
    space: dict[str, Any] = {"torch": torch}
    exec(inspect.getsource(exercise.solution), space)
    exercise(space[exercise.solution.__name__])


def test_the_solution_passes(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    exercise(exercise.solution)
    assert f"{exercise.name}: right, on {exercise.rounds} inputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "answer"), [pytest.param(name, answer, id=answer.__name__) for name in WRONG for answer in WRONG[name]]
)
def test_a_wrong_answer_fails(name: str, answer: Callable[..., Any]) -> None:
    with pytest.raises(WrongAnswer, match=f"{name}: not right yet") as error:
        getattr(check, name)(answer)
    assert "wanted" in str(error.value)


def test_every_exercise_has_two_wrong_answers(exercise: Exercise) -> None:
    assert len(WRONG[exercise.name]) >= 2


def test_a_hard_coded_answer_fails(exercise: Exercise) -> None:
    """What the first round wants is wrong in a later one."""
    first = exercise.observe(exercise.solution, exercise.inputs(random.Random(f"{exercise.name}/0"), 0))

    def results(round_: int) -> Any:
        return exercise.observe(exercise.solution, exercise.inputs(random.Random(f"{exercise.name}/{round_}"), round_))

    assert not all(same(results(i), first) for i in range(1, exercise.rounds))
    assert not all(same(results(i), results(exercise.rounds - 1)) for i in range(exercise.rounds - 1))


def test_inputs_are_the_same_every_time_and_not_changed_by_an_answer(exercise: Exercise) -> None:
    once, again = (exercise.inputs(random.Random("a"), 3) for _ in range(2))
    assert once.keys() == again.keys()
    before = copy.deepcopy(once)
    exercise.observe(exercise.solution, copy.deepcopy(once))
    for name, value in before.items():
        if not callable(value):
            assert same(once[name], value)


def test_hints_and_the_solution(exercise: Exercise, capsys: pytest.CaptureFixture[str]) -> None:
    exercise(exercise.solution)
    capsys.readouterr()
    for i in (*range(len(exercise.hints)), len(exercise.hints) - 1):
        check.hint()
        assert exercise.hints[i] in capsys.readouterr().out
    check.solution()
    assert f"def {exercise.solution.__name__}" in capsys.readouterr().out


def test_an_error_of_the_answer_says_for_which_input(exercise: Exercise) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        exercise(broken)
    assert f"{exercise.name} was called with" in error.value.__notes__[0]


def test_jupyter_shows_the_message_alone() -> None:
    for error in (NotWritten("say this"), WrongAnswer("say this")):
        assert error._render_traceback_() == ["say this"]


def test_hint_before_any_exercise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.check.exercise._tried", {})
    with pytest.raises(ValueError, match="no exercise was tried yet"):
        check.hint()


@pytest.mark.parametrize("name", ["ex3", "excercise", "nope", "ex03_9", "ex99"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(AttributeError, match=r"has no .*: exercises are exNN"):
        getattr(check, name)


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (1, 1, True),
        (1.0, 1, True),
        (True, 1, False),
        (None, 1, False),
        ([1, 2], [1, 2], True),
        ((1, 2), [1, 2], True),
        ([1, 2, 3], [1, 2], False),
        (torch.tensor([1, 2]), [1, 2], True),
        (torch.tensor(3), 3, True),
        ([1.0], torch.tensor([1.0]), False),
        (torch.zeros(2, 1), torch.zeros(1, 2), False),
        (torch.zeros(2), torch.tensor([0.0, 1e-9]), True),
        (torch.zeros(2), torch.tensor([0.0, 1e-3]), False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_same(got: Any, want: Any, equal: bool) -> None:
    assert same(got, want) is equal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.arange(3), "tensor(3,) [0, 1, 2]"),
        (torch.zeros(5, 4), "tensor(5, 4)"),
        ((torch.arange(1), 2), "(tensor(1,) [0], 2)"),
        (stub, "<function stub>"),
        ([1] * 500, None),
    ],
)
def test_values_are_shown_on_one_line(value: Any, text: str | None) -> None:
    assert len(show(value)) <= 300
    assert text is None or show(value) == text


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([1, 2], [1, 3], "index 1: 2, wanted 3"),
        ([1], [1, 3], "There are 1 items, wanted 2"),
        (torch.zeros(2), torch.zeros(3), r"shape is \(2,\), wanted \(3,\)"),
        (torch.zeros(1, 2), torch.tensor([[0.0, 0.5]]), r"index \[0, 1\]: 0.000, wanted 0.500"),
        (None, 3, "Yours is None, a NoneType; wanted is 3, a int"),
        ({"a": 1}, {"a": 2}, "at 'a': 1, wanted 2"),
        ({"a": 1, "b": 1}, {"a": 1}, "at 'b': 1, wanted None"),
        ({"a": 1}, {"a": 1, "b": 1}, "at 'b': None, wanted 1"),
    ],
)
def test_the_difference_is_explained(got: Any, want: Any, message: str) -> None:
    assert re.search(message, first_difference(got, want))


# The solutions themselves, against the real classes or what they are defined by.


@pytest.mark.parametrize("i", range(20))
def test_solution_00_takes_the_likeliest_token_each_time(i: int) -> None:
    given = check.ex00.inputs(random.Random(f"t{i}"), i)
    output = check.ex00.solution(**given)
    for place, token in enumerate(output):
        logits = given["logits_of"](given["prompt_token_ids"] + output[:place])
        assert max(range(len(logits)), key=logits.__getitem__) == token
    assert given["eos_token_id"] not in output[:-1]
    assert len(output) == given["max_tokens"] or output[-1] == given["eos_token_id"]


@pytest.mark.parametrize("i", range(10))
def test_solution_00_2_against_the_scheduler(i: int) -> None:
    given = check.ex00_2.inputs(random.Random(f"t{i}"), i)
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    config = VllmConfig(
        model_config=ModelConfig(model="toy", hf_config=None, dtype="float32", max_model_len=128),
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=given["token_budget"], max_num_seqs=2),
    )
    groups = (KVCacheGroupSpec(layer_names=("attn",), kv_cache_spec=spec),)
    scheduler = Scheduler(config, KVCacheConfig(num_blocks=64, kv_cache_tensors=(), kv_cache_groups=groups))
    params = SamplingParams(max_tokens=given["max_tokens"], ignore_eos=True)
    request = Request("A", [1] * given["num_prompt_tokens"], params)
    scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        steps.append(scheduled.num_scheduled_tokens["A"])
        sampled = [[5] if request.num_computed_tokens == request.num_tokens else []]
        scheduler.update_from_output(scheduled, ModelRunnerOutput(req_ids=["A"], sampled_token_ids=sampled))
    assert check.ex00_2.solution(**given) == steps


def test_solution_01_restores_what_was_current() -> None:
    nested = {"contexts": ["a", "b"], "innermost_raises": False}
    assert check.ex01.observe(check.ex01.solution, nested) == ["a", "b", "b", "a", "result", None]
    failing = {"contexts": ["a", "b"], "innermost_raises": True}
    assert check.ex01.observe(check.ex01.solution, failing) == ["a", "b", "raised", None]


def test_solution_01_2() -> None:
    assert check.ex01_2.solution([["x", "y"], ["z"]], ["m", "n"]) == {"x": "m", "y": "m", "z": "n"}
    with pytest.raises(ValueError, match="layer x is in two groups"):
        check.ex01_2.solution([["x"], ["x"]], ["m", "n"])


@pytest.mark.parametrize("seed", range(10))
def test_solutions_02_give_back_what_was_written_and_nothing_else(seed: int) -> None:
    """With slots of the real block table: scattered, padded, gathered."""
    rng = random.Random(seed)
    block_size, blocks = rng.choice([1, 2, 4]), rng.sample(range(1, 9), 3)
    length = rng.randint(2 * block_size + 1, 3 * block_size)
    table = BlockTable(block_size, 1, 4, length + 3, "cpu")
    table.append_row(blocks, 0)
    table.compute_slot_mapping(1, torch.tensor([0, length]), torch.arange(length))
    key, value = torch.randn(2, length + 3, 2, 4)
    cache = torch.full((9, 2, block_size, 2, 4), torch.nan)
    check.ex02.solution(key, value, cache, table.slot_mapping)
    assert cache[:, 0, :, 0, 0].isnan().logical_not().sum() == length
    keys, values = check.ex02_2.solution(cache, blocks, length)
    assert torch.equal(keys, key[:length])
    assert torch.equal(values, value[:length])


@pytest.mark.parametrize("i", range(20))
def test_solutions_03_against_the_block_table(i: int) -> None:
    given = check.ex03.inputs(random.Random(f"t{i}"), i)
    table = BlockTable(given["block_size"], 8, 16, 256, "cpu")
    for row, ids in enumerate(given["block_table"]):
        table.append_row(ids, row)
    starts, positions = torch.tensor(given["query_start_loc"]), torch.tensor(given["positions"])
    table.compute_slot_mapping(len(given["block_table"]), starts, positions)
    slots = table.slot_mapping[: len(positions)].tolist()
    assert check.ex03.solution(**given) == slots
    rows = [row for row in range(len(starts) - 1) for _ in range(int(starts[row + 1] - starts[row]))]
    seq_lens = [1 + max(int(p) for p, r in zip(positions, rows) if r == row) for row in range(len(starts) - 1)]
    for slot, row, position in zip(slots, rows, given["positions"], strict=True):
        assert check.ex03_2.solution(slot, given["block_table"], seq_lens, given["block_size"]) == (row, position)
    assert check.ex03_2.solution(0, given["block_table"], seq_lens, given["block_size"]) is None


@pytest.mark.parametrize("i", range(20))
def test_solution_04_against_the_grouping(i: int) -> None:
    buckets = check.ex04.inputs(random.Random(f"t{i}"), i)["buckets"]
    specs: dict[str, Any] = {}
    for kind, bucket in enumerate(buckets):
        shared: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
        spec = SlidingWindowSpec(**shared, sliding_window=8 * kind) if kind else FullAttentionSpec(**shared)
        specs |= dict.fromkeys(bucket, spec)
    assert [list(group.layer_names) for group in get_kv_cache_groups(specs)] == check.ex04.solution(buckets)


@pytest.mark.parametrize("i", range(20))
def test_solution_04_2_against_the_unification(i: int) -> None:
    layers = check.ex04_2.inputs(random.Random(f"t{i}"), i)["layers"]
    specs: dict[str, Any] = {}
    for place, (block_size, page, is_mamba) in enumerate(layers):
        if is_mamba:
            specs[str(place)] = MambaSpec(block_size=block_size, shapes=((page,),), dtypes=("uint8",))
        else:
            head_size = page // block_size // 2
            specs[str(place)] = FullAttentionSpec(
                block_size=block_size, num_kv_heads=1, head_size=head_size, dtype="uint8"
            )
    unified = unify_kv_cache_spec_page_size(specs).values()
    got = [(spec.block_size, spec.page_size_bytes - spec.real_page_size_bytes) for spec in unified]
    assert got == check.ex04_2.solution(layers)


@pytest.mark.parametrize("i", range(20))
def test_solution_05_names_the_pages_of_every_token(i: int) -> None:
    """Read back as a kernel would, the lists give the slots of the block table."""
    given = check.ex05.inputs(random.Random(f"t{i}"), i)
    lists = check.ex05.observe(check.ex05.solution, given)
    assert {tensor.dtype for tensor in lists.values()} == {torch.int32}
    size, starts = given["block_size"], lists["paged_kv_indptr"].tolist()
    assert starts[0] == 0
    assert starts[-1] == len(lists["paged_kv_indices"])
    for row, seq_len in enumerate(given["seq_lens"]):
        pages = lists["paged_kv_indices"][starts[row] : starts[row + 1]].tolist()
        tokens = (len(pages) - 1) * size + lists["paged_kv_last_page_len"][row].item()
        table = BlockTable(size, 1, 4, 64, "cpu")
        table.append_row(given["block_table"][row], 0)
        table.compute_slot_mapping(1, torch.tensor([0, seq_len]), torch.arange(seq_len))
        slots = [pages[position // size] * size + position % size for position in range(tokens)]
        assert slots == table.slot_mapping[:seq_len].tolist()


def test_exercise_05_refuses_a_signature_that_a_runner_could_not_call() -> None:
    with pytest.raises(TypeError, match="build cannot stand in for"):
        check.ex05(lambda self, metadata: {})


@pytest.mark.parametrize("i", range(20))
def test_solution_05_2_against_the_split(i: int) -> None:
    given = check.ex05_2.inputs(random.Random(f"t{i}"), i)
    starts = torch.tensor(given["query_start_loc"], dtype=torch.int32)
    common: Any = SimpleNamespace(
        num_reqs=len(starts) - 1, num_actual_tokens=int(starts[-1]), query_start_loc_cpu=starts
    )
    assert split_decodes_and_prefills(common, given["decode_threshold"]) == check.ex05_2.solution(**given)


def toy_scheduler(num_blocks: int, **settings: Any) -> Scheduler:
    """Blocks of 4 tokens, one group, no prefix cache."""
    config = VllmConfig(
        model_config=ModelConfig(model="toy", hf_config=None, dtype="float32", max_model_len=128),
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(**settings),
    )
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    groups = (KVCacheGroupSpec(layer_names=("attn",), kv_cache_spec=spec),)
    return Scheduler(config, KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=groups))


def run_from_now(scheduler: Scheduler, request: Request, num_computed_tokens: int = 0) -> None:
    """As if the request had been admitted before."""
    scheduler.requests[request.request_id] = request
    if num_computed_tokens:
        assert scheduler.kv_cache_manager.allocate_slots(request, num_computed_tokens) is not None
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_computed_tokens
    scheduler.running.append(request)


@pytest.mark.parametrize("i", range(20))
def test_solution_08_against_the_scheduler(i: int) -> None:
    given = check.ex08.inputs(random.Random(f"t{i}"), i)
    if len(given["running"]) + len(given["waiting"]) == 1:
        given["chunk_limit"] = given["token_budget"]  # a request alone is not limited
    scheduler = toy_scheduler(
        64,
        max_num_batched_tokens=given["token_budget"],
        max_num_seqs=given["max_num_seqs"],
        long_prefill_token_threshold=given["chunk_limit"],
    )
    for name, missing in given["running"].items():
        run_from_now(scheduler, Request(name, [1] * missing, SamplingParams()))
    for name, missing in given["waiting"].items():
        scheduler.add_request(Request(name, [1] * missing, SamplingParams()))
    assert check.ex08.solution(**given) == scheduler.schedule().num_scheduled_tokens


@pytest.mark.parametrize("i", range(20))
def test_solution_08_2_against_the_scheduler(i: int) -> None:
    """The others' next token has room in their last block; only one request asks for more."""
    given = check.ex08_2.inputs(random.Random(f"t{i}"), i)
    held = sum(num_blocks for *_, num_blocks in given["running"])
    scheduler = toy_scheduler(
        1 + held + given["num_free"], max_num_batched_tokens=64, max_num_seqs=8, policy=given["policy"]
    )
    for name, priority, arrival_time, num_blocks in given["running"]:
        computed, known = 4 * num_blocks - 1, 4 * num_blocks
        if name == given["needs"]:
            computed, known = known, known + 4 * given["num_needed"]
        times = {"priority": priority, "arrival_time": arrival_time}
        run_from_now(scheduler, Request(name, [1] * known, SamplingParams(), **times), computed)
    victims = check.ex08_2.solution(**given)
    if len(victims) == len(given["running"]):  # alone, and still no room: not preempted but ended with an error
        assert victims.pop() == given["needs"]
    assert scheduler.schedule().preempted_req_ids == victims


@pytest.mark.parametrize("i", range(12))
def test_solution_09_is_equal_where_the_hasher_is(i: int) -> None:
    """Pairs of requests that part somewhere: the same blocks have the same names, here and there."""
    rng = random.Random(i)
    given = check.ex09.inputs(random.Random(f"t{i}"), i)
    other = copy.deepcopy(given)
    other["token_ids"][rng.randrange(len(other["token_ids"]))] += rng.randint(0, 1)
    other["salt"] = rng.choice([given["salt"], "green"])
    ours = [check.ex09.solution(**one) for one in (given, other)]
    hasher = make_block_hasher(given["block_size"])
    theirs = [
        Request("R", one["token_ids"], SamplingParams(), cache_salt=one["salt"], block_hasher=hasher).block_hashes
        for one in (given, other)
    ]
    assert [len(hashes) for hashes in ours] == [len(hashes) for hashes in theirs]
    assert [a == b for a, b in zip(*ours, strict=True)] == [a == b for a, b in zip(*theirs, strict=True)]


@pytest.mark.parametrize("i", range(30))
def test_solution_09_2_against_the_managers(i: int) -> None:
    given = check.ex09_2.inputs(random.Random(f"t{i}"), i)
    size, window = given["block_size"], given["window"]
    hasher, params = make_block_hasher(size), SamplingParams()
    request = Request("R", list(range(given["num_tokens"])), params, block_hasher=hasher)
    pool = BlockPool(40, True, size)
    for cached, block_hash in zip(given["cached"], request.block_hashes, strict=True):
        if cached:
            pool.cache_block(pool.get_new_blocks(1)[0], block_hash, 0)
    shape: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    manager = manager_class(spec)(spec, pool, 0, max_model_len=64, max_in_flight_tokens=64, alignment_tokens=size)
    (blocks,) = manager.find_longest_cache_hit(request.block_hashes, given["num_tokens"] - 1, [0])
    assert check.ex09_2.solution(**given) == len(blocks) * size
