"""Gemma 3n, its text part: four residual streams of which a layer computes one, and a suffix of layers without K and V.

AltUp predicts all streams from small matrices and corrects them by what the active one became; LAuReL is a low-rank
second residual; every layer gets an embedding of its own for each token. The last `num_kv_shared_layers` layers
project no K and V: they read the pages of the last layer of their kind before them, so half the model has no cache.
Mirrors `vllm/model_executor/models/gemma3n.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from minivllm.attention.layer import Attention
from minivllm.config import VllmConfig
from minivllm.layers.activation import get_act_and_mul
from minivllm.layers.embedding import VocabEmbedding
from minivllm.layers.linear import MergedLinear, ReplicatedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import apply_rotary
from minivllm.models.gemma2 import Gemma2ForCausalLM
from minivllm.models.llama import AttentionOptions, LlamaMLP, LlamaModel, Rope, layer_window

_UNUSED = tuple(f"self_attn.{part}" for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight"))


def kv_sharing_target(hf_config: Any, layer_idx: int) -> int | None:
    """The layer whose K and V this one reads: the last of its kind before the sharing suffix. None outside of it.

    Raises ValueError if `num_kv_shared_layers` leaves no layer of that kind.
    """
    kinds, shared = list(hf_config.layer_types), hf_config.num_kv_shared_layers
    if not 0 <= shared < hf_config.num_hidden_layers:
        raise ValueError(
            f"num_kv_shared_layers must be 0 to {hf_config.num_hidden_layers - 1}, one below num_hidden_layers, got"
            f" {shared}"
        )
    first = hf_config.num_hidden_layers - shared
    if layer_idx < first:
        return None
    writers = [index for index in range(first) if kinds[index] == kinds[layer_idx]]
    if not writers:
        raise ValueError(
            f"layer {layer_idx} is a {kinds[layer_idx]} layer that shares K and V, but none of the first {first} layers"
            f" is of that kind: lower num_kv_shared_layers from {shared}"
        )
    return writers[-1]


class Gemma3nAttention(nn.Module):
    """Normed q, k and v, and scores without a scale. A layer of the sharing suffix projects q alone.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nAttention.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        hidden_size, self.eps, bias = hf_config.hidden_size, hf_config.rms_norm_eps, options.qkv_bias
        heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        self.head_size = hf_config.head_dim
        q_size, kv_size = heads * self.head_size, kv_heads * self.head_size
        self.sizes = (q_size, kv_size, kv_size)
        stem, index, _ = prefix.rsplit(".", 2)
        target = kv_sharing_target(hf_config, int(index))
        self.q_norm = RMSNorm(self.head_size, self.eps)
        if target is None:
            parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
            self.qkv_proj = MergedLinear(hidden_size, parts, bias)
            self.k_norm = RMSNorm(self.head_size, self.eps)
        else:
            self.q_proj = ReplicatedLinear(hidden_size, q_size, bias)
        self.o_proj = ReplicatedLinear(q_size, hidden_size, options.output_bias)
        self.attn = Attention(
            heads,
            self.head_size,
            1.0,
            kv_heads,
            vllm_config=vllm_config,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=options.sliding_window,
            kv_sharing_target_layer_name=None if target is None else f"{stem}.{target}.self_attn.attn",
        )

    def forward(self, hidden: Tensor, rope: Rope) -> Tensor:  # [num_tokens, hidden_size] -> the same
        if self.attn.kv_sharing_target_layer_name is not None:
            q = apply_rotary(self.q_norm(self.heads(self.q_proj(hidden))), *rope[:2])
            return cast(Tensor, self.o_proj(self.attn(q, None, None)))
        q, k, v = (self.heads(part) for part in self.qkv_proj(hidden).split(self.sizes, dim=-1))
        q, k = apply_rotary(self.q_norm(q), *rope[:2]), apply_rotary(self.k_norm(k), *rope[:2])
        v = F.rms_norm(v.float(), (self.head_size,), eps=self.eps).to(v.dtype)
        return cast(Tensor, self.o_proj(self.attn(q, k, v)))

    def heads(self, x: Tensor) -> Tensor:  # [num_tokens, n * head_size] -> [num_tokens, n, head_size]
        return x.view(len(x), -1, self.head_size)


