"""Linear layers: one projection, or several that share their input merged into one.

Checkpoints keep q, k and v (and gate and up) apart; here their weights are stacked, because one large matrix product
is quicker than three small ones. A merged layer knows which of its rows each checkpoint name fills: `parts`.

On a CPU, a matrix product over few rows spends half of its time bringing the weight into the blocked layout that the
processor's dot products read. So weights are brought into it once, after loading, by oneDNN's operators in torch. Where
a build or a processor has none, or the device is not a CPU, weights stay as they are.

Mirrors `vllm/model_executor/layers/linear.py`, without tensor parallelism and quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

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
        self._packed_linear: Any = None

    def process_weights_after_loading(self) -> None:
        """Repack the weight for the CPU, if that can be done. `weight.to_dense()` then shows it as it was loaded."""
        packed = _pack(self.weight)
        if packed is not None:
            self.weight = nn.Parameter(packed, requires_grad=False)
            self._packed_linear = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, input_size] -> [num_tokens, output_size]
        if self._packed_linear is None:
            return F.linear(x, self.weight, self.bias)
        if torch.compiler.is_compiling():  # the compiler's own view of the operator wants a weight it has packed itself
            return cast(Tensor, torch.ops.minivllm.packed_linear(x, self.weight, self.bias))
        return cast(Tensor, self._packed_linear(x, self.weight, self.bias, "none", [], ""))


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


def _pack(weight: Tensor) -> Tensor | None:
    """A copy in oneDNN's blocked layout, or None where there is no such thing for this dtype, device or build."""
    onednn: Any = torch.backends.mkldnn  # has no annotations
    if weight.device.type != "cpu" or not onednn.is_available():
        return None
    try:
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight))
    except (AttributeError, RuntimeError):
        return None


def _register_op() -> Any:
    make_library: Any = torch.library.Library  # has no annotations
    library = make_library("minivllm", "FRAGMENT")
    library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")

    def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    for key in ("CPU", "MkldnnCPU"):  # the weight's layout counts as a device of its own
        library.impl("packed_linear", packed_linear, key)
    torch.library.register_fake(
        "minivllm::packed_linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), lib=library
    )
    return library


_library = _register_op()  # the op lives as long as this object
