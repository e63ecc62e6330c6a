"""Gated activations of the MLP, on the output of a merged gate and up projection.

Mirrors `vllm/model_executor/layers/activation.py`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SiluAndMul(nn.Module):
    """silu(gate) * up.

    Mirrors: vllm/model_executor/layers/activation.py SiluAndMul.
    """

    def forward(self, gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class GeluAndMul(nn.Module):
    """gelu(gate) * up, with the tanh approximation or the exact function.

    Mirrors: vllm/model_executor/layers/activation.py GeluAndMul.
    """

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate=self.approximate).mul_(up)


def get_act_and_mul(hidden_act: str) -> nn.Module:
    """The gated form of the activation that a config's `hidden_act` names."""
    if hidden_act in ("silu", "swish"):
        return SiluAndMul()
    if hidden_act in ("gelu", "gelu_pytorch_tanh"):
        return GeluAndMul("none" if hidden_act == "gelu" else "tanh")
    raise ValueError(f"hidden_act {hidden_act!r} is not known; known are silu, swish, gelu and gelu_pytorch_tanh")
