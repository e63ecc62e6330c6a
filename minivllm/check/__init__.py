"""Checks of the notebooks' exercises: `check.ex03(my_function)`, `check.hint()`, `check.solution()`.

`nbNN.py` holds the exercises of notebook NN, solutions included: the stub in a notebook is made from its solution.
The room may use every other room; nothing uses it. vLLM has no such room.
"""

from __future__ import annotations

import importlib
import re
from contextlib import suppress

from minivllm.check.exercise import REGISTRY, Exercise, hint, solution

__all__ = ["hint", "solution"]


def __getattr__(name: str) -> Exercise:
    """exNN and exNN_2 come from the module nbNN, loaded on first use."""
    if found := re.fullmatch(r"ex(\d\d)(_\d)?", name):
        with suppress(ModuleNotFoundError):
            importlib.import_module(f"minivllm.check.nb{found[1]}")
    if name not in REGISTRY:
        raise AttributeError(
            f"check has no {name!r}: exercises are exNN, exNN_2, ... of notebook NN; also hint, solution"
        )
    return REGISTRY[name]
