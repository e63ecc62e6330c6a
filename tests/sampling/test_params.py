"""SamplingParams: defaults, what is put in order, what is refused and with which words."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from minivllm.sampling.params import SamplingParams

EOS = 2
VOCABULARY = {"cat": 3, " cat": 4, "dog": 5, " dog": 6, "hot": 7, " hot": 8, "un": 9, " unhot": 10}


class Words:
    """A tokenizer of whole words: a word after a space is another token than the same word at the start."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            piece = next(text[:end] for end in range(len(text), 0, -1) if text[:end] in VOCABULARY or end == 1)
            ids.append(VOCABULARY.get(piece, 1))
            text = text[len(piece) :]
        return ids


def resolve(params: SamplingParams, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"vocab_size": 100, "tokenizer": Words(), "eos_token_ids": [EOS], "room": 50}
    return params.resolve(**(settings | changes))


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos, params.seed) == (16, 0, False, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logprobs, params.prompt_logprobs, params.logit_bias, params.allowed_token_ids) == (None,) * 4
    assert (params.stop, params.stop_token_ids, params.bad_words) == ((), (), ())
    assert params.detokenize
    assert params.skip_special_tokens
    assert not params.include_stop_str_in_output


def test_values_are_put_in_order() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.2)
    assert (greedy.top_k, greedy.top_p, greedy.min_p, greedy.greedy) == (0, 1.0, 0.0, True)
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[7, 3, 7]).stop_token_ids == (7, 3)
    assert SamplingParams(bad_words=["x", "y", "x"]).bad_words == ("x", "y")
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
    assert SamplingParams(logit_bias={"5": 1, 6: -200.0}).logit_bias == {5: 1, 6: -200.0}
    assert SamplingParams(logit_bias={5: float("-inf")}).logit_bias == {5: float("-inf")}


def test_lists_of_the_caller_are_not_kept() -> None:
    stops, bias = [7], {3: 1.0}
    params = SamplingParams(stop_token_ids=stops, logit_bias=bias)
    stops.append(8)
    bias[4] = 2.0
    assert params.stop_token_ids == (7,)
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"n": 0}, ValueError, "n must be at least 1, got 0."),
        ({"n": 20_000}, ValueError, "n must be at most 16384, got 20000."),
        ({"n": 1.5}, TypeError, "n must be an integer, got float: 1.5."),
        ({"n": 2, "temperature": 0.0}, ValueError, "n must be 1 when using greedy sampling, got 2."),
        ({"temperature": -0.5}, ValueError, "temperature must be non-negative, got -0.5."),
        ({"temperature": 2.5}, ValueError, "temperature must be in [0, 2], got 2.5."),
        ({"temperature": float("nan")}, ValueError, "temperature must be a finite number, got nan."),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got str: '1'."),
        ({"top_p": 0.0}, ValueError, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": float("nan")}, ValueError, "top_p must be in (0, 1], got nan."),
        ({"top_k": -2}, ValueError, "top_k must be 0 (disable), or at least 1, got -2."),
        ({"top_k": 5.0}, TypeError, "top_k must be an integer, got float: 5.0."),
        ({"min_p": 1.5}, ValueError, "min_p must be in [0, 1], got 1.5."),
        ({"presence_penalty": 2.5}, ValueError, "presence_penalty must be in [-2, 2], got 2.5."),
        ({"frequency_penalty": -2.1}, ValueError, "frequency_penalty must be in [-2, 2], got -2.1."),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be greater than zero, got 0.0."),
        ({"repetition_penalty": float("inf")}, ValueError, "repetition_penalty must be a finite number, got inf."),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be an integer, got float: 2.5."),
        ({"min_tokens": -1}, ValueError, "min_tokens must be greater than or equal to 0, got -1."),
        ({"min_tokens": 9, "max_tokens": 4}, ValueError, "less than or equal to max_tokens=4, got 9."),
        ({"logprobs": -2}, ValueError, "logprobs must be non-negative or -1, got -2."),
        ({"prompt_logprobs": -7}, ValueError, "prompt_logprobs must be non-negative or -1, got -7."),
        ({"stop": ""}, ValueError, "stop cannot contain an empty string."),
        ({"stop": [3]}, TypeError, "stop must contain only strings, got [3]."),
        ({"stop": "x", "detokenize": False}, ValueError, "Set detokenize=True to use stop."),
        ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids must contain only integers, got ['a']."),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids must be a list of integers, got int: 3."),
        ({"bad_words": ["a", ""]}, ValueError, "bad_words cannot contain an empty string. Got bad_words=['a', '']"),
        ({"bad_words": "word"}, TypeError, "bad_words must be a list of strings, got str: 'word'."),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids is not None and empty!"),
        ({"allowed_token_ids": [1.0]}, TypeError, "allowed_token_ids must contain only integers, got [1.0]."),
        ({"logit_bias": {"x": 1.0}}, TypeError, "token id of logit_bias must be an integer, got str: 'x'."),
        ({"logit_bias": {2.7: 1.0}}, TypeError, "token id of logit_bias must be an integer, got float: 2.7."),
        ({"logit_bias": {3: float("nan")}}, ValueError, "logit_bias of token 3 must be below infinity, got nan."),
        ({"logit_bias": [1]}, TypeError, "logit_bias must be a dict"),
        ({"seed": 1 << 63}, ValueError, "seed must be in [-2**63, 2**63 - 16384), got 9223372036854775808."),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got float: 0.5."),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        SamplingParams(**settings)
    assert says in str(caught.value)


