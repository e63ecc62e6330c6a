"""RMSNorm, with the residual addition that comes before it.

Mirrors `vllm/model_executor/layers/layernorm.py`, without its fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of 1, then by a learned weight. Sums are taken in float32.

    Mirrors: vllm/model_executor/layers/layernorm.py RMSNorm.
    Leaves out: variance over a part of the row, norms without a weight.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps
        self.shape = (hidden_size,)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size], any float dtype -> the same
        return nn.functional.rms_norm(x, self.shape, self.weight, self.eps)
