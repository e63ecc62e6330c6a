"""Rotary position embedding: each pair of dimensions of a head turns by an angle that grows with the position.

The frequencies come from Transformers' own functions, one a scaling kind, so that every kind it knows is right here
too. cos and sin are tabulated once for every position; a step looks its rows up once, for all layers.

Mirrors `vllm/model_executor/layers/rotary_embedding/`, without multimodal positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """The table of cos and sin, and the rows of it for a step's positions.

    Mirrors: vllm/model_executor/layers/rotary_embedding/base.py RotaryEmbedding.
    Leaves out: multimodal sections.

    inv_freq: [rotary_dim / 2] float32, radians a position. scaling: a factor on cos and sin (yarn, longrope).
    """

    cos_sin_cache: Tensor  # [max_position, 2, 1, rotary_dim]

    def __init__(self, inv_freq: Tensor, scaling: float, max_position: int, dtype: torch.dtype) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device=inv_freq.device), inv_freq)
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        # The first half of a head is turned with minus sin: the sign is stored, so that a rotation is three operations.
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).unsqueeze(2)
        self.register_buffer("cos_sin_cache", table.to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # [num_tokens] -> 2 x [num_tokens, 1, rotary_dim]
        cos, sin = self.cos_sin_cache.index_select(0, positions).unbind(1)
        return cos, sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the heads of `x`: [num_tokens, num_heads, head_size], of which the first rotary_dim dimensions turn."""
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = apply_rotary(x[..., :rotary_dim], cos, sin)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), sin)


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same for models whose pairs are neighbours, (0, 1), (2, 3) and so on, in all of head_size."""
    apart = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)  # first members, then second ones
    return apply_rotary(apart, cos, sin).view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def rope_parameters(hf_config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The config's rope settings, of one layer type where it keeps several."""
    parameters = hf_config.rope_parameters
    return dict(parameters if layer_type is None else parameters[layer_type])


def rope_layer_types(hf_config: Any) -> list[str]:
    """The layer types that have rope settings of their own; none where all layers share one setting."""
    return sorted(set(getattr(hf_config, "layer_types", None) or ()) & set(hf_config.rope_parameters))


def rope_max_length(hf_config: Any, layer_type: str | None = None) -> int:
    """The longest sequence, in tokens, for which the config's rope is meant and can be right in a paged cache.

    "dynamic" and "longrope" choose their frequencies by the length a sequence has now. Keys in the cache were turned
    with the frequencies of an earlier length, so lengths that would change the choice are out of bounds.
    """
    if layer_type is None and (kinds := rope_layer_types(hf_config)):
        return min(rope_max_length(hf_config, kind) for kind in kinds)
    parameters, longest = rope_parameters(hf_config, layer_type), int(hf_config.max_position_embeddings)
    kind = parameters.get("rope_type", "default")
    if kind == "linear":
        return int(longest * parameters["factor"])
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings") or longest
        return max(longest, int(original * (parameters.get("factor") or 1.0)))
    if kind == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
        return int(parameters["original_max_position_embeddings"])
    return longest


def get_rope(
    hf_config: Any,
    *,
    head_size: int,
    max_position: int,
    dtype: torch.dtype,
    device: torch.device,
    layer_type: str | None = None,
) -> RotaryEmbedding:
    """The rotary embedding that a Transformers config asks for. max_position: the longest sequence, in tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = rope_parameters(hf_config, layer_type)
    kind = parameters.get("rope_type", "default")
    if kind in ("dynamic", "longrope") and max_position > (limit := rope_max_length(hf_config, layer_type)):
        raise ValueError(
            f"max_model_len={max_position} is above {limit}, where rope_type {kind!r} changes its frequencies with the"
            f" length of the sequence: cached keys would be wrong. Set max_model_len to {limit} or less"
        )
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
        return RotaryEmbedding(1.0 / parameters["rope_theta"] ** exponents, 1.0, max_position, dtype)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {kind!r} is not known; known are {['default', *sorted(ROPE_INIT_FUNCTIONS)]}")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, device, layer_type=layer_type)
    return RotaryEmbedding(inv_freq.float(), scaling, max_position, dtype)
