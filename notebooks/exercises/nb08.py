"""Exercises of notebook 08, scheduler and continuous batching."""

from __future__ import annotations

import random
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def hand_out(
    running: dict[str, int],
    waiting: dict[str, int],
    token_budget: int,
    chunk_limit: int,
    max_num_seqs: int,
) -> dict[str, int]:
    """How many tokens each request computes in this step; those with none are left out.

    running, waiting: name -> num_tokens - num_computed_tokens, in their order.
    A waiting request needs a row: at most max_num_seqs requests run.
    """
    given = {}
    rows = len(running)
    for name, missing in [*running.items(), *waiting.items()]:
        if name in waiting:
            if rows == max_num_seqs:
                break
            rows += 1
        num_new = min(missing, chunk_limit, token_budget)
        if num_new == 0:
            break
        given[name] = num_new
        token_budget -= num_new
    return given


def choose_victims(
    running: list[tuple[str, int, float, int]],
    needs: str,
    num_needed: int,
    num_free: int,
    policy: str,
) -> list[str]:
    """Names of the requests to preempt, in order, so that `needs` gets its blocks.

    running: (name, priority, arrival_time, blocks that it holds), in running order.
    num_needed blocks are wanted and num_free are free. policy: "fcfs" or "priority".
    """
    running, victims = list(running), []
    while num_free < num_needed and needs not in victims:
        victim = running[-1]
        if policy == "priority":
            victim = max(running, key=lambda request: (request[1], request[2]))
        running.remove(victim)
        victims.append(victim[0])
        num_free += victim[3]
    return victims


def _why_hand_out(given: Inputs, got: Any, want: dict[str, int]) -> str:
    if not isinstance(got, dict):
        return "Return a dictionary, name -> number of tokens."
    if sum(got.values()) > given["token_budget"]:
        return f"That is {sum(got.values())} tokens; the budget is {given['token_budget']}."
    if rows := set(got) & set(given["waiting"]) - set(want):
        return f"There is no row or no budget left for {sorted(rows)}."
    return ""


@exercise("ex08", hand_out, why=_why_hand_out)
def _step(rng: random.Random, i: int) -> Inputs:
    """A step of decodes and prefills.

    Hint: min(missing, chunk_limit, token_budget) is what a request gets; take it off the budget.

    Hint: Go through the running requests first, then through the waiting ones with the same budget.

    Hint: A waiting request that is admitted takes a row: stop when len(running) + admitted is max_num_seqs.

    Hint: Stop when the budget is 0: a request with 0 tokens must not be in the result.
    """
    names = list("ABCDEF")
    running = {
        names.pop(0): rng.choice([1, 1, rng.randint(2, 12)])
        for _ in range(min(i, rng.randint(0, 3)))
    }
    waiting = {names.pop(0): rng.randint(1, 12) for _ in range(rng.randint(1, 3))}
    budget = rng.choice([6, 8, 16])
    return {
        "running": running,
        "waiting": waiting,
        "token_budget": budget,
        "chunk_limit": budget if i % 2 else rng.randint(3, 5),
        "max_num_seqs": max(1, len(running) + rng.randint(0, 3)),
    }


def _why_victims(given: Inputs, got: Any, want: list[str]) -> str:
    if isinstance(got, list) and got[: len(want)] == want:
        return f"After {want} nobody else has to go: there is room, or {given['needs']} itself is out."
    if isinstance(got, list) and want[: len(got)] == got:
        return f"After {got} there is still no room, and {given['needs']} still runs."
    if given["policy"] == "priority":
        return "The victim has the largest (priority, arrival_time) of those that still run."
    return "The victim is the last of those that still run."


@exercise("ex08_2", choose_victims, why=_why_victims)
def _memory_is_short(rng: random.Random, i: int) -> Inputs:
    """Running requests, one of which needs blocks.

    Hint: A loop: while there is no room, choose a victim, take it out of the list, add its blocks to the free ones.

    Hint: "fcfs" takes the last of the list; "priority" the largest (priority, arrival_time), wherever it stands.

    Hint: If the victim is `needs` itself, it is the last one: nobody is left to make room for.
    """
    running = [
        (name, rng.randint(0, 2), float(time), rng.randint(1, 4))
        for time, name in enumerate("ABCDE"[: 2 + min(i // 4, 3)])
    ]
    policy = "priority" if i % 2 else "fcfs"
    if (
        policy == "priority"
    ):  # admitted in the order of importance, so later ones may stand in front
        rng.shuffle(running)
    return {
        "running": running,
        "needs": rng.choice(running)[0],
        "num_needed": rng.randint(1, 6),
        "num_free": rng.choice([0, 0, 1, 2]),
        "policy": policy,
    }
