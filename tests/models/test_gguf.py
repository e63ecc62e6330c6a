"""GGUF files: written here with the gguf package, read by ours; and SmolLM2's real one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models.tiny import prefill, relative_error, tiny_model, tiny_vllm_config
from torch import Tensor

from minivllm.models.gguf import GGUFFile, GGUFStream
from minivllm.models.loader import load_hf_config, load_model, load_tokenizer, resolve_max_model_len, resolve_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LOCAL_THETA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """A Transformers model as a GGUF file, its tensors named by the gguf package's own map. `kinds`: part -> how it is
    stored. `extra`: metadata to add."""
    config = model.config
    arch = config.model_type.removesuffix("_text")
    ropes = config.rope_parameters
    rope = ropes["full_attention"] if arch == "gemma3" else ropes
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        plain = 1.0 / 1e4 ** (torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled)))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(key, value)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        part = stored.split(".")[-2]
        if arch == "llama" and part in heads:
            tensor = interleave(tensor, heads[part])
        if arch.startswith("gemma") and part.endswith("_norm"):
            tensor = tensor + 1
        kind = (kinds or {}).get(part, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(stored, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> tuple[torch.nn.Module, Any]:
    vllm_config = tiny_vllm_config(str(path), load_hf_config(resolve_model(str(path))))
    return load_model(vllm_config), vllm_config


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": {"rope_theta": 500.0}}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 32} | LOCAL_THETA),
    ],
    ids=["llama", "tied", "biases", "llama3 factors", "yarn", "qwen2", "qwen3", "gemma2", "gemma3"],
)
def test_logits_equal_transformers(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = tiny_model(arch, seed=6, **settings)
    model, vllm_config = load(write_gguf(tmp_path / "m.gguf", reference))
    prompt = list(range(3, 60))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    assert relative_error(prefill(model, vllm_config, [prompt])[0], expected) < 1e-4


def test_what_gemma_files_may_say_and_what_follows_from_the_size(tmp_path: Path) -> None:
    """A pattern of layers and a local theta may be stored; the 27B's other scale is known by its number of layers."""
    reference = tiny_model("gemma3_text", num_hidden_layers=62, layer_types=None, hidden_size=8, intermediate_size=8)
    sliding = [index % 5 != 0 for index in range(62)]
    extra = {"gemma3.attention.sliding_window_pattern": sliding, "gemma3.rope.freq_base_swa": 77.0}
    config = load_hf_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", reference, extra=extra))))
    assert [kind == "sliding_attention" for kind in config.layer_types] == sliding
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 77.0
    assert config.query_pre_attn_scalar == 8 // 4


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(resolve_model(str(write_gguf(tmp_path / "m.gguf", tiny_model("llama"))))) is None


