"""From logits to one token a row, in vLLM's order.

    allowed ids, bad words, min_tokens, logit_bias    masks and biases
    repetition, frequency, presence                   penalties                  -> greedy rows take the argmax here
    temperature, min_p, top_k, top_p                  what may be drawn at all   -> the other rows draw

Mirrors `vllm/v1/sample/sampler.py` and `vllm/v1/sample/ops` (0.32.0), where rows race exponentials on the GPU. Here a
row draws one uniform number and walks its cumulated probabilities: the same distribution, one random number instead of
one a token, and a request with a seed draws from a generator of its own, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minivllm.outputs import Logprob, TokenLogprobs
from minivllm.sampling.metadata import SamplingMetadata, SamplingRow
from minivllm.sampling.params import SamplingParams

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
_TOP_P_WIDTH = 128  # the first guess at how many tokens a top_p mass needs


class LogprobsTensors(NamedTuple):
    """Per row the sampled token, then the likeliest ones.

    Mirrors: vllm/v1/outputs.py LogprobsTensors.
    """

    token_ids: Tensor  # [n, 1 + k] int64
    values: Tensor  # [n, 1 + k] float32
    ranks: Tensor  # [n] int64, of the sampled token: how many tokens are at least as likely

    def to_dicts(self, nums: list[int | None]) -> list[TokenLogprobs | None]:
        """One dict a row, of its own number of tokens; None for a row that asked for none."""
        found: list[TokenLogprobs | None] = []
        for ids, values, rank, num in zip(
            self.token_ids.tolist(), self.values.tolist(), self.ranks.tolist(), nums, strict=True
        ):
            if num is None:
                found.append(None)
                continue
            count = len(ids) if num == -1 else num + 1
            entry = {ids[0]: Logprob(values[0], rank)}
            for place, (token, value) in enumerate(zip(ids[1:count], values[1:count], strict=True), start=1):
                entry.setdefault(token, Logprob(value, place))
            found.append(entry)
        return found


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """One step's tokens.

    Mirrors: vllm/v1/outputs.py SamplerOutput.
    """

    sampled_token_ids: Tensor  # [n] int64
    logprobs: LogprobsTensors | None = None


class Sampler:
    """Draws tokens. seed: of the stream for requests that bring no seed of their own.

    Mirrors: vllm/v1/sample/sampler.py Sampler.
    Leaves out: speculative decoding, custom logits processors, FlashInfer kernels.
    """

    def __init__(self, seed: int = 0, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self.logprobs_mode = logprobs_mode
        self._seed = seed
        self._generator: torch.Generator | None = None

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits: [n, vocab_size], any float dtype; left as they are."""
        wants_logprobs = metadata.max_num_logprobs is not None
        if metadata.all_greedy and not metadata.changes_logits and not wants_logprobs:
            return SamplerOutput(sampled_token_ids=logits.argmax(-1))
        raw = logits.float()
        processed = apply_masks_and_penalties(raw.clone(), metadata) if metadata.changes_logits else raw
        tokens = processed.argmax(-1)
        if not metadata.all_greedy:
            processed = apply_cuts(processed, metadata)
            drawn = self._draw(processed.softmax(-1), metadata.rows)
            tokens = drawn if metadata.greedy is None else torch.where(metadata.greedy, tokens, drawn)
        if not wants_logprobs:
            return SamplerOutput(sampled_token_ids=tokens)
        values = raw if self.logprobs_mode.startswith("raw") else processed
        if self.logprobs_mode.endswith("logprobs"):
            values = values.log_softmax(-1)
        assert metadata.max_num_logprobs is not None
        return SamplerOutput(
            sampled_token_ids=tokens, logprobs=gather_logprobs(values, metadata.max_num_logprobs, tokens)
        )

    def generator_for(self, params: SamplingParams, device: torch.device) -> torch.Generator | None:
        """A stream of random numbers for a request that brings a seed."""
        return None if params.seed is None or params.greedy else torch.Generator(device).manual_seed(params.seed)

    def profile(self, logits: Tensor) -> None:
        """Take the memory that the dearest settings need: every row with top_k and top_p."""
        params = SamplingParams(temperature=0.9, top_k=min(32, logits.shape[1]), top_p=0.9, logprobs=1)
        rows = [SamplingRow(params=params, prompt_token_ids=[0], output_token_ids=[]) for _ in range(len(logits))]
        self(logits, SamplingMetadata.from_rows(rows, logits.shape[1], logits.device))

    def _draw(self, probs: Tensor, rows: list[SamplingRow]) -> Tensor:  # [n, vocab_size] -> [n]
        if self._generator is None:
            self._generator = torch.Generator(probs.device).manual_seed(self._seed)
        uniform = torch.rand(len(rows), 1, generator=self._generator, device=probs.device, dtype=torch.float64)
        for index, row in enumerate(rows):
            if row.generator is not None:
                uniform[index] = torch.rand(1, generator=row.generator, device=probs.device, dtype=torch.float64)
        # float64: a float32 sum over a large vocabulary would move the borders between tokens
        cumulated = probs.cumsum(-1, dtype=torch.float64)
        # right=True never ends on a token of probability 0, whose cumulated value equals its predecessor's
        drawn = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
        return drawn.squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def apply_masks_and_penalties(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Everything before the temperature, in place. logits: [n, vocab_size] float32."""
    if metadata.forbidden is not None:
        logits.masked_fill_(metadata.forbidden, -torch.inf)
    for index in metadata.bad_words_rows:
        output = metadata.rows[index].output_token_ids
        for sequence in metadata.rows[index].params.bad_words_token_ids:
            *before, last = sequence
            if not before or output[-len(before) :] == before:
                logits[index, last] = -torch.inf
    for index in metadata.min_tokens_rows:
        params = metadata.rows[index].params
        if len(metadata.rows[index].output_token_ids) < params.min_tokens:
            logits[index, list(params.all_stop_token_ids)] = -torch.inf
    if metadata.bias is not None:
        rows, tokens, values = metadata.bias
        logits.index_put_((rows, tokens), values, accumulate=True)
    if metadata.repetition_penalty is not None:
        _apply_penalties(logits, metadata)
    return logits


def _apply_penalties(logits: Tensor, metadata: SamplingMetadata) -> None:
    counts = torch.zeros_like(logits)  # [n, vocab_size]: how often each token is in the output
    for index, row in enumerate(metadata.rows):
        if row.output_token_ids:
            output = torch.tensor(row.output_token_ids, device=logits.device)
            counts[index] = torch.bincount(output, minlength=metadata.vocab_size)
    assert metadata.repetition_penalty is not None
    assert metadata.frequency_penalty is not None
    assert metadata.presence_penalty is not None
    assert metadata.prompt_mask is not None
    seen = metadata.prompt_mask | (counts > 0)
    repetition = torch.where(seen, metadata.repetition_penalty[:, None], 1.0)
    torch.where(logits > 0, logits / repetition, logits * repetition, out=logits)
    logits.sub_(metadata.frequency_penalty[:, None] * counts)
    logits.sub_(metadata.presence_penalty[:, None] * (counts > 0))


def apply_cuts(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Temperature, min_p, top_k, top_p: a new [n, vocab_size] float32, -inf where a token cannot be drawn."""
    logits = logits.clone() if metadata.temperature is None else logits / metadata.temperature[:, None]
    if metadata.min_p is not None:
        # p / p_max = exp(logit - logit_max): no softmax is needed to compare with min_p
        floor = logits.amax(-1, keepdim=True) + metadata.min_p[:, None].log()
        logits.masked_fill_(logits < floor, -torch.inf)
    if metadata.top_k is not None:
        largest = logits.topk(int(metadata.top_k[metadata.top_k < metadata.vocab_size].max())).values
        place = metadata.top_k.clamp(max=largest.shape[1])[:, None] - 1
        threshold = largest.gather(1, place)
        threshold[metadata.top_k == metadata.vocab_size] = -torch.inf
        logits.masked_fill_(logits < threshold, -torch.inf)  # ties with the k-th stay
    if metadata.top_p is not None:
        _apply_top_p(logits, metadata.top_p[:, None])
    return logits


def _apply_top_p(logits: Tensor, top_p: Tensor) -> None:  # [n, vocab_size], [n, 1]
    """Keep each token before which, from the likeliest down, less than top_p is gathered. The first always stays."""
    total, width = logits.logsumexp(-1, keepdim=True), _TOP_P_WIDTH
    while True:
        width = min(width, logits.shape[1])
        values, ids = logits.topk(width)  # descending
        probs = (values - total).exp()
        gathered = probs.cumsum(-1)
        if width == logits.shape[1] or bool((gathered[:, -1:] >= top_p).all()):
            break
        width *= 8  # flat distributions need more than the first guess
    keep = gathered - probs < top_p
    keep[:, 0] = True
    logits.fill_(-torch.inf).scatter_(1, ids, values.masked_fill(~keep, -torch.inf))


def gather_logprobs(values: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The given token of each row, then the `num_logprobs` largest. values: [n, vocab_size]; token_ids: [n]."""
    token_ids = token_ids[:, None]
    given = values.gather(-1, token_ids)
    top = values.topk(min(num_logprobs, values.shape[-1]))
    return LogprobsTensors(
        torch.cat([token_ids, top.indices], dim=1),
        torch.cat([given, top.values], dim=1),
        (values >= given).sum(-1),
    )
