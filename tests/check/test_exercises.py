"""Checks of exercises: the stub fails, the solution passes, wrong answers fail, and the solutions are right."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import check
from minivllm.check.exercise import Exercise, NotWritten, WrongAnswer, first_difference, same
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


WRONG: dict[str, list[Callable[..., Any]]] = {
    "ex03": [ex03_neighbours, ex03_place, ex03_four],
    "ex03_2": [ex03_2_stale, ex03_2_block],
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


@pytest.mark.parametrize("name", ["ex3", "excercise", "nope"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(AttributeError, match="exercises are exNN"):
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
    ("got", "want", "message"),
    [
        ([1, 2], [1, 3], "index 1: 2, wanted 3"),
        ([1], [1, 3], "There are 1 items, wanted 2"),
        (torch.zeros(2), torch.zeros(3), r"shape is \(2,\), wanted \(3,\)"),
        (torch.zeros(1, 2), torch.tensor([[0.0, 0.5]]), r"index \[0, 1\]: 0.000, wanted 0.500"),
        (None, 3, "Yours is a NoneType, wanted a int"),
    ],
)
def test_the_difference_is_explained(got: Any, want: Any, message: str) -> None:
    assert re.search(message, first_difference(got, want))


# The solutions themselves, against the real classes.


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
