"""A mixture of experts: many small MLPs side by side, of which each token runs the few that a router chose for it.

In plain torch: one expert at a time, on the tokens that chose it. How many those are is known only in the step, so this
is no part of a compiled graph yet. Mirrors `vllm/model_executor/layers/fused_moe/`, without its kernels, quantization
and expert parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FusedExperts(nn.Module):
    """Experts of one layer, their weights stacked as checkpoints store them: [expert, input, output].

    act: from gate and up, [n, 2 * size] in the checkpoint's order, to [n, size].

    Mirrors: vllm/model_executor/layers/fused_moe/layer.py FusedMoE.
    Leaves out: the router (each model has its own), quantization, expert and tensor parallelism, load balancing.
    """

    def __init__(self, num_experts: int, hidden_size: int, size: int, act: nn.Module, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = _empty(num_experts, hidden_size, 2 * size)
        self.gate_up_proj_bias = _empty(num_experts, 2 * size) if bias else None
        self.down_proj = _empty(num_experts, size, hidden_size)
        self.down_proj_bias = _empty(num_experts, hidden_size) if bias else None
        self.act = act

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """What the chosen experts give, summed by weight, [num_tokens, hidden_size]; `x` has that shape too.

        experts: the different ones that each token chose, [num_tokens, top_k] int64. weights: [num_tokens, top_k].
        """
        out = torch.zeros_like(x)
        for expert in sorted(set(experts.flatten().tolist())):
            token, choice = torch.where(experts == expert)
            gate_up = _linear(x[token], self.gate_up_proj, self.gate_up_proj_bias, expert)
            rows = _linear(self.act(gate_up), self.down_proj, self.down_proj_bias, expert)
            out.index_add_(0, token, rows * weights[token, choice, None])
        return out


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    return x @ weight[expert] if bias is None else torch.addmm(bias[expert], x, weight[expert])