class Gemma3nMLP(LlamaMLP):
    """Gated MLP in which only the highest share of each token's gates stays open.

    sparsity: the share that is closed, were the gates normally distributed: all below mean + icdf(sparsity) * std.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nMLP.
    """

    def __init__(self, hf_config: Any, size: int, sparsity: float) -> None:
        super().__init__(hf_config, size)
        if not 0.0 <= sparsity < 1.0:
            raise ValueError(f"activation_sparsity_pattern must hold shares from 0 to below 1, got {sparsity}")
        quantile = torch.special.ndtri(torch.tensor(sparsity, dtype=torch.float32, device="cpu"))
        self.deviations = float(quantile) if sparsity else None

    @override
    def forward(self, hidden: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        gate_up = self.gate_up_proj(hidden)
        if self.deviations is not None:
            gate = gate_up.chunk(2, dim=-1)[0]
            std, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
            gate.sub_(mean + std * self.deviations).relu_()
        return cast(Tensor, self.down_proj(self.act_fn(gate_up)))


class Gemma3nAltUp(nn.Module):
    """All streams from all before a layer, and all again from what the layer made of the active one.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nAltUp.
    Leaves out: clipping of the coefficients, which belongs to training.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.active, n = hf_config.altup_active_idx, hf_config.altup_num_inputs
        if not 0 <= self.active < n:
            raise ValueError(f"altup_active_idx must be 0 to {n - 1}, below altup_num_inputs, got {self.active}")
        self.scaled = hf_config.altup_correct_scale
        self.correct_output_scale = nn.Parameter(torch.empty(hf_config.hidden_size), requires_grad=False)
        self.correction_coefs = ReplicatedLinear(n, n)
        self.prediction_coefs = ReplicatedLinear(n, n * n)
        self.modality_router = ReplicatedLinear(hf_config.hidden_size, n)
        self.router_norm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)

    def route(self, x: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, n]
        """How much of each stream's kind a token is."""
        scores: Tensor = self.modality_router(self.router_norm(x) / x.shape[-1])
        return torch.tanh(scores.float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:  # [n, num_tokens, hidden_size] -> the same
        """Each stream plus its token's own mix of all."""
        n = len(streams)
        mix = self.prediction_coefs(self.route(streams[self.active])).view(-1, n, n)  # [num_tokens, to, from]
        return torch.einsum("tij,jth->ith", mix, streams).add_(streams)

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """Streams [n, num_tokens, hidden_size], given what the active one became, [num_tokens, hidden_size]."""
        coefs: Tensor = self.correction_coefs(self.route(activated)) + 1.0  # [num_tokens, n]
        return predicted + (activated - predicted[self.active]) * coefs.t()[:, :, None]

    def active_of(self, streams: Tensor) -> Tensor:  # [n, num_tokens, hidden_size] -> [num_tokens, hidden_size]
        """The active stream, by the learned scale."""
        active = streams[self.active]
        return active.mul(self.correct_output_scale) if self.scaled else active


class Gemma3nLaurel(nn.Module):
    """A residual of low rank.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nLaurelBlock.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__()
        self.linear_left = ReplicatedLinear(hf_config.hidden_size, hf_config.laurel_rank)
        self.linear_right = ReplicatedLinear(hf_config.laurel_rank, hf_config.hidden_size)
        self.post_laurel_norm = RMSNorm(hf_config.hidden_size, hf_config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:  # [num_tokens, hidden_size] -> the same
        return x + cast(Tensor, self.post_laurel_norm(self.linear_right(self.linear_left(x))))


class Gemma3nDecoderLayer(nn.Module):
    """Attention beside LAuReL, then the MLP, on the active stream; the others are corrected and get the layer's input.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nDecoderLayer.
    """

    def __init__(self, hf_config: Any, options: AttentionOptions, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        index, hidden_size, size = int(prefix.rpartition(".")[2]), hf_config.hidden_size, _per_layer_size(hf_config)
        self.self_attn = Gemma3nAttention(hf_config, options, vllm_config=vllm_config, prefix=f"{prefix}.self_attn")
        sparsity = hf_config.activation_sparsity_pattern[index]
        self.mlp = Gemma3nMLP(hf_config, hf_config.intermediate_size[index], sparsity)
        self.altup, self.laurel = Gemma3nAltUp(hf_config), Gemma3nLaurel(hf_config)
        self.per_layer_input_gate = ReplicatedLinear(hidden_size, size)
        self.per_layer_projection = ReplicatedLinear(size, hidden_size)
        self.act_fn = get_act_and_mul(hf_config.hidden_activation)
        self.input_layernorm = RMSNorm(hidden_size, hf_config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, hf_config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, hf_config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, hf_config.rms_norm_eps)
        self.post_per_layer_input_norm = RMSNorm(hidden_size, hf_config.rms_norm_eps)

    def forward(
        self,
        streams: Tensor,  # [altup_num_inputs, num_tokens, hidden_size]
        rope: Rope,
        layer_input: Tensor,  # [num_tokens, hidden_size_per_layer_input]
    ) -> Tensor:  # as streams
        predicted = self.altup.predict(streams)
        active = predicted[self.altup.active]
        normed = self.input_layernorm(active)
        attended = active + self.post_attention_layernorm(self.self_attn(normed, rope))
        hidden = (attended + self.laurel(normed)) / 2**0.5
        hidden = hidden + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)))
        streams = self.altup.correct(predicted, hidden)
        gate = self.per_layer_input_gate(self.altup.active_of(streams))
        gated = self.act_fn(torch.cat((gate, layer_input), dim=-1))
        streams[1:] += self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return streams


class Gemma3nModel(LlamaModel):
    """Streams out of the embedding, the layers with their inputs, and the mean of the streams.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nTextModel.
    Leaves out: images, audio.
    """

    layer_cls: type[nn.Module] = Gemma3nDecoderLayer

    def __init__(self, options: list[AttentionOptions], *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(options, vllm_config=vllm_config, prefix=prefix)
        hf_config = vllm_config.model_config.hf_config
        hidden_size, self.layer_size = hf_config.hidden_size, _per_layer_size(hf_config)
        width = hf_config.num_hidden_layers * self.layer_size
        rows = hf_config.vocab_size_per_layer_input
        self.embed_tokens_per_layer = VocabEmbedding(rows, width, self.layer_size**0.5)
        self.per_layer_model_projection = ReplicatedLinear(hidden_size, width)
        self.per_layer_projection_norm = RMSNorm(self.layer_size, hf_config.rms_norm_eps)
        more = range(1, hf_config.altup_num_inputs)
        self.altup_projections = nn.ModuleList(ReplicatedLinear(hidden_size, hidden_size) for _ in more)
        self.altup_unembed_projections = nn.ModuleList(ReplicatedLinear(hidden_size, hidden_size) for _ in more)

    @staticmethod
    @override
    def embed_scale(hf_config: Any) -> float:
        return float(hf_config.hidden_size**0.5)

    @override
    def forward(
        self,
        input_ids: Tensor,  # [num_tokens] int32 or int64
        positions: Tensor,  # [num_tokens] int64
        inputs_embeds: Tensor | None = None,  # [num_tokens, hidden_size]; then layers get no embedding of the token
    ) -> Tensor:  # [num_tokens, hidden_size]
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        layer_inputs = self.layer_inputs(hidden, input_ids if inputs_embeds is None else None)
        ropes = [each(positions) for each in self.rotary_embs]
        projected = [_as_large_as(hidden, project(hidden)) for project in self.altup_projections]
        streams = torch.stack([hidden, *projected])
        for index, (layer, rope) in enumerate(zip(self.layers, self.rope_index, strict=True)):
            streams = layer(streams, ropes[rope], layer_inputs[:, index])
        first, others = streams[0], zip(self.altup_unembed_projections, streams[1:], strict=True)
        merged = torch.stack([first, *(_as_large_as(first, project(each)) for project, each in others)])
        return cast(Tensor, self.norm(merged.mean(0)))

    def layer_inputs(self, hidden: Tensor, input_ids: Tensor | None) -> Tensor:
        """What each layer gets of each token, [num_tokens, num_layers, hidden_size_per_layer_input]."""
        shape = (len(hidden), -1, self.layer_size)
        projected = self.per_layer_model_projection(hidden) * hidden.shape[-1] ** -0.5
        projected = self.per_layer_projection_norm(projected.view(shape))
        if input_ids is None:
            return cast(Tensor, projected)
        # Ids beyond the smaller table are of images and sound: they get row 0.
        known = torch.where(input_ids < len(self.embed_tokens_per_layer.weight), input_ids, 0)
        return cast(Tensor, (projected + self.embed_tokens_per_layer(known).view(shape)) * 2**-0.5)


class Gemma3nForCausalLM(Gemma2ForCausalLM):
    """Gemma 3n's text model with its output projection, the logits softly capped.

    Mirrors: vllm/model_executor/models/gemma3n.py Gemma3nForCausalLM.
    Leaves out: images, audio, the fast prefill of the sharing suffix.
    """

    model_cls: type[LlamaModel] = Gemma3nModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.num_kv_shared_layers: int = vllm_config.model_config.hf_config.num_kv_shared_layers

    @staticmethod
    @override
    def attention_options(hf_config: Any, layer_idx: int) -> AttentionOptions:
        window = layer_window(hf_config, layer_idx)
        bias = hf_config.attention_bias
        return AttentionOptions(qkv_bias=bias, output_bias=bias, sliding_window=window, norm=RMSNorm)

    @override
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter; K and V projections that a checkpoint brings for sharing layers are passed over."""
        last = len(self.model.layers)
        suffix = range(last - self.num_kv_shared_layers, last)
        readers = {f"model.layers.{index}.{part}" for index in suffix for part in _UNUSED}
        super().load_weights((name, tensor) for name, tensor in weights if name not in readers)


def _per_layer_size(hf_config: Any) -> int:
    return int(hf_config.hidden_size_per_layer_input)


def _as_large_as(model: Tensor, x: Tensor) -> Tensor:  # both [num_tokens, hidden_size]
    """x, each row scaled to the root mean square of the model's row."""
    size, own = (each.float().square().mean(-1, keepdim=True) for each in (model, x))
    return (x * size.sqrt() / own.clamp(min=1e-5).sqrt()).to(x.dtype)
