"""One exercise: it runs an answer and its solution on the same varied inputs and explains the first difference.

vLLM has nothing of the kind.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import runpy
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Inputs = dict[str, Any]
_tried: dict[str, int] = {}  # hints given, by exercise; the exercise tried last comes last
REGISTRY: dict[str, Exercise] = {}


class NotWritten(NotImplementedError):
    """The answer is still the stub.

    Mirrors: none; a message to the learner.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]  # what Jupyter shows: the message alone


class WrongAnswer(AssertionError):
    """The answer differs from the solution.

    Mirrors: none; a message to the learner.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def _call(answer: Callable[..., Any], inputs: Inputs) -> Any:
    return answer(**inputs)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """Called with an answer, prints that it is right or raises with what went wrong.

    inputs: makes the arguments of round i from a seeded generator; early rounds should be small, since a mistake is
    shown on the first round that reveals it. Its docstring holds the hints, one a paragraph that begins with "Hint:".
    observe: runs a function on a copy of the arguments and returns what is compared.
    why: a sentence for a wrong answer, from the arguments and the two results, or "".

    Mirrors: none; a part of the course.
    """

    name: str
    solution: Callable[..., Any]
    inputs: Callable[[random.Random, int], Inputs]
    observe: Callable[[Callable[..., Any], Inputs], Any]
    why: Callable[[Inputs, Any, Any], str]
    rounds: int = 40

    @property
    def hints(self) -> list[str]:
        """From the gentlest to the plainest."""
        paragraphs = re.split(r"\n\s*\n", inspect.getdoc(self.inputs) or "")
        return [" ".join(text.split()).removeprefix("Hint: ") for text in paragraphs if text.startswith("Hint: ")]

    def __call__(self, answer: Callable[..., Any]) -> None:
        """Print that `answer` is right, or raise NotWritten or WrongAnswer."""
        _tried[self.name] = _tried.pop(self.name, 0)
        for i in range(self.rounds):
            given = self.inputs(random.Random(f"{self.name}/{i}"), i)
            want = self.observe(self.solution, copy.deepcopy(given))
            try:
                got = self.observe(answer, copy.deepcopy(given))
            except NotImplementedError as stub:
                raise NotWritten(f"{self.name}: {stub or 'not written yet'}. Stuck? check.hint()") from None
            except Exception as error:
                error.add_note(f"{self.name} was called with {describe(given)}; check.hint() helps")
                raise
            if not same(got, want):
                raise WrongAnswer(self._explain(given, got, want))
        print(f"{self.name}: right, on {self.rounds} inputs")

    def _explain(self, given: Inputs, got: Any, want: Any) -> str:
        reason = self.why(given, got, want) or first_difference(got, want)
        lines = [f"{self.name}: not right yet.", *(f"  {name} = {show(value)}" for name, value in given.items())]
        lines += [f"  yours:  {show(got)}", f"  wanted: {show(want)}", f"  {reason}"]
        return "\n".join([*lines, "Stuck? check.hint()"])


def exercise(
    name: str,
    solution: Callable[..., Any],
    observe: Callable[[Callable[..., Any], Inputs], Any] = _call,
    why: Callable[[Inputs, Any, Any], str] = lambda given, got, want: "",
) -> Callable[[Callable[[random.Random, int], Inputs]], Exercise]:
    """Make and register an exercise from the function that makes its inputs; the parts are Exercise's."""

    def register(inputs: Callable[[random.Random, int], Inputs]) -> Exercise:
        REGISTRY[name] = Exercise(name=name, solution=solution, inputs=inputs, observe=observe, why=why)
        return REGISTRY[name]

    return register


def load_exercises(number: str) -> None:
    """Run notebooks/exercises/nbNN.py, which registers its exercises; no such file registers none."""
    path = Path(__file__).parents[2] / "notebooks" / "exercises" / f"nb{number}.py"
    if path.exists():
        runpy.run_path(str(path), run_name=f"exercises.nb{number}")


def describe(given: Mapping[str, Any]) -> str:
    """Arguments on one line."""
    return ", ".join(f"{name}={show(value)}" for name, value in given.items())


def show(value: Any) -> str:
    """A value on one line, at most 300 characters; of a tensor with more than 16 numbers the shape alone."""
    if isinstance(value, torch.Tensor):
        value = f"tensor{tuple(value.shape)}" + (f" {value.tolist()}" if value.numel() <= 16 else "")
    elif isinstance(value, tuple):
        value = f"({', '.join(map(show, value))})"
    elif callable(value):
        value = f"<function {getattr(value, '__name__', '?')}>"
    return textwrap.shorten(str(value), 300, placeholder=" ...")


def same(got: Any, want: Any) -> bool:
    """Equality through tensors, lists, tuples and dicts; floats within 1e-5."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != want.shape:
            return False
        return torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if hasattr(got, "tolist"):  # a tensor, or an array or a number of numpy
        got = got.tolist()
    if isinstance(want, dict):
        return isinstance(got, dict) and got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)
    if isinstance(want, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(want) and all(map(same, got, want))
    return bool(type(got) is type(want) or {type(got), type(want)} == {int, float}) and bool(got == want)


def first_difference(got: Any, want: Any) -> str:
    """Where two results part."""
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        if got.shape != want.shape:
            return f"The shape is {tuple(got.shape)}, wanted {tuple(want.shape)}."
        place = (got.double() - want.double()).abs().nan_to_num(nan=1e9).argmax()
        where = tuple(int(i) for i in torch.unravel_index(place, want.shape))
        return f"The largest difference is at index {list(where)}: {got[where]:.3f}, wanted {want[where]:.3f}."
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"There are {len(got)} items, wanted {len(want)}."
        index = next(i for i, pair in enumerate(zip(got, want)) if not same(*pair))
        return f"The first difference is at index {index}: {show(got[index])}, wanted {show(want[index])}."
    if isinstance(got, dict) and isinstance(want, dict):
        key = next(key for key in (*want, *got) if key not in got or key not in want or not same(got[key], want[key]))
        return f"The first difference is at {key!r}: {show(got.get(key))}, wanted {show(want.get(key))}."
    return f"Yours is {show(got)}, a {type(got).__name__}; wanted is {show(want)}, a {type(want).__name__}."


def _last() -> Exercise:
    if not _tried:
        raise ValueError("no exercise was tried yet: run the cell with check.exNN(your_function) first")
    return REGISTRY[list(_tried)[-1]]


def hint() -> None:
    """Print the next hint of the exercise tried last; the last one repeats."""
    last = _last()
    given = min(_tried[last.name], len(last.hints) - 1)
    _tried[last.name] = given + 1
    print(f"{last.name}, hint {given + 1} of {len(last.hints)}: {last.hints[given]}")


def solution() -> None:
    """Print one right answer to the exercise tried last."""
    print(inspect.getsource(_last().solution))
