"""From logits to one token a row, in vLLM's order.

    allowed ids, bad words, min_tokens, logit_bias    masks and biases
    repetition, frequency, presence                   penalties                  -> greedy rows take the argmax here
    temperature, min_p, top_k, top_p                  what may be drawn at all   -> the other rows draw

Mirrors `vllm/v1/sample/sampler.py` and `vllm/v1/sample/ops` (0.32.0), where rows race exponentials on the GPU. Here a
row draws one uniform number and walks its cumulated probabilities: the same distribution with one random number instead
of one a token. A request with a seed draws from a generator of its own, and every cut looks at its own row alone: its
tokens do not depend on what else is in the batch.
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
        # Also where a plain argmax is all: on the CPU it is several times slower on bfloat16 than this copy and itself.
        raw, num_logprobs = logits.float(), metadata.max_num_logprobs
        processed = raw
        if metadata.changes_logits or metadata.random:
            if raw is logits or (num_logprobs is not None and self.logprobs_mode.startswith("raw")):
                processed = raw.clone()  # what follows works in place
            apply_masks_and_penalties(processed, metadata)
        if not metadata.random:
            tokens = processed.argmax(-1)
        elif metadata.random_index is None:
            tokens = self._draw(apply_cuts(processed, metadata), metadata)
        else:
            tokens = processed.argmax(-1)
            cut = apply_cuts(processed[metadata.random_index], metadata)
            tokens[metadata.random_index] = self._draw(cut, metadata)
            processed[metadata.random_index] = cut
        output = SamplerOutput(sampled_token_ids=tokens)
        if num_logprobs is not None:
            values = raw if self.logprobs_mode.startswith("raw") else processed
            if self.logprobs_mode.endswith("logprobs"):
                values = values.log_softmax(-1)
            output.logprobs = gather_logprobs(values, num_logprobs, tokens)
        return output

    def generator_for(self, params: SamplingParams, device: torch.device) -> torch.Generator | None:
        """A stream of random numbers for a request that brings a seed."""
        return None if params.seed is None or params.greedy else torch.Generator(device).manual_seed(params.seed)

    def profile(self, logits: Tensor) -> None:
        """Take the memory that the dearest settings need: every row with top_k and top_p."""
        params = SamplingParams(temperature=0.9, top_k=min(32, logits.shape[1]), top_p=0.9, logprobs=1)
        rows = [SamplingRow(params=params, prompt_token_ids=[0], output_token_ids=[]) for _ in range(len(logits))]
        self(logits, SamplingMetadata.from_rows(rows, logits.shape[1], logits.device))

    def _draw(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:  # [m, vocab_size] -> [m] int64
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self._seed)
        at = torch.rand(len(logits), 1, generator=self._generator, device=logits.device, dtype=torch.float64)
        for index, row in enumerate(metadata.random):
            if row.generator is not None:
                at[index] = torch.rand(1, generator=row.generator, device=logits.device, dtype=torch.float64)
        return torch.cat([_pick(logits[rows], at[rows]) for rows in _few_rows(logits)])


def _few_rows(logits: Tensor) -> list[slice]:
    """All rows in pieces, small on the CPU: memory fresh from the system costs more there than the arithmetic on it."""
    size = 8 if logits.device.type == "cpu" else len(logits)
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def _pick(logits: Tensor, at: Tensor) -> Tensor:
    """The token at which each row's probability, summed from the left, passes `at`; never one of probability 0.

    logits: [m, vocab_size] float32; at: [m, 1] float64 in [0, 1). Returns [m] int64, inside the vocabulary even where
    logits are NaN.
    """
    # float64: a float32 sum over a large vocabulary would move the borders between tokens
    gathered = logits.softmax(-1).double().cumsum(-1)
    whole = gathered[:, -1:]
    # Below the whole, or rounding could point past the last token that has any probability.
    target = torch.minimum(at * whole, whole.nextafter(torch.zeros_like(whole)))
    return torch.searchsorted(gathered, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


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
    for index, tokens, values in metadata.bias_rows:
        logits[index, tokens] += values
    for index, prompt in metadata.penalty_rows:
        row = metadata.rows[index]
        _apply_penalties(logits[index], prompt, row.output_token_ids, row.params)
    return logits


def _apply_penalties(logits: Tensor, prompt: Tensor, output_token_ids: list[int], params: SamplingParams) -> None:
    """One row, [vocab_size], in place; only the tokens that were seen are touched. prompt: [any] int64, no repeats."""
    ids = torch.tensor(output_token_ids, dtype=torch.int64, device=logits.device)
    output, counts = torch.unique(ids, return_counts=True)
    if params.repetition_penalty != 1.0:
        seen = torch.unique(torch.cat([prompt, output]))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    logits[output] -= params.frequency_penalty * counts + params.presence_penalty


def apply_cuts(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Temperature, min_p, top_k, top_p of the rows that draw, in place: -inf where a token cannot be drawn.

    logits: [m, vocab_size] float32.
    """
    if metadata.temperature is not None:
        logits.div_(metadata.temperature[:, None])
    if metadata.min_p is not None:
        # p / p_max = exp(logit - logit_max): no softmax is needed to compare with min_p
        floor = logits.amax(-1, keepdim=True) + metadata.min_p[:, None].log()
        logits.masked_fill_(logits < floor, -torch.inf)
    if metadata.top_k is not None:
        largest = logits.topk(metadata.max_top_k).values
        floor = largest.gather(1, metadata.top_k.clamp(max=metadata.max_top_k)[:, None] - 1)
        floor[metadata.top_k == metadata.vocab_size] = -torch.inf
        logits.masked_fill_(logits < floor, -torch.inf)  # ties with the k-th stay
    if metadata.top_p is not None:
        logprobs = logits.log_softmax(-1)
        logits.masked_fill_(logprobs < _top_p_floor(logprobs, metadata.top_p), -torch.inf)
    return logits


def _top_p_floor(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """The log-probability of each row's last token before which, from the likeliest down, less than top_p is gathered.

    logprobs: [m, vocab_size]; top_p: [m]. Returns [m, 1]. Tokens that tie with the last one stay too: which of them a
    partial sort finds first would depend on the other rows.
    """
    floor = logprobs.new_full((len(logprobs), 1), -torch.inf)
    width, todo = _TOP_P_WIDTH, (top_p < 1).nonzero().squeeze(1)
    while len(todo):
        values = logprobs[todo].topk(min(width, logprobs.shape[1])).values  # descending
        probs = values.exp()
        gathered = probs.cumsum(-1)
        kept = (gathered - probs < top_p[todo, None]).sum(-1, keepdim=True)
        floor[todo] = values.gather(1, kept.clamp_(min=1) - 1)
        # Flat rows need more than the first guess.
        todo = todo[(kept.squeeze(1) == width) & (width < logprobs.shape[1])]
        width *= 8
    return floor


def gather_logprobs(values: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """The given token of each row, then the `num_logprobs` largest. values: [n, vocab_size]; token_ids: [n]."""
    given = values.gather(-1, token_ids[:, None])
    top = values.topk(min(num_logprobs, values.shape[-1]))
    return LogprobsTensors(
        torch.cat([token_ids[:, None], top.indices], dim=1),
        torch.cat([given, top.values], dim=1),
        torch.cat([(values[rows] >= given[rows]).sum(-1) for rows in _few_rows(values)]),
    )
