"""Exercises of notebook 00, quickstart and map of the pipeline."""

from __future__ import annotations

import random
from typing import Any

from minivllm.check.exercise import Inputs, exercise


def greedy_decode(
    logits_of,
    prompt_token_ids: list[int],
    max_tokens: int,
    eos_token_id: int,
) -> list[int]:
    """The token ids that greedy decoding generates, without the prompt.

    logits_of(token_ids) gives one number for each token of the vocabulary.
    Stop after max_tokens, or after eos_token_id, which is part of the result.
    """
    token_ids = list(prompt_token_ids)
    while len(token_ids) < len(prompt_token_ids) + max_tokens:
        logits = logits_of(token_ids)
        token_ids.append(logits.index(max(logits)))
        if token_ids[-1] == eos_token_id:
            break
    return token_ids[len(prompt_token_ids) :]


def scheduled_tokens(
    num_prompt_tokens: int,
    max_tokens: int,
    token_budget: int,
) -> list[int]:
    """How many tokens of a lone request each step computes.

    A step computes at most token_budget tokens. The step that computes the last prompt
    token also samples the first output token; each later step computes the newest token
    and samples one more, until there are max_tokens.
    """
    steps = []
    left = num_prompt_tokens
    while left > 0:
        steps.append(min(left, token_budget))
        left -= steps[-1]
    return steps + [1] * (max_tokens - 1)


class _Model:
    """Logits that depend on all tokens and their order. A class, so that a copy of the inputs can be made."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    __name__ = "logits_of"

    def __call__(self, token_ids: list[int]) -> list[float]:
        rng = random.Random(f"{self.seed}{token_ids}")
        return [rng.random() for _ in range(8)]


@exercise("ex00", greedy_decode)
def _greedy(rng: random.Random, i: int) -> Inputs:
    """A random model of 8 tokens.

    Hint: Keep one growing list of token ids, the prompt first; ask logits_of for all of it each time.

    Hint: The next token is the index of the largest logit: logits.index(max(logits)).

    Hint: Append first, then compare with eos_token_id: it is part of the result. Return what follows the prompt.
    """
    prompt = [rng.randrange(8) for _ in range(1 + i % 5)]
    return {
        "logits_of": _Model(rng.randrange(1000)),
        "prompt_token_ids": prompt,
        "max_tokens": 1 + i % 7,
        "eos_token_id": rng.randrange(8),
    }


def _why_steps(given: Inputs, got: Any, want: Any) -> str:
    total = given["num_prompt_tokens"] + given["max_tokens"] - 1
    return (
        f"{total} tokens are computed in all: the prompt, and every output token but the last."
        if sum(want)
        else ""
    )


@exercise("ex00_2", scheduled_tokens, why=_why_steps)
def _steps(rng: random.Random, i: int) -> Inputs:
    """Prompts below, at and above the budget.

    Hint: Hand out the prompt in chunks of token_budget; the last chunk may be smaller.

    Hint: The last chunk brings the first output token, so max_tokens - 1 steps of one token follow.
    """
    budget = rng.choice([4, 8, 16])
    prompt = budget * rng.randint(1, 3) if i % 3 == 0 else rng.randint(1, 3 * budget)
    return {
        "num_prompt_tokens": prompt,
        "max_tokens": rng.randint(1, 6),
        "token_budget": budget,
    }
