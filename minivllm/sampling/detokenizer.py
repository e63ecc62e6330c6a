"""From token ids to text as they come, never half a character, never a stop string.

Mirrors `vllm/v1/engine/detokenizer.py` (0.32.0); the decoding itself is the `tokenizers` library's DecodeStream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.sampling.params import SamplingParams

# Tokens of the prompt that the stream sees first: some tokenizers drop the space before a text's first word.
_CONTEXT = 6


class IncrementalDetokenizer:
    """The text of one sample. `text` is what may be shown now.

    A character of several tokens appears when its last one is there. While the sample runs, text that may yet turn
    out to be the start of a stop string is held back.

    Mirrors: vllm/v1/engine/detokenizer.py FastIncrementalDetokenizer.
    Leaves out: tokenizers without a `tokenizers` backend.
    """

    def __init__(self, tokenizer: Any | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._params = params
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        hold = bool(self._stops) and not params.include_stop_str_in_output
        self._held_back = max(map(len, self._stops)) - 1 if hold else 0
        self._full = ""  # everything decoded so far
        self._num_tokens = 0
        self._finished = False
        self._special: dict[int, str] = {}  # filled where no spaces may stand between special tokens
        self._last_special = False
        self._backend: Any = None
        if tokenizer is not None and params.detokenize:
            self._backend = getattr(tokenizer, "backend_tokenizer", None)
            if self._backend is None:
                raise ValueError(
                    f"{type(tokenizer).__name__} has no `tokenizers` backend to stream text with: use a fast"
                    " tokenizer, or SamplingParams(detokenize=False)"
                )
            if not (params.skip_special_tokens or params.spaces_between_special_tokens):
                added = self._backend.get_added_tokens_decoder()
                self._special = {token: entry.content for token, entry in added.items()}
            self._new_stream()
            start = max(0, len(prompt_token_ids) - _CONTEXT)
            # Not from within a character: its rest would be shown, broken, if another one is open where output begins.
            while start and self._backend.decode(prompt_token_ids[start : start + 4]).startswith("\ufffd"):
                start -= 1
            for token in prompt_token_ids[start:]:
                self._decode(token)

    @property
    def text(self) -> str:
        """What may be shown now; all of it once the sample has ended."""
        if self._finished or not self._held_back:
            return self._full
        return self._full[: max(0, len(self._full) - self._held_back)]

    def update(self, new_token_ids: Sequence[int], finish_reason: str | None = None) -> str | None:
        """Take in new tokens; returns the stop string that ended the text with them, if one did.

        finish_reason: why the scheduler ended the sample with these tokens; for "stop" the last one is a stop token,
        whose own text is not part of the answer (unless include_stop_str_in_output).
        """
        self._finished = finish_reason is not None
        if self._backend is None:
            return None
        stop_token = finish_reason == "stop" and not self._params.include_stop_str_in_output
        for token in new_token_ids[:-1] if stop_token else new_token_ids:
            before, piece, special = len(self._full), self._decode(token), self._special.get(token)
            self._full += special if special is not None and self._last_special else piece
            self._last_special = special is not None
            self._num_tokens += 1
            # A stop string may begin in the text of the first min_tokens tokens, but not end there.
            if self._num_tokens > self._params.min_tokens and (found := self._find_stop(before)) is not None:
                self._finished = True
                return found
        return None

    def _find_stop(self, before: int) -> str | None:
        """The stop string that ends first in the text since `before`; cuts the text there."""
        places = {stop: self._full.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops}
        hits = [(at + len(stop), stop) for stop, at in places.items() if at >= 0]
        if not hits:
            return None
        end, stop = min(hits, key=lambda hit: hit[0])  # of those that end together the first in the list
        self._full = self._full[: end if self._params.include_stop_str_in_output else end - len(stop)]
        return stop

    def _new_stream(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._params.skip_special_tokens)

    def _decode(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        try:
            return self._stream.step(self._backend, token) or ""
        except Exception as error:
            # An invalid byte sequence can leave the stream with a prefix it cannot continue: begin a new one there.
            if "Invalid prefix" not in str(error):
                raise
            self._new_stream()
            return self._stream.step(self._backend, token) or ""
