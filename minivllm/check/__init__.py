"""Checks of the notebooks' exercises: `check.ex03(my_function)`, `check.hint()`, `check.solution()`.

The exercises of notebook NN are in notebooks/exercises/nbNN.py, beside the notebooks' sources, solutions included: the
stub in a notebook is made from its solution. Nothing uses this room but the notebooks. vLLM has no such room.
"""

from __future__ import annotations

import re

from minivllm.check.exercise import REGISTRY, Exercise, hint, load_exercises, solution

__all__ = ["hint", "solution"]


def __getattr__(name: str) -> Exercise:
    """exNN and exNN_2 are those of notebook NN, loaded on first use."""
    if name not in REGISTRY and (found := re.fullmatch(r"ex(\d\d)(_\d)?", name)):
        load_exercises(found[1])
    if name not in REGISTRY:
        raise AttributeError(
            f"check has no {name!r}: exercises are exNN, exNN_2, ... of notebook NN; also hint, solution"
        )
    return REGISTRY[name]
