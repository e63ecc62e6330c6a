"""Log-probabilities of a prompt's own tokens, gathered chunk by chunk as the prompt is computed.

Mirrors `_get_prompt_logprobs_dict` of `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, tensor

from minivllm.outputs import PromptLogprobs
from minivllm.sampling.sampler import gather_logprobs
from minivllm.worker.input_batch import InputBatch

# Rows of logits at a time: a long prompt's logits over the whole vocabulary would be the largest tensor of the step.
_ROWS = 128


class PromptLogprobsCollector:
    """Keeps the unfinished lists between the chunks of a prompt.

    Mirrors none: vLLM keeps them in its input batch (`in_progress_prompt_logprobs_cpu`).
    """

    def __init__(self) -> None:
        self._unfinished: dict[str, PromptLogprobs] = {}

    def forget(self, req_id: str) -> None:
        """The request is gone."""
        self._unfinished.pop(req_id, None)

    def collect(
        self,
        batch: InputBatch,
        query_start_loc: np.ndarray,  # [num_reqs + 1] int32
        hidden: Tensor,  # [num_tokens, hidden_size]
        model: Any,
    ) -> dict[str, PromptLogprobs]:
        """Add what this step computed; returns the lists that became complete, by request id.

        Entry i tells how likely token i was after tokens 0 .. i - 1; entry 0 is None.
        """
        complete: dict[str, PromptLogprobs] = {}
        for row, req_id in enumerate(batch.req_ids):
            state = batch.state(row)
            wanted = state.sampling_params.prompt_logprobs
            start, end = int(batch.num_computed_tokens_cpu[row]), state.num_prompt_tokens
            # Only while the prompt is computed for the first time: after a preemption it was reported already.
            if wanted is None or start >= end or state.output_token_ids:
                continue
            entries: PromptLogprobs = [None] if start == 0 else self._unfinished[req_id]
            self._unfinished[req_id] = entries
            first, last = int(query_start_loc[row]), int(query_start_loc[row + 1])
            # The token at position p predicts position p + 1; the prompt's last token predicts no prompt token.
            last = min(last, first + end - 1 - start)
            for at in range(first, last, _ROWS):
                rows = slice(at, min(at + _ROWS, last))
                target = start + 1 + at - first
                targets = tensor(state.prompt_token_ids[target : target + rows.stop - rows.start], device=hidden.device)
                logprobs = model.compute_logits(hidden[rows]).float().log_softmax(-1)
                num = logprobs.shape[-1] if wanted == -1 else wanted
                entries.extend(gather_logprobs(logprobs, num, targets).to_dicts([wanted] * len(targets)))
            if start + int(query_start_loc[row + 1]) - first >= end:
                complete[req_id] = self._unfinished.pop(req_id)
        return complete
