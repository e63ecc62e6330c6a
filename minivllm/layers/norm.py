"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight.

On a CPU, torch's own rms_norm is eleven operations, and a step has two norms a layer. With |x| the length of the row
and n its size, the same is x / hypot(|x|, sqrt(n * eps)) * (sqrt(n) * weight): half as many.

Mirrors `vllm/model_executor/layers/layernorm.py`, without its fused kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of 1, then by a learned weight; computed in float32, rounded once.

    Mirrors: vllm/model_executor/layers/layernorm.py RMSNorm.
    Leaves out: variance over a part of the row, norms without a weight, the fused residual addition.
    """

    offset = 0.0  # from the stored weight to the factor

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps
        self.shape = (hidden_size,)
        self._scale: Tensor | None = None  # [hidden_size] float32
        self._floor: Tensor | None = None  # [] float32

    def process_weights_after_loading(self) -> None:
        """Prepare the CPU's shorter way."""
        if self.weight.device.type == "cpu":
            size = self.shape[0]
            self._scale = (self.weight.data.float() + self.offset) * size**0.5
            self._floor = torch.tensor((size * self.eps) ** 0.5, dtype=torch.float32, device="cpu")

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden_size], any float dtype -> the same
        if self._scale is None or self._floor is None:
            return nn.functional.rms_norm(x, self.shape, self.weight, self.eps)
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor)).mul_(self._scale).to(x.dtype)
