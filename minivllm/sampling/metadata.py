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

    m of the rows draw at random, the others take the likeliest token.

    Mirrors: vllm/v1/sample/metadata.py SamplingMetadata.
    """

    rows: list[SamplingRow]
    vocab_size: int
    random: list[SamplingRow]  # the m rows that draw
    random_index: Tensor | None = None  # [m] int64: where they are in `rows`; None where all or none draw
    temperature: Tensor | None = None  # [m] float32
    min_p: Tensor | None = None  # [m] float32
    top_k: Tensor | None = None  # [m] int64; vocab_size where off
    max_top_k: int = 0  # the largest top_k that is on
    top_p: Tensor | None = None  # [m] float32; 1 where off
    forbidden: Tensor | None = None  # [n, vocab_size] bool: not in allowed_token_ids
    bad_words_rows: list[int] = field(default_factory=list)
    min_tokens_rows: list[int] = field(default_factory=list)
    bias_rows: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # row, token ids, values
    penalty_rows: list[tuple[int, Tensor]] = field(default_factory=list)  # row, each token of its prompt once
    max_num_logprobs: int | None = None  # over all rows; vocab_size for -1

    @classmethod
    def from_rows(cls, rows: list[SamplingRow], vocab_size: int, device: torch.device | str) -> SamplingMetadata:
        """Read the rows' settings into tensors on `device`."""
        params = [row.params for row in rows]
        drawing = [index for index, p in enumerate(params) if not p.greedy]
        asked = [vocab_size if p.logprobs == -1 else p.logprobs for p in params if p.logprobs is not None]
        meta = cls(
            rows=rows,
            vocab_size=vocab_size,
            random=[rows[index] for index in drawing],
            bad_words_rows=[i for i, p in enumerate(params) if p.bad_words_token_ids],
            min_tokens_rows=[i for i, p in enumerate(params) if p.min_tokens and p.all_stop_token_ids],
            max_num_logprobs=max(asked) if asked else None,
        )

        def column(values: Sequence[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            """None where every row has the setting off."""
            return None if all(v == off for v in values) else torch.tensor(values, dtype=dtype, device=device)

        if drawing:
            if len(drawing) < len(rows):
                meta.random_index = torch.tensor(drawing, device=device)
            settings = [row.params for row in meta.random]
            meta.temperature = column([p.temperature for p in settings], 1.0)
            meta.min_p = column([p.min_p for p in settings], 0.0)
            meta.top_p = column([p.top_p for p in settings], 1.0)
            ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in settings]
            meta.top_k = column(ks, vocab_size, torch.int64)
            meta.max_top_k = max((k for k in ks if k < vocab_size), default=0)
        if any(p.allowed_token_ids is not None for p in params):
            meta.forbidden = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for index, p in enumerate(params):
            if p.logit_bias:
                tokens, values = (torch.tensor(list(each), device=device) for each in zip(*p.logit_bias.items()))
                meta.bias_rows.append((index, tokens, values.float()))
            if p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty:
                prompt = torch.tensor(rows[index].prompt_token_ids, dtype=torch.int64, device=device)
                meta.penalty_rows.append((index, torch.unique(prompt)))
            if meta.forbidden is not None and p.allowed_token_ids is not None:
                meta.forbidden[index] = True
                meta.forbidden[index, torch.tensor(p.allowed_token_ids, device=device)] = False
        return meta

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and the cuts (min_p, top_k, top_p) is asked for."""
        by_row = (self.bad_words_rows, self.min_tokens_rows, self.bias_rows, self.penalty_rows)
        return self.forbidden is not None or any(by_row)
