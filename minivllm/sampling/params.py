"""How one request wants its tokens chosen, with vLLM's names, defaults and limits. No torch here.

Mirrors `vllm/sampling_params.py` (0.32.0).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIN_TEMPERATURE = 0.01  # a lower one, above 0, is raised to this: logits divided by it would overflow
GREEDY_BELOW = 1e-5
MAX_N = 16384


def _integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}: {value!r}.")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r}.")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _sequence(name: str, value: Any, kind: type, kind_name: str) -> tuple[Any, ...]:
    """The entries of a list setting, all of one kind; None is no entry."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {kind_name}, got {type(value).__name__}: {value!r}.")
    entries = tuple(value)
    if any(not isinstance(entry, kind) or isinstance(entry, bool) for entry in entries):
        raise TypeError(f"{name} must contain only {kind_name}, got {list(entries)}.")
    return entries


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; frozen, so that one object may serve many requests.

    n: samples of one prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. max_tokens: None is as many as fit.
    stop: strings that end the text (not printed unless include_stop_str_in_output). bad_words: texts that must not
    appear. min_tokens: no stop token, eos or stop string counts before so many. logprobs: that many likeliest tokens
    are reported beside the sampled one, -1 is the whole vocabulary; prompt_logprobs: the same for prompt tokens.
    seed: the request's own random stream, whatever else is in the batch.
    Raises ValueError or TypeError naming the parameter, its value and its limit.

    Mirrors: vllm/sampling_params.py SamplingParams.
    Leaves out: structured outputs, beam search, output kinds, thinking budgets, repetition detection, extra_args.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    # Filled in by `resolve`, from what only the engine knows.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), init=False)
    all_stop_token_ids: frozenset[int] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._set(logprobs=1 if self.logprobs is True else self.logprobs)
        self._set(prompt_logprobs=1 if self.prompt_logprobs is True else self.prompt_logprobs)
        for name in ("n", "top_k", "min_tokens"):
            _integer(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"):
            _number(name, getattr(self, name))
        if 0 < self.temperature < MIN_TEMPERATURE:
            self._set(temperature=MIN_TEMPERATURE)
        self._normalise_lists()
        self._check_ranges()
        if self.greedy:
            self._set(top_p=1.0, top_k=0, min_p=0.0)
            _require(self.n == 1, f"n must be 1 when using greedy sampling, got {self.n}.")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _normalise_lists(self) -> None:
        """Lists become tuples without repeats: this object is shared and must not change behind anyone's back."""
        self._set(stop=_sequence("stop", [self.stop] if isinstance(self.stop, str) else self.stop, str, "strings"))
        for name, kind, kind_name in (("stop_token_ids", int, "integers"), ("bad_words", str, "strings")):
            self._set(**{name: tuple(dict.fromkeys(_sequence(name, getattr(self, name), kind, kind_name)))})
        if self.allowed_token_ids is not None:
            self._set(allowed_token_ids=_sequence("allowed_token_ids", self.allowed_token_ids, int, "integers"))
            _require(bool(self.allowed_token_ids), "allowed_token_ids is not None and empty!")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias must be a dict of token id to number, got {self.logit_bias!r}.")
            # A bias from JSON has its token ids as strings.
            self._set(logit_bias={int(k) if str(k).isdecimal() else k: v for k, v in self.logit_bias.items()})
            for token, value in self.logit_bias.items():
                _integer("every token id of logit_bias", token)
                _number(f"logit_bias of token {token}", value)
                _require(value < math.inf, f"logit_bias of token {token} must be below infinity, got {value}.")
        if self.seed == -1:
            self._set(seed=None)
        self._set(all_stop_token_ids=frozenset(self.stop_token_ids or ()))

    def _check_ranges(self) -> None:
        _require(self.n >= 1, f"n must be at least 1, got {self.n}.")
        _require(self.n <= MAX_N, f"n must be at most {MAX_N}, got {self.n}.")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}.")
        penalty, temperature = self.repetition_penalty, self.temperature
        _require(math.isfinite(penalty), f"repetition_penalty must be a finite number, got {penalty}.")
        _require(penalty > 0.0, f"repetition_penalty must be greater than zero, got {penalty}.")
        _require(math.isfinite(temperature), f"temperature must be a finite number, got {temperature}.")
        _require(temperature >= 0.0, f"temperature must be non-negative, got {temperature}.")
        _require(temperature <= 2.0, f"temperature must be in [0, 2], got {temperature}.")
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}.")
        _require(self.top_k >= -1, f"top_k must be 0 (disable), or at least 1, got {self.top_k}.")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}.")
        most, least = self.max_tokens, self.min_tokens
        _require(most is None or most >= 1, f"max_tokens must be at least 1, got {most}.")
        _require(least >= 0, f"min_tokens must be greater than or equal to 0, got {least}.")
        within = most is None or least <= most
        _require(within, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= -1, f"{name} must be non-negative or -1, got {value}.")
        _require(all(self.stop or ()), "stop cannot contain an empty string.")
        needs_text = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
        _require(self.detokenize or not self.stop, needs_text)
        words = list(self.bad_words or ())
        _require(all(words), f"bad_words cannot contain an empty string. Got bad_words={words}")
        # What torch's generators take; each of the n samples adds its index.
        in_range = self.seed is None or -(1 << 63) <= self.seed < (1 << 63) - MAX_N
        _require(in_range, f"seed must be in [-2**63, 2**63 - {MAX_N}), got {self.seed}.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def resolve(
        self, *, vocab_size: int, tokenizer: Any | None, eos_token_ids: Sequence[int], room: int
    ) -> SamplingParams:
        """The same settings made concrete for one model and prompt.

        eos_token_ids: the model's ends of text, its main one first. room: tokens that still fit max_model_len.
        Raises ValueError for a token id outside the vocabulary, and for texts where there is no tokenizer.
        """
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} holds token id {token}, outside the vocabulary: 0 to {vocab_size - 1}.")
        for name in ("logprobs", "prompt_logprobs"):
            num = getattr(self, name)
            fits = num is None or num <= vocab_size
            _require(fits, f"{name} must be at most {vocab_size} (the vocabulary), got {num}.")
        if tokenizer is None and (self.bad_words or self.stop):
            raise ValueError("stop and bad_words are texts and need a tokenizer: use stop_token_ids or logit_bias.")
        resolved = copy.copy(self)
        stops = dict.fromkeys(self.stop_token_ids or ())
        if not self.ignore_eos:
            stops |= dict.fromkeys(eos_token_ids[1:])  # the main one is told apart: it gives no stop_reason
        resolved._set(
            stop_token_ids=tuple(stops),
            all_stop_token_ids=frozenset(stops) | set(eos_token_ids),
            bad_words_token_ids=_tokenize_bad_words(self.bad_words or (), tokenizer),
            max_tokens=room if self.max_tokens is None else self.max_tokens,
        )
        bad = [token for sequence in resolved.bad_words_token_ids for token in sequence if token >= vocab_size]
        _require(not bad, f"bad_words give token ids {bad}, outside the vocabulary: 0 to {vocab_size - 1}.")
        banned = {sequence[0] for sequence in resolved.bad_words_token_ids if len(sequence) == 1}
        banned |= resolved.all_stop_token_ids if self.min_tokens else set()
        _require(
            self.allowed_token_ids is None or not banned.issuperset(self.allowed_token_ids),
            f"bad_words, or min_tokens={self.min_tokens} which holds back stop tokens, ban every token of"
            f" allowed_token_ids={list(self.allowed_token_ids or ())}: allow one more, or lower min_tokens.",
        )
        return resolved

    def for_sample(self, index: int) -> SamplingParams:
        """The settings of one of the `n` samples: a stream of its own, derived from the seed."""
        sample = copy.copy(self)
        sample._set(n=1, seed=None if self.seed is None else self.seed + index)
        return sample


def _tokenize_bad_words(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Each word at the start of a text and after a space, where these are different tokens of equal number."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare, spaced = (tuple(tokenizer.encode(p + word.lstrip(), add_special_tokens=False)) for p in ("", " "))
        _require(bool(bare), f"bad_words entries must tokenize to at least one token, got {word!r}.")
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(sequences)
