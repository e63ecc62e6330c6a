"""GGUF files: their header, the Transformers config they amount to, and their tensors under Transformers' names.

Reading and dequantizing are the `gguf` package's. vLLM reads GGUF with it and Transformers
(`vllm/model_executor/model_loader/gguf_loader.py`) and keeps weights quantized; here they become plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 18  # elements dequantized at once: what stays in the processor's cache is several times quicker

# architecture -> (Transformers' model type, class)
_MODEL_TYPES = {
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has two norms more, and its `ffn_norm` is another.
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_PERIOD = {"gemma2": 2, "gemma3": 6}  # every so many layers one sees everything, where a file does not say
# Layers of the 27B models, whose scores are scaled by hidden_size / heads instead of head_dim; files do not say so.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_ROPE_FACTORS = "rope_freqs.weight"  # llama 3's scaling: what each frequency is divided by


class GGUFFile:
    """The metadata and the tensors of one file, read with `gguf`.

    metadata: values by key; of an array of strings (the vocabulary) only its length. Raises ValueError for a damaged
    file.

    Mirrors: none; vLLM uses `gguf.GGUFReader` itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it starts with {magic!r}")
        stamp = path.stat()
        reader = _reader(path, stamp.st_mtime_ns, stamp.st_size)
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.metadata: dict[str, Any] = {
            key: len(field.data) if gguf.GGUFValueType.STRING in field.types[1:] else field.contents()
            for key, field in reader.fields.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor in float32, dequantized."""
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))  # as torch has it, slowest dimension first
        width = shape[-1]
        data = tensor.data.reshape(-1, tensor.data.shape[-1])
        out = np.empty((len(data), width), np.float32)
        step = max(1, _CHUNK // width)
        try:
            for row in range(0, len(data), step):
                out[row : row + step] = gguf.dequantize(data[row : row + step], tensor.tensor_type).reshape(-1, width)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ValueError(f"tensor {name!r} is stored as {kind}, which gguf cannot dequantize") from error
        return torch.from_numpy(out.reshape(shape))


@lru_cache(maxsize=1)  # config, tokenizer check and weights read the same header, which takes a second
def _reader(path: Path, mtime_ns: int, size: int) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # whatever it stumbles over: it checks little of what it reads
        raise ValueError(
            f"{path} ({size} bytes) cannot be read as GGUF ({type(error).__name__}: {error}): it is cut off or damaged,"
            " fetch it again"
        ) from error


def gguf_config(file: GGUFFile) -> Any:
    """The Transformers config that a file's metadata amounts to."""
    from transformers import AutoConfig

    meta, arch = file.metadata, file.metadata.get("general.architecture")
    if arch not in _MODEL_TYPES:
        raise ValueError(f"{file.path}: GGUF architecture {arch!r} is not known; known are {sorted(_MODEL_TYPES)}")

    def of(key: str, *default: Any) -> Any:
        value = meta.get(f"{arch}.{key}", *default)
        if value is None and not default:
            raise ValueError(f"{file.path}: the metadata lacks {arch}.{key}")
        return value

    heads, hidden = of("attention.head_count"), of("embedding_length")
    fields: dict[str, Any] = {
        "architectures": [_MODEL_TYPES[arch][1]],
        "vocab_size": of("vocab_size", meta.get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("attention.key_length", of("rope.dimension_count", hidden // heads)),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file, of),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    if arch in _GEMMA_PERIOD:
        fields |= _gemma_fields(arch, fields, of)
    return AutoConfig.for_model(_MODEL_TYPES[arch][0], **fields)


def _gemma_fields(arch: str, fields: dict[str, Any], of: Any) -> dict[str, Any]:
    """What Gemma's config has beyond the others', or has in another way."""
    layers, pattern = fields["num_hidden_layers"], of("attention.sliding_window_pattern", _GEMMA_PERIOD[arch])
    sliding = pattern if isinstance(pattern, list) else [(index + 1) % pattern != 0 for index in range(layers)]
    share = fields["hidden_size"] // fields["num_attention_heads"]
    more: dict[str, Any] = {
        "sliding_window": of("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
        "query_pre_attn_scalar": share if layers == _GEMMA_27B[arch] else fields["head_dim"],
        "final_logit_softcapping": of("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
    }
    if arch == "gemma2":
        return more | {"attn_logit_softcapping": of("attn_logit_softcapping", 50.0)}
    local = {"rope_type": "default", "rope_theta": of("rope.freq_base_swa", 10000.0)}
    return more | {"rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local}}


def _rope_parameters(file: GGUFFile, of: Any) -> dict[str, Any]:
    """Rope settings. Frequency factors stored as a tensor are longrope's, with one list for every length."""
    theta, kind = of("rope.freq_base", 10000.0), of("rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        factors = file.read(_ROPE_FACTORS).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": of("context_length"),
        }
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not known; known are none, linear and yarn")
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": of("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = of("rope.scaling.original_context_length")
    return scaling


class GGUFStream:
    """(Transformers name, float32 tensor) of every tensor in a file. source: the file, for messages.

    Mirrors: none; vLLM has the generator gguf_quant_weights_iterator.
    """

    def __init__(self, path: Path, hf_config: Any) -> None:
        self.source = path
        self.hf_config = hf_config

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        file = GGUFFile(self.source)
        arch = file.metadata["general.architecture"]
        permuted, gemma = arch == "llama", arch in _GEMMA_PERIOD
        heads = {"attn_q": self.hf_config.num_attention_heads, "attn_k": self.hf_config.num_key_value_heads}
        for stored in file.tensors:
            if stored == _ROPE_FACTORS:
                continue
            tensor, (name, part) = file.read(stored), _transformers_name(stored, _GEMMA_BLOCK if gemma else _BLOCK)
            if permuted and part in heads:
                tensor = _undo_permutation(tensor, heads[part])
            if gemma and part.endswith("_norm"):
                tensor -= 1.0  # stored as the factor itself
            yield name, tensor
        _reader.cache_clear()  # its views of every string of the vocabulary take 200 MB


def _transformers_name(stored: str, block: dict[str, str]) -> tuple[str, str]:
    """ "blk.0.attn_q.weight" -> ("model.layers.0.self_attn.q_proj.weight", "attn_q")."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    layer, part, suffix = match.groups() if match else (None, "", "")
    if layer is None and part in _TOP:
        return f"{_TOP[part]}.{suffix}", part
    if layer is not None and part in block:
        return f"model.layers.{layer}.{block[part]}.{suffix}", part
    raise ValueError(f"tensor {stored!r} has no counterpart in the models that can be read from GGUF")


def _undo_permutation(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each head of q and k; set them apart again."""
    interleaved = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return interleaved.transpose(1, 2).reshape(tensor.shape)
