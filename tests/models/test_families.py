"""Float32 logits against Transformers, same weights: every family, and every setting that changes its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import prefill, relative_error, tiny_model, tiny_vllm_config

from minivllm.models.loader import load_hf_config, load_model, resolve_model

LENGTHS = [1, 7, 8, 9, 61]
HALF = 8  # pairs of dimensions in a head of 16
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(HALF)], "long_factor": [1.0 + i for i in range(HALF)],
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 24}),
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama theta and eps": ("llama", {"rope_parameters": {"rope_theta": 500.0}, "rms_norm_eps": 1e-2}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "mistral head_dim": ("mistral", {"head_dim": 8, "sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 untied, biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2 no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 all sliding": ("gemma2", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5}),
    "gemma2 yarn": ("gemma2", {"rope_parameters": {"rope_theta": 1e4} | ROPE["yarn"]}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 biases": ("gemma3_text", {"attention_bias": True, "final_logit_softcapping": 10.0}),
    "gemma3 as it comes": ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None, "rope_parameters": None}),
    "gemma3 all full": ("gemma3_text", {"layer_types": ["full_attention"] * 4}),
    "gemma3 other ropes": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e4} | ROPE["yarn"],
                "sliding_attention": {"rope_theta": 1e3} | ROPE["llama3"],
            }
        },
    ),
} | {f"llama {name}": ("llama", {"rope_parameters": {"rope_theta": 1e4} | kind}) for name, kind in ROPE.items()}


@pytest.mark.parametrize(("arch", "settings"), CASES.values(), ids=CASES.keys())
def test_logits_equal_transformers(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = tiny_model(arch, seed=5, **settings)
    reference.save_pretrained(tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    length = 64 if "longrope" in str(settings) else 256
    vllm_config = tiny_vllm_config(str(tmp_path), hf_config, max_model_len=length)
    model = load_model(vllm_config)
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, 160, (n,), generator=generator) for n in LENGTHS]
    for prompt, logits in zip(prompts, prefill(model, vllm_config, [p.tolist() for p in prompts]), strict=True):
        with torch.no_grad():
            expected = reference(prompt[None], use_cache=False).logits[0]
        assert relative_error(logits, expected) < 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_embeddings_in_place_of_ids(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    vllm_config = tiny_vllm_config(str(tmp_path), load_hf_config(resolve_model(str(tmp_path))))
    model = load_model(vllm_config)
    ids = [3, 1, 4, 1, 5]
    expected = prefill(model, vllm_config, [ids])[0]
    table = model.model.embed_tokens.weight.clone()  # type: ignore[union-attr, operator]
    model.model.embed_tokens.weight.zero_()  # type: ignore[union-attr, operator]
    forward = model.forward
    model.forward = lambda input_ids, positions: forward(input_ids, positions, table[input_ids])
    assert torch.equal(prefill(model, vllm_config, [ids])[0], expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "max_model_len=257 is above 256, where rope_type 'dynamic'"),
        (ROPE["longrope"], "max_model_len=257 is above 64, where rope_type 'longrope'"),
    ],
)
def test_rope_that_depends_on_the_length_is_bounded(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model("llama", rope_parameters={"rope_theta": 1e4} | settings).save_pretrained(tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    with pytest.raises(ValueError, match=message):
        load_model(tiny_vllm_config(str(tmp_path), hf_config, max_model_len=257))


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be at least 1"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer 1 is a sliding"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer 0 is a 'chunked_attention' layer"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not known"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "names 3 layers, but num_hidden_layers is 4"),
        ("gemma3_text", {"sliding_window": 0}, "layer 0 is a sliding_attention layer, but sliding_window is 0"),
        ("gemma3_text", {"layer_types": ["linear_attention"] * 4}, "layer 0 is a 'linear_attention' layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, got 0"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping must be above 0 or null, got 0.0"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "layers.0.self_attn.attn: logits_soft_cap must be above 0"),
    ],
)
def test_what_a_model_cannot_do_is_refused(arch: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model(arch).save_pretrained(tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    for name, value in settings.items():
        setattr(hf_config, name, value)
    with pytest.raises(ValueError, match=message):
        load_model(tiny_vllm_config(str(tmp_path), hf_config))
