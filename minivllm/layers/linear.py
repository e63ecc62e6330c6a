"""Linear layers: one projection, or several that share their input merged into one.

Checkpoints keep q, k and v (and gate and up) apart; here their weights are stacked, because one large matrix product
is quicker than three small ones. A merged layer knows which of its rows each checkpoint name fills: `parts`.

Mirrors `vllm/model_executor/layers/linear.py`, without tensor parallelism and quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ReplicatedLinear(nn.Module):
    """y = x W^T + b. The weight is left unfilled: it comes from a checkpoint.

    Mirrors: vllm/model_executor/layers/linear.py ReplicatedLinear.
    Leaves out: tensor-parallel column and row layers, quantization methods, the returned bias.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, input_size] -> [num_tokens, output_size]
        return F.linear(x, self.weight, self.bias)


class MergedLinear(ReplicatedLinear):
    """Several projections of one input, stacked. `parts`: checkpoint name of each -> its number of rows.

    Mirrors: vllm/model_executor/layers/linear.py MergedColumnParallelLinear and QKVParallelLinear.
    Leaves out: tensor parallelism, replicated KV heads.
    """

    def __init__(self, input_size: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(input_size, sum(parts.values()), bias)
        self.parts = dict(parts)


def checkpoint_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name that a checkpoint must bring, with the memory that it fills (a view of a parameter).

    A parameter shared by two layers is named once, by the layer that comes first.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            if isinstance(module, MergedLinear):
                parent = prefix.rpartition(".")[0]
                for part, rows in zip(module.parts, param.data.split(list(module.parts.values())), strict=True):
                    yield f"{parent}.{part}.{name}", rows
            else:
                yield f"{prefix}.{name}", param.data
