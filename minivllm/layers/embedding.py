"""Token ids to vectors, and vectors back to logits over the vocabulary.

Mirrors `vllm/model_executor/layers/vocab_parallel_embedding.py`, without vocabulary sharding and its padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.layers.linear import ReplicatedLinear


class VocabEmbedding(nn.Module):
    """One row of the table for each token id, times `scale`, which is rounded to the table's dtype first.

    Mirrors: vllm/model_executor/layers/vocab_parallel_embedding.py VocabParallelEmbedding.
    Leaves out: vocabulary sharding, added LoRA tokens.
    """

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.scale = float(torch.tensor(scale, dtype=self.weight.dtype, device="cpu"))

    def forward(self, input_ids: Tensor) -> Tensor:  # [num_tokens] int -> [num_tokens, hidden_size]
        rows = F.embedding(input_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


class LMHead(ReplicatedLinear):
    """Logits over the vocabulary. Its weight may be the embedding's own (`tie_weights`).

    Mirrors: vllm/model_executor/layers/vocab_parallel_embedding.py ParallelLMHead.
    Leaves out: vocabulary sharding.
    """

    def tie_weights(self, embedding: VocabEmbedding) -> None:
        """Read the embedding's table from now on, and drop the own one."""
        self.weight = embedding.weight
