"""Turns the scheduler's news into what a user reads: text, log-probabilities, one output for all `n` samples.

Mirrors `vllm/v1/engine/output_processor.py` and `parallel_sampling.py`. Plain Python; the tokenizer is the only
outside thing touched here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    Logprob,
    PromptLogprobs,
    RequestOutput,
    TokenLogprobs,
)
from minivllm.sampling.detokenizer import IncrementalDetokenizer
from minivllm.sampling.params import SamplingParams


@dataclass(slots=True, kw_only=True)
class _Sample:
    """One of a request's `n` samples: the state of its text."""

    parent: _Parent
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer


@dataclass(slots=True, kw_only=True)
class _Parent:
    """What the user asked for; `n` engine requests may work for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    tokenizer: Any | None = None  # None where no text is wanted
    samples: list[_Sample] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


class OutputProcessor:
    """Keeps the text of every running request and builds its `RequestOutput`s.

    Mirrors: vllm/v1/engine/output_processor.py OutputProcessor.
    Leaves out: output kinds (every output holds all text so far), async queues, metrics.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._samples: dict[str, _Sample] = {}  # engine request id -> sample
        self._parents: dict[str, _Parent] = {}  # user's request id -> parent

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def __len__(self) -> int:
        return len(self._parents)

    def add_request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams
    ) -> list[str]:
        """Start a request; returns the engine request ids of its `params.n` samples."""
        parent = _Parent(request_id=request_id, prompt=prompt, prompt_token_ids=prompt_token_ids)
        ids = [request_id] if params.n == 1 else [f"{index}_{request_id}" for index in range(params.n)]
        if taken := [each for each in (request_id, *ids) if each in self._parents or each in self._samples]:
            raise ValueError(f"request id {taken[0]!r} is already running; ids must be unique among live requests")
        for index in range(params.n):
            completion = CompletionOutput(index=index, text="", token_ids=[])
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            detokenizer = IncrementalDetokenizer(self.tokenizer, prompt_token_ids, params)
            parent.samples.append(_Sample(parent=parent, completion=completion, detokenizer=detokenizer))
        parent.tokenizer = self.tokenizer if params.detokenize else None
        self._parents[request_id] = parent
        self._samples |= dict(zip(ids, parent.samples, strict=True))
        return ids

    def request_ids(self) -> list[str]:
        """The user's ids of every request still running."""
        return list(self._parents)

    def engine_ids(self, request_id: str) -> list[str]:
        """The engine request ids that still work for `request_id`."""
        parent = self._parents.get(request_id)
        return [] if parent is None else [key for key, sample in self._samples.items() if sample.parent is parent]

    def process_outputs(self, news: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Returns the outputs that changed and the engine request ids that a stop string ended just now."""
        changed: dict[str, _Parent] = {}
        stopped: list[str] = []
        for item in news:
            sample = self._samples.get(item.request_id)
            if sample is None:  # aborted while the step ran
                continue
            parent, completion = sample.parent, sample.completion
            parent.num_cached_tokens = max(parent.num_cached_tokens, item.num_cached_tokens)
            parent.error = parent.error or item.error
            if item.prompt_logprobs is not None:
                parent.prompt_logprobs = [
                    None if entry is None else _decoded(entry, parent.tokenizer) for entry in item.prompt_logprobs
                ]
            stop_string = sample.detokenizer.update(item.new_token_ids, item.finish_reason)
            completion.token_ids.extend(item.new_token_ids)
            if item.new_logprobs is not None and completion.logprobs is not None:
                for token, entry in zip(item.new_token_ids, item.new_logprobs, strict=True):
                    completion.logprobs.append(_decoded(entry, parent.tokenizer))
                    completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry[token].logprob
            completion.text = sample.detokenizer.text
            completion.finish_reason, completion.stop_reason = item.finish_reason, item.stop_reason
            if stop_string is not None:
                if item.finish_reason is None:
                    stopped.append(item.request_id)
                completion.finish_reason, completion.stop_reason = "stop", stop_string
            if completion.finished():
                del self._samples[item.request_id]
            changed[parent.request_id] = parent
        return [self._output(parent) for parent in changed.values()], stopped

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request; its last output says "abort". None where it is not running."""
        parent = self._parents.get(request_id)
        if parent is None:
            return None
        for engine_id in self.engine_ids(request_id):
            sample = self._samples.pop(engine_id)
            sample.detokenizer.update([], "abort")  # nothing stays held back
            sample.completion.text, sample.completion.finish_reason = sample.detokenizer.text, "abort"
        return self._output(parent)

    def _output(self, parent: _Parent) -> RequestOutput:
        finished = all(sample.completion.finished() for sample in parent.samples)
        if finished:
            self._parents.pop(parent.request_id, None)
        # Completions are copied: an output that a caller keeps must not grow behind its back.
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=parent.prompt_token_ids,
            outputs=[_snapshot(sample.completion) for sample in parent.samples],
            finished=finished,
            num_cached_tokens=parent.num_cached_tokens,
            prompt_logprobs=parent.prompt_logprobs,
            error=parent.error,
        )


def _decoded(entry: TokenLogprobs, tokenizer: Any | None) -> TokenLogprobs:
    if tokenizer is None:
        return entry
    return {token: Logprob(each.logprob, each.rank, tokenizer.decode([token])) for token, each in entry.items()}


def _snapshot(completion: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=list(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if completion.logprobs is None else list(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
