"""The batch's sampling settings as tensors: made when rows come or go, not every step.

Mirrors `vllm/v1/sample/metadata.py` (0.32.0) and the logits processors' state in `vllm/v1/sample/logits_processor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivllm.sampling.params import SamplingParams


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """One request in the sampler's batch. output_token_ids is the request's own list and grows by itself.

    Mirrors none: vLLM passes its input batch.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    generator: torch.Generator | None = None


@dataclass(slots=True, kw_only=True)
class SamplingMetadata:
    """Settings of n rows; a tensor is None where no row needs it, so that a plain greedy batch costs nothing.

    Mirrors: vllm/v1/sample/metadata.py SamplingMetadata.
    """

    rows: list[SamplingRow]
    vocab_size: int
    all_greedy: bool
    temperature: Tensor | None = None  # [n] float32; 1 in greedy rows
    greedy: Tensor | None = None  # [n] bool
    min_p: Tensor | None = None  # [n] float32
    top_k: Tensor | None = None  # [n] int64; vocab_size where off
    top_p: Tensor | None = None  # [n] float32
    repetition_penalty: Tensor | None = None  # [n] float32, None where no row has any penalty
    frequency_penalty: Tensor | None = None  # [n] float32
    presence_penalty: Tensor | None = None  # [n] float32
    prompt_mask: Tensor | None = None  # [n, vocab_size] bool: tokens of the prompt
    forbidden: Tensor | None = None  # [n, vocab_size] bool: not in allowed_token_ids
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, token ids, values of every logit_bias
    bad_words_rows: list[int] = field(default_factory=list)
    min_tokens_rows: list[int] = field(default_factory=list)
    max_num_logprobs: int | None = None  # over all rows; vocab_size for -1

    @classmethod
    def from_rows(cls, rows: list[SamplingRow], vocab_size: int, device: torch.device | str) -> SamplingMetadata:
        """Read the rows' settings into tensors on `device`."""
        params = [row.params for row in rows]
        asked = [vocab_size if p.logprobs == -1 else p.logprobs for p in params if p.logprobs is not None]
        meta = cls(
            rows=rows,
            vocab_size=vocab_size,
            all_greedy=all(p.greedy for p in params),
            bad_words_rows=[i for i, p in enumerate(params) if p.bad_words_token_ids],
            min_tokens_rows=[i for i, p in enumerate(params) if p.min_tokens and p.all_stop_token_ids],
            max_num_logprobs=max(asked) if asked else None,
        )

        def column(values: list[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            """None where every row has the setting off."""
            return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype, device=device)

        if not meta.all_greedy:
            meta.temperature = column([1.0 if p.greedy else p.temperature for p in params], 1.0)
            meta.greedy = column([float(p.greedy) for p in params], 0.0, torch.bool)
            meta.min_p = column([p.min_p for p in params], 0.0)
            ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
            meta.top_k = column(ks, vocab_size, torch.int64)  # type: ignore[arg-type]
            meta.top_p = column([p.top_p for p in params], 1.0)
        penalised = [p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty for p in params]
        if any(penalised):
            meta.repetition_penalty = torch.tensor([p.repetition_penalty for p in params], device=device)
            meta.frequency_penalty = torch.tensor([p.frequency_penalty for p in params], device=device)
            meta.presence_penalty = torch.tensor([p.presence_penalty for p in params], device=device)
            meta.prompt_mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
            for index, row in enumerate(rows):
                if penalised[index]:
                    meta.prompt_mask[index, torch.tensor(row.prompt_token_ids, device=device)] = True
        if any(p.allowed_token_ids is not None for p in params):
            meta.forbidden = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
            for index, p in enumerate(params):
                if p.allowed_token_ids is not None:
                    meta.forbidden[index] = True
                    meta.forbidden[index, torch.tensor(p.allowed_token_ids, device=device)] = False
        entries = [(i, token, value) for i, p in enumerate(params) for token, value in (p.logit_bias or {}).items()]
        if entries:
            where, tokens, values = zip(*entries, strict=True)
            meta.bias = (
                torch.tensor(where, device=device),
                torch.tensor(tokens, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        return meta

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and the cuts (min_p, top_k, top_p) is asked for."""
        return bool(
            self.forbidden is not None
            or self.bad_words_rows
            or self.min_tokens_rows
            or self.bias is not None
            or self.repetition_penalty is not None
        )
