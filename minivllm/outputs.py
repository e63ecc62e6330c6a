"""What leaves each stage: the model runner's step result, the scheduler's per-request news, the user's outputs.

Plain Python, no torch: the scheduler reads these too. Ids and floats only, so an output can be kept, compared and
printed for ever without holding a tensor alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """One candidate token at one position.

    Mirrors: vllm/logprobs.py Logprob.

    logprob: natural logarithm. rank: 1 = most likely of the vocabulary. decoded_token: its text, None until the
    engine has detokenized it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: the sampled (or prompt) token first, then the most likely ones; None for a prompt's first token.
TokenLogprobs = dict[int, Logprob]
PromptLogprobs = list[TokenLogprobs | None]


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """What one step computed.

    Mirrors: vllm/v1/outputs.py ModelRunnerOutput.
    Leaves out: pooling, KV-connector and speculative fields.

    sampled_token_ids[i]: tokens sampled for req_ids[i]; empty while its prompt is not wholly computed.
    logprobs[i]: one dict a sampled token, or None where the request asked for none.
    prompt_logprobs: request id -> whole list, in the step that computed the prompt's last token.
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] | None = None
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class EngineCoreOutput:
    """One request's news of one step, from the scheduler to the engine.

    Mirrors: vllm/v1/engine/__init__.py EngineCoreOutput.

    finish_reason: "stop", "length", "abort", "error" or None while it runs. error: the text for "error".
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence.

    Mirrors: vllm/outputs.py CompletionOutput.

    finish_reason: "stop" (eos, stop token or stop string), "length", "abort", "error", or None while it grows.
    stop_reason: the stop string or stop token id that ended it; None for eos.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """Everything known about one request so far.

    Mirrors: vllm/outputs.py RequestOutput.
    Leaves out: encoder prompts, LoRA, metrics, KV-transfer parameters.

    num_cached_tokens: prompt tokens whose K/V were found in the prefix cache. error: why it ended with the finish
    reason "error", else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
