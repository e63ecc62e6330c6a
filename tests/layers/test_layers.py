"""Each layer against plain formulas or Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.layers.activation import get_act_and_mul
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.linear import MergedLinear, ReplicatedLinear, checkpoint_targets
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import apply_rotary, get_rope
from minivllm.models.gemma2 import GemmaRMSNorm

CPU = torch.device("cpu")


def filled(module: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    return module


@pytest.mark.parametrize("eps", [1e-6, 1e-1])
@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 48), (0, 48)])
@pytest.mark.parametrize("factor", [0.0, 1e-4, 3.0, 1e4])
def test_rms_norm(shape: tuple[int, ...], eps: float, factor: float) -> None:
    ours, theirs = filled(RMSNorm(48, eps)), LlamaRMSNorm(48, eps)
    theirs.weight.data.copy_(ours.weight)
    x = factor * torch.randn(shape)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    ours.process_weights_after_loading()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemma_norm_adds_one_to_its_weight(dtype: torch.dtype) -> None:
    """In float32, whatever the dtype: in bfloat16 a weight of 0.003 beside 1 would be lost."""
    ours, theirs = filled(GemmaRMSNorm(48)).to(dtype), Gemma3RMSNorm(48).to(dtype)
    ours.weight.data.mul_(0.003)
    theirs.weight.data.copy_(ours.weight)
    x = torch.randn(500, 48).to(dtype)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for _ in range(2):
        torch.testing.assert_close(ours(x).float(), theirs(x).float(), rtol=rounding, atol=1e-6)
        bare = F.rms_norm(x.float(), (48,), None, 1e-6)
        assert ((ours(x).float() / bare).mean(0) - 1 - ours.weight.float()).abs().max() < 5e-4
        ours.process_weights_after_loading()


def test_scaled_embedding() -> None:
    """The factor is rounded to the table's dtype first: 55.43 is 55.5 in bfloat16."""
    torch.manual_seed(0)
    weight = torch.randn(9, 4)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        table = VocabEmbedding(9, 4, 3072**0.5)
    finally:
        torch.set_default_dtype(dtype)
    table.weight.data.copy_(weight)
    assert torch.equal(table(torch.tensor([3, 1])), weight.bfloat16()[[3, 1]] * 55.5)
    assert torch.equal(table.weight, weight.bfloat16())


def test_rms_norm_in_bfloat16_sums_in_float32() -> None:
    """Squares of 300 summed in bfloat16 would be lost beyond the first few; and one rounding is better than two."""
    exact = filled(RMSNorm(2048))
    x = torch.full((1, 2048), 300.0)
    x[0, ::3] = -1.0
    ours, theirs = RMSNorm(2048).bfloat16(), LlamaRMSNorm(2048).bfloat16()
    for module in (ours, theirs):
        module.weight.data.copy_(exact.weight)
    ours.process_weights_after_loading()
    wanted = F.rms_norm(x, (2048,), ours.weight.float(), 1e-6)
    errors = [(module(x.bfloat16()).float() - wanted).abs() / wanted.abs() for module in (ours, theirs)]
    assert errors[0].max() < 2**-7
    assert errors[0].mean() <= errors[1].mean()


@pytest.mark.parametrize(("hidden_act", "reference"), [
    ("silu", F.silu), ("gelu", F.gelu), ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
])  # fmt: skip
def test_gated_activations(hidden_act: str, reference: Any) -> None:
    gate, up = torch.randn(4, 10), torch.randn(4, 10)
    merged = torch.cat((gate, up), -1)
    kept = merged.clone()
    torch.testing.assert_close(get_act_and_mul(hidden_act)(merged), reference(gate) * up)
    assert torch.equal(merged, kept)