def test_unknown_names_and_positions_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(3)  # type: ignore[misc]


def test_resolve_knows_the_ends_of_text() -> None:
    params = resolve(SamplingParams(stop_token_ids=[9]), eos_token_ids=[EOS, 11])
    assert set(params.stop_token_ids or ()) == {9, 11}  # the main end of text is told apart
    assert params.all_stop_token_ids == {9, EOS, 11}
    ignoring = resolve(SamplingParams(ignore_eos=True), eos_token_ids=[EOS, 11])
    assert ignoring.stop_token_ids == ()
    assert ignoring.all_stop_token_ids == {EOS, 11}  # min_tokens still holds it back, as in vLLM
    assert resolve(SamplingParams(max_tokens=None), room=37).max_tokens == 37
    assert resolve(SamplingParams(max_tokens=5), room=37).max_tokens == 5


def test_bad_words_at_the_start_and_after_a_space() -> None:
    params = resolve(SamplingParams(bad_words=["cat", " dog", "unhot"]))
    # "unhot" is two tokens at the start of a text and one after a space: only the first form is banned, as in vLLM.
    assert params.bad_words_token_ids == ((3,), (4,), (5,), (6,), (9, 7))
    assert resolve(SamplingParams(), tokenizer=None).bad_words_token_ids == ()


def test_a_bad_word_that_is_the_same_after_a_space_counts_once() -> None:
    """Some tokenizers put a space before every text: then the two forms begin with the same token."""

    class Spacing(Words):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(" " + text.lstrip(), add_special_tokens)

    assert resolve(SamplingParams(bad_words=["cat"]), tokenizer=Spacing()).bad_words_token_ids == ((4,),)


def test_bad_words_where_the_space_changes_nothing() -> None:
    class Strips(Words):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.lstrip(), add_special_tokens)

    assert resolve(SamplingParams(bad_words=["cat"]), tokenizer=Strips()).bad_words_token_ids == ((3,),)


@pytest.mark.parametrize(
    ("settings", "changes", "says"),
    [
        ({"allowed_token_ids": [5, 100]}, {}, "allowed_token_ids holds token id 100, outside the vocabulary: 0 to 99."),
        ({"logit_bias": {-1: 1.0}}, {}, "logit_bias holds token id -1"),
        ({"stop_token_ids": [400]}, {}, "stop_token_ids holds token id 400"),
        ({"logprobs": 101}, {}, "logprobs must be at most 100 (the vocabulary), got 101."),
        ({"stop": "x"}, {"tokenizer": None}, "need a tokenizer"),
        ({"bad_words": ["x"]}, {"tokenizer": None}, "need a tokenizer"),
        ({"bad_words": ["   "]}, {}, "must tokenize to at least one token, got '   '"),
        ({"bad_words": ["unhot"]}, {"vocab_size": 9}, "bad_words give token ids [9]"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, {}, "ban every token of allowed_token_ids=[2]"),
        ({"allowed_token_ids": [3, 4], "bad_words": ["cat"]}, {}, "ban every token of allowed_token_ids=[3, 4]"),
    ],
    ids=str,
)
def test_resolve_refuses(settings: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(SamplingParams(**settings), **changes)
    assert says in str(caught.value)


def test_a_stop_token_may_be_all_that_is_allowed_where_min_tokens_does_not_hold_it_back() -> None:
    assert resolve(SamplingParams(allowed_token_ids=[EOS])).allowed_token_ids == (EOS,)
    assert resolve(SamplingParams(allowed_token_ids=[EOS, 7], min_tokens=1)).min_tokens == 1


def test_resolve_leaves_the_original_alone() -> None:
    params = SamplingParams(bad_words=["cat"], max_tokens=None)
    before = dataclasses.asdict(params)
    first, second = resolve(params, eos_token_ids=[1]), resolve(params, eos_token_ids=[4])
    assert dataclasses.asdict(params) == before
    assert (first.all_stop_token_ids, second.all_stop_token_ids) == ({1}, {4})


def test_samples_of_one_seed_have_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=40)
    assert [params.for_sample(index).seed for index in range(3)] == [40, 41, 42]
    assert {params.for_sample(index).n for index in range(3)} == {1}
    assert SamplingParams(n=3).for_sample(1).seed is None


def test_no_torch_at_import() -> None:
    code = "import sys, minivllm.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
