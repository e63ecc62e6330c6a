"""GGUF files: their header, the Transformers config they amount to, and their tensors under Transformers' names.

The header is read here rather than with `gguf.GGUFReader`, which makes several numpy views of each of a vocabulary's
strings and so takes seconds; dequantizing is `gguf`'s. vLLM reads GGUF with `gguf` and Transformers
(`vllm/model_executor/model_loader/gguf_loader.py`) and keeps weights quantized; here they become plain tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CHUNK = 1 << 18  # elements dequantized at once: what stays in the processor's cache is several times quicker

_MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
_ROPE_FACTORS = "rope_freqs.weight"  # llama 3's scaling: what each frequency is divided by


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies, and how it is stored.

    Mirrors: none; vLLM uses `gguf.ReaderTensor`.
    """

    shape: tuple[int, ...]  # as torch has it, slowest dimension first
    kind: int  # a gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


class GGUFFile:
    """The metadata and the table of tensors of one file.

    Arrays of strings (the vocabulary) are kept as their length only. Raises ValueError for a damaged file.

    Mirrors: none; vLLM uses `gguf.GGUFReader`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        if path.stat().st_size < 24:
            raise ValueError(f"{path} holds {path.stat().st_size} bytes, too few for a GGUF file: fetch it again")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it starts with {self._bytes[:4]!r}")
        self._pos = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ValueError(f"{path}: the header is cut off or damaged at byte {self._pos}: fetch it again") from error

    def _read_header(self) -> None:
        version, num_tensors, num_fields = self._take("IQQ")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(*self._take("I"))
        table = []
        for _ in range(num_tensors):
            name = self._string()
            dims = self._take(f"{self._take('I')[0]}Q")
            table.append((name, dims[::-1], *self._take("IQ")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._pos // alignment) * alignment
        self.tensors = {n: GGUFTensor(shape=shape, kind=kind, offset=start + at) for n, shape, kind, at in table}

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._bytes, self._pos)
        self._pos += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        return str(self._take(f"{length}s")[0], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        item, count = self._take("IQ")
        if item in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[item]}"))
        unpack, data, pos = struct.Struct("<Q").unpack_from, self._bytes, self._pos
        for _ in range(count):
            pos += 8 + unpack(data, pos)[0]
        self._pos = pos
        return count

    def read(self, name: str) -> Tensor:
        """One tensor in float32, dequantized."""
        import gguf

        tensor = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ValueError(f"tensor {name!r} has the unknown quantization type {tensor.kind}") from error
        width = tensor.shape[-1]
        rows, row_bytes = prod(tensor.shape[:-1]), width // block * block_bytes
        have = len(self._bytes) - tensor.offset
        if have < rows * row_bytes:
            raise ValueError(
                f"tensor {name!r} needs {rows * row_bytes} bytes at {tensor.offset}, but {self.path} ends"
                f" {max(have, 0)} bytes after that: it is cut off, fetch it again"
            )
        data = np.frombuffer(self._bytes, np.uint8, rows * row_bytes, tensor.offset).reshape(rows, row_bytes)
        if kind == gguf.GGMLQuantizationType.F32:
            return torch.from_numpy(data.view(np.float32).reshape(tensor.shape).copy())
        out = np.empty((rows, width), np.float32)
        step = max(1, _CHUNK // width)
        try:
            for row in range(0, rows, step):
                out[row : row + step] = gguf.dequantize(data[row : row + step], kind).reshape(-1, width)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name!r} is stored as {kind.name}, which gguf cannot dequantize") from error
        return torch.from_numpy(out.reshape(tensor.shape))


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
        "architectures": [_MODEL_TYPES[arch]],
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
    return AutoConfig.for_model(arch, **fields)


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
        permuted = file.metadata["general.architecture"] == "llama"
        heads = {"attn_q": self.hf_config.num_attention_heads, "attn_k": self.hf_config.num_key_value_heads}
        for stored in file.tensors:
            if stored == _ROPE_FACTORS:
                continue
            tensor, (name, part) = file.read(stored), _transformers_name(stored)
            if permuted and part in heads:
                tensor = _undo_permutation(tensor, heads[part])
            yield name, tensor


def _transformers_name(stored: str) -> tuple[str, str]:
    """ "blk.0.attn_q.weight" -> ("model.layers.0.self_attn.q_proj.weight", "attn_q")."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    layer, part, suffix = match.groups() if match else (None, "", "")
    if layer is None and part in _TOP:
        return f"{_TOP[part]}.{suffix}", part
    if layer is not None and part in _BLOCK:
        return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}", part
    raise ValueError(f"tensor {stored!r} has no counterpart in the models that can be read from GGUF")


def _undo_permutation(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each head of q and k; set them apart again."""
    interleaved = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return interleaved.transpose(1, 2).reshape(tensor.shape)
