"""Where a prompt ends within a character, and where stop strings and tokens end together: on single-byte tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minivllm.sampling.detokenizer import IncrementalDetokenizer
from minivllm.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", ["🎉🎉🎉🎉🎉", "a🎉é日𒀀", "日本語日本語", "é" * 9, "👩‍👩‍👧‍👦"])
def test_a_prompt_that_ends_within_a_character(byte_tokenizer: Any, text: str) -> None:
    """The output begins with the character that the prompt left open; nothing else of the prompt is shown."""
    ids = byte_tokenizer.encode(text)
    starts = [len(text[:i].encode()) for i in range(len(text))]  # of each character
    for cut in range(len(ids)):
        detokenizer, shown = IncrementalDetokenizer(byte_tokenizer, ids[:cut], SamplingParams()), []
        for token in ids[cut:]:
            detokenizer.update([token])
            shown.append(detokenizer.text)
        wanted = text[max(i for i, start in enumerate(starts) if start <= cut) :]
        assert shown[-1] == wanted
        assert all(wanted.startswith(piece) for piece in shown)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cut_at_every_place(byte_tokenizer: Any, include: bool) -> None:
    text, stop = "wait: é🎉 stop👍 now", "🎉 stop👍"
    ids = byte_tokenizer.encode(text)
    wanted = "wait: é" + (stop if include else "")
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    for cut in range(1, len(ids)):
        detokenizer = IncrementalDetokenizer(byte_tokenizer, [], params)
        found = detokenizer.update(ids[:cut])
        if found is None:
            assert "🎉" not in detokenizer.text or include
            found = detokenizer.update(ids[cut:])
        assert found == stop
        assert detokenizer.text == wanted


@pytest.mark.parametrize(
    ("stops", "found", "text"),
    [(["wo", "two"], "wo", "one t"), (["two", "wo"], "two", "one "), (["three", "two t", "two"], "two", "one ")],
    ids=str,
)
def test_of_stop_strings_that_end_together_the_first_named_counts(
    byte_tokenizer: Any, stops: list[str], found: str, text: str
) -> None:
    for chunk in (1, 50):  # all at once, the one that ends first counts, as if the tokens had come one by one
        detokenizer = IncrementalDetokenizer(byte_tokenizer, [], SamplingParams(stop=stops))
        ids, ended = byte_tokenizer.encode("one two three"), None
        while ids and ended is None:
            ended = detokenizer.update(ids[:chunk])
            ids = ids[chunk:]
        assert (ended, detokenizer.text) == (found, text)


def test_of_stop_strings_in_one_token_the_one_that_ends_first_counts() -> None:
    backend = Tokenizer(models.WordLevel({"one two three": 0}, unk_token="one two three"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    for stops in (["three", "o thr", "two"], ["two", "three"]):
        detokenizer = IncrementalDetokenizer(tokenizer, [], SamplingParams(stop=stops))
        assert detokenizer.update([0]) == "two"
        assert detokenizer.text == "one "


class BrokenStream:
    """A stream that fails as the library's does when an earlier text turns out to be no prefix of the new one."""

    def __init__(self, message: str) -> None:
        self.message = message

    def step(self, backend: Any, token: int) -> str:
        raise Exception(self.message)


def test_a_stream_with_an_invalid_prefix_begins_anew(byte_tokenizer: Any) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer, [], SamplingParams())
    (a, b, c), shown = byte_tokenizer.encode("abc"), []
    for token in (a, b, c):
        if token == b:
            detokenizer._stream = BrokenStream("Invalid prefix encountered while decoding stream")
        detokenizer.update([token])
        shown.append(detokenizer.text)
    assert shown == ["a", "ab", "abc"]


def test_other_errors_of_the_stream_are_not_hidden(byte_tokenizer: Any) -> None:
    detokenizer = IncrementalDetokenizer(byte_tokenizer, [], SamplingParams())
    detokenizer._stream = BrokenStream("no memory")
    with pytest.raises(Exception, match="no memory"):
        detokenizer.update([1])