def test_config_from_metadata(tmp_path: Path) -> None:
    reference = tiny_model("qwen3")
    config = load_hf_config(resolve_model(str(write_gguf(tmp_path / "m.gguf", reference))))
    assert config.architectures == ["Qwen3ForCausalLM"]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "eos_token_id",
    ):
        assert getattr(config, name) == getattr(reference.config, name), name
    assert config.rms_norm_eps == pytest.approx(reference.config.rms_norm_eps)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_dequantized_in_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType[kind]
    reference = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", reference, {"ffn_down": kind, "token_embd": kind})
    monkeypatch.setattr("minivllm.models.gguf._CHUNK", 200)  # rows that divide nothing evenly
    file = GGUFFile(path)
    stored = gguf.GGUFReader(path)
    for tensor in stored.tensors:
        whole = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        assert np.array_equal(file.read(tensor.name).numpy(), whole), tensor.name


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(
        ValueError, match=r"cannot load .*m.gguf: weight 'model.layers.9.mlp.up_proj.weight' .* no place"
    ):
        load(path)
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xy.weight"))
    with pytest.raises(ValueError, match=r"cannot load .*m.gguf: tensor 'blk.1.ffn_xy.weight' has no counterpart"):
        load(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    data = path.read_bytes()
    header = GGUFFile(path).tensors["token_embd.weight"].data_offset
    for keep in [0, 3, 10, 24, 25, 60, 200, header // 2, header - 200, header + 10, len(data) // 2, len(data) - 40]:
        path.write_bytes(data[:keep])
        with pytest.raises(ValueError, match=r"m\.gguf") as error:
            load(path)
        assert "fetch it again" in str(error.value) or "not a GGUF" in str(error.value), str(error.value)


def test_random_damage_of_the_header_is_an_error_or_harmless(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        for at in rng.integers(4, 900, 4):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except ValueError:
            refused += 1
    assert refused > 20


def test_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"m.gguf is not a GGUF file: it starts with b'PK"):
        load_hf_config(resolve_model(str(path)))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match=r"m\.gguf .* version 1 which we cannot handle"):
        load_hf_config(resolve_model(str(path)))


def test_unknown_architecture_and_scaling(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes().replace(b"llama", b"lama2"))
    with pytest.raises(
        ValueError, match=r"GGUF architecture 'lama2' is not known; known are \['gemma2', 'gemma3', 'llama', 'q"
    ):
        load_hf_config(resolve_model(str(path)))
    path = write_gguf(tmp_path / "s.gguf", tiny_model("llama"), extra={"llama.rope.scaling.type": "su"})
    with pytest.raises(ValueError, match="rope scaling 'su' is not known"):
        load_hf_config(resolve_model(str(path)))


def test_unknown_quantization(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    file, name = GGUFFile(path), b"blk.0.ffn_gate.weight"
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 16  # past the count of dimensions and two of them
    for kind, message in (
        (200, r"200\) is not a valid GGMLQuantizationType"),
        (24, r"tensor 'blk\.0\.ffn_gate\.weight' is stored as I8, which gguf cannot dequantize"),
    ):
        data[at : at + 4] = struct.pack("<I", kind)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"m\.gguf.*{message}"):
            load(path)
    assert file.tensors[name.decode()].tensor_type == 0


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2's config, ours in float32, and Transformers' filled from the same dequantized tensors."""
    from transformers import LlamaForCausalLM

    files = resolve_model("smollm2-135m")
    hf_config = load_hf_config(files)
    vllm_config = tiny_vllm_config("smollm2-135m", hf_config, block_size=16, max_model_len=512)
    model = load_model(vllm_config)
    with torch.device("meta"):
        reference = LlamaForCausalLM(hf_config).eval()
    weights = dict(GGUFStream(files.path, hf_config))
    reference.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(hf_config)
    return model, vllm_config, reference, load_tokenizer(files)


def test_smollm2_is_what_it_is(smollm2: Any) -> None:
    model, vllm_config, _, tokenizer = smollm2
    config = vllm_config.model_config.hf_config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert config.tie_word_embeddings
    head = model.lm_head.weight
    assert torch.equal(head.to_dense() if head.is_mkldnn else head, model.model.embed_tokens.weight)
    assert resolve_max_model_len(config) == 8192
    assert (tokenizer.eos_token_id, config.eos_token_id) == (2, 2)
    assert tokenizer.decode(tokenizer("Grüße, 世界! 🙂").input_ids) == "Grüße, 世界! 🙂"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).endswith("Hi<|im_end|>\n")


def test_smollm2_logits_equal_transformers(smollm2: Any) -> None:
    model, vllm_config, reference, tokenizer = smollm2
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "Water boils at",
    ]
    prompts = [tokenizer(text).input_ids for text in texts] + [[1]]
    for prompt, logits in zip(prompts, prefill(model, vllm_config, prompts), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
        assert relative_error(logits, expected) < 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    first = prefill(model, vllm_config, prompts[:1])[0][-1].argmax()
    assert tokenizer.decode([int(first)]) == " Paris"
