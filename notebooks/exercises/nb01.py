"""Exercises of notebook 01, forward context."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def run_inside(holder, context, body):
    """Run body() with holder["current"] = context, and return what it returns.

    Afterwards holder["current"] is what it was before, even if body raises.
    """
    former = holder["current"]
    holder["current"] = context
    try:
        return body()
    finally:
        holder["current"] = former


def metadata_of_layers(
    groups: list[list[str]],
    metadata: list[str],
) -> dict[str, str]:
    """One entry a layer: its name -> the metadata of its group.

    groups: the layer names of each KV-cache group. metadata: one object a group.
    Raises ValueError where a layer is in two groups.
    """
    result: dict[str, str] = {}
    for names, built in zip(groups, metadata, strict=True):
        for name in names:
            if name in result:
                raise ValueError(f"layer {name} is in two groups")
            result[name] = built
    return result


class _BodyFailedError(Exception):
    pass


def _observe_nested(run: Callable[..., Any], given: Inputs) -> list[Any]:
    """What is current before and after each nested body, what comes out, what is current at the end."""
    holder: dict[str, Any] = {"current": None}
    log: list[Any] = []

    def enter(contexts: list[str]) -> Any:
        def body() -> Any:
            log.append(holder["current"])
            if not contexts[1:] and given["innermost_raises"]:
                raise _BodyFailedError
            result = enter(contexts[1:]) if contexts[1:] else "result"
            log.append(holder["current"])
            return result

        return run(holder, contexts[0], body)

    try:
        log.append(enter(given["contexts"]))
    except _BodyFailedError:
        log.append("raised")
    return [*log, holder["current"]]


def _why_nested(given: Inputs, got: Any, want: Any) -> str:
    return (
        'The lists hold holder["current"] as each body saw it, before and after the inner one, then the result, then'
        ' holder["current"] at the end.'
    )


@exercise("ex01", run_inside, _observe_nested, _why_nested)
def _nested(rng: random.Random, i: int) -> Inputs:
    """Nested bodies, the innermost of which may raise.

    Hint: Keep holder["current"] in a variable before you change it: contexts may nest.

    Hint: Return from inside try, and put the former value back in finally, which also runs when body raises.
    """
    return {
        "contexts": [f"context {rng.randrange(100)}" for _ in range(1 + i % 4)],
        "innermost_raises": i % 3 == 2,
    }


def _observe_error(answer: Callable[..., Any], given: Inputs) -> Any:
    try:
        return answer(**given)
    except ValueError:
        return "ValueError"


def _why_groups(given: Inputs, got: Any, want: Any) -> str:
    return (
        "A layer is in both groups: raise ValueError." if want == "ValueError" else ""
    )


@exercise("ex01_2", metadata_of_layers, _observe_error, _why_groups)
def _groups(rng: random.Random, i: int) -> Inputs:
    """Two groups, now and then with a layer in both.

    Hint: Two loops: over zip(groups, metadata), then over the names of the group.

    Hint: Before you add a name, look whether the dictionary has it; if so, raise ValueError.
    """
    names = [f"layers.{layer}" for layer in range(2 + i % 9)]
    rng.shuffle(names)
    cut = rng.randrange(1, len(names))
    groups = [names[:cut], names[cut:]]
    if i % 4 == 3:
        groups[1].append(rng.choice(groups[0]))
    return {
        "groups": groups,
        "metadata": [f"metadata {rng.randrange(100)}" for _ in groups],
    }
