"""Checks of the notebooks' exercises: `check.ex03(my_function)`, `check.hint()`, `check.solution()`.

`nbNN.py` holds the exercises of notebook NN, solutions included: the stub in a notebook is made from its solution.
The room may use every other room; nothing uses it. vLLM has no such room.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from minivllm.check.exercise import hint, solution

__all__ = ["hint", "solution"]


def __getattr__(name: str) -> Any:
    """exNN and exNN_2 come from the module nbNN, loaded on first use."""
    found = re.fullmatch(r"ex(\d\d)(_\d)?", name)
    if found is None:
        raise AttributeError(
            f"check has no {name!r}: exercises are exNN and exNN_2, for notebook NN; also hint, solution"
        )
    module = importlib.import_module(f"minivllm.check.nb{found[1]}")
    return module.EXERCISES[name]