def test_rotary_equals_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096)
    rope = get_rope(config, head_size=16, max_position=4096, dtype=torch.float32, device=CPU)
    positions = torch.tensor([0, 1, 7, 4095, 2048])
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1), k.transpose(0, 1), cos[0], sin[0], unsqueeze_dim=0)
    ours = apply_rotary(torch.cat((q, k), 1), *rope(positions))
    torch.testing.assert_close(ours[:, :4], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[:, 4:], expected[1].transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_rotary_depends_on_distance_only() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=1)
    rope = get_rope(config, head_size=32, max_position=512, dtype=torch.float32, device=CPU)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(at: int, other: int) -> Tensor:
        return (apply_rotary(q, *rope(torch.tensor([at]))) * apply_rotary(k, *rope(torch.tensor([other])))).sum()

    torch.testing.assert_close(score(20, 3), score(417, 400), rtol=1e-4, atol=1e-4)


def test_partial_rotary_leaves_the_rest() -> None:
    cos, sin = torch.rand(3, 1, 8), torch.rand(3, 1, 8)
    x = torch.randn(3, 2, 12)
    turned = apply_rotary(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], apply_rotary(x[..., :8].contiguous(), cos, sin))


def test_position_beyond_the_table_is_an_error() -> None:
    rope = get_rope(LlamaConfig(), head_size=16, max_position=32, dtype=torch.float32, device=CPU)
    with pytest.raises(IndexError):
        rope(torch.tensor([32]))


def test_unknown_rope_type() -> None:
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"rope_type 'spiral' is not known; known are \['default', .*'yarn'\]"):
        get_rope(config, head_size=16, max_position=32, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_compute_the_same(dtype: torch.dtype, bias: bool) -> None:
    layer = filled(ReplicatedLinear(40, 24, bias)).to(dtype)
    weight = layer.weight.clone()
    inputs = [torch.randn(rows, 80, dtype=dtype)[:, ::2] for rows in (0, 1, 7, 33)]
    expected = [layer(x) for x in inputs]
    layer.process_weights_after_loading()
    for x, wanted in zip(inputs, expected, strict=True):
        torch.testing.assert_close(layer(x), wanted)
    shown = layer.weight.to_dense() if layer.weight.is_mkldnn else layer.weight
    assert torch.equal(shown, weight)
    assert layer.weight.shape == (24, 40)


def test_without_onednn_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    layer = filled(ReplicatedLinear(8, 4, bias=True))
    kept = layer.weight
    layer.process_weights_after_loading()
    assert layer.weight is kept
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), x @ kept.T + layer.bias)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_packed_layer_compiles_whole(backend: str) -> None:
    layer = filled(ReplicatedLinear(16, 8, bias=True))
    layer.process_weights_after_loading()
    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))


def test_merged_layer_names_its_rows() -> None:
    block = nn.Module()
    block.qkv_proj = MergedLinear(6, {"q_proj": 4, "k_proj": 2, "v_proj": 2}, bias=True)
    block.norm = RMSNorm(6)
    model = nn.Module()
    model.block = block
    targets = dict(checkpoint_targets(model))
    assert {name: tuple(target.shape) for name, target in targets.items()} == {
        "block.q_proj.weight": (4, 6), "block.k_proj.weight": (2, 6), "block.v_proj.weight": (2, 6),
        "block.q_proj.bias": (4,), "block.k_proj.bias": (2,), "block.v_proj.bias": (2,), "block.norm.weight": (6,),
    }  # fmt: skip
    for index, target in enumerate(targets.values()):
        target.fill_(index)
    assert block.qkv_proj.weight[:, 0].tolist() == [0.0] * 4 + [1.0] * 2 + [2.0] * 2
    assert block.qkv_proj.bias.tolist() == [3.0] * 4 + [4.0] * 2 + [5.0] * 2


def test_tied_head_reads_the_embedding() -> None:
    model = nn.Module()
    model.embed_tokens = filled(VocabEmbedding(11, 6))
    model.lm_head = LMHead(6, 11)
    model.lm_head.tie_weights(model.embed_tokens)
    assert [name for name, _ in checkpoint_targets(model)] == ["embed_tokens.weight"]
    hidden = model.embed_tokens(torch.tensor([3, 10, 3], dtype=torch.int32))
    assert torch.equal(hidden, model.embed_tokens.weight[[3, 10, 3]])
    expected = hidden @ model.embed_tokens.weight.T
    model.lm_head.process_weights_after_loading()
    torch.testing.assert_close(model.lm_head(hidden), expected)
    assert not model.embed_tokens.weight.is_mkldnn
