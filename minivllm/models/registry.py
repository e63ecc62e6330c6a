"""Which class runs an architecture that a config names, and whether that class keeps the contract.

The contract: `forward(input_ids, positions, ...)` and nothing of caches or metadata anywhere. Attention layers find
both through the forward context. A model written for the older way is refused when it is loaded, with what to change.

Mirrors `vllm/model_executor/models/registry.py`, without the subprocess that inspects classes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence

from torch import nn

_BANNED = ("kv_cache", "kv_caches", "attn_metadata")


class _ModelRegistry:
    """Architecture names and the classes that run them.

    Mirrors: vllm/model_executor/models/registry.py _ModelRegistry.
    Leaves out: capability flags (pooling, multimodal, pipeline parallel), fallback to Transformers models.
    """

    def __init__(self) -> None:
        self._models: dict[str, type[nn.Module] | str] = {}

    def register_model(self, arch: str, model: type[nn.Module] | str) -> None:
        """Run architecture `arch` with a class, or with "module:Class", which is imported when first needed."""
        if isinstance(model, str) and model.count(":") != 1:
            raise ValueError(f"model {arch!r}: expected a class or 'module:Class', got {model!r}")
        if not isinstance(model, str) and not (isinstance(model, type) and issubclass(model, nn.Module)):
            raise TypeError(f"model {arch!r}: expected a torch.nn.Module class or 'module:Class', got {model!r}")
        self._models[arch] = model

    def get_supported_archs(self) -> list[str]:
        """Every architecture name that can be loaded."""
        return sorted(self._models)

    def resolve_model_cls(self, architectures: Sequence[str] | None) -> type[nn.Module]:
        """The class of the first architecture that is known."""
        for arch in architectures or ():
            model = self._models.get(arch)
            if model is not None:
                return _import(model) if isinstance(model, str) else model
        raise ValueError(
            f"architecture {list(architectures or ())} is not known; known are {self.get_supported_archs()}. Add one"
            " with ModelRegistry.register_model(name, cls)"
        )


def _import(path: str) -> type[nn.Module]:
    module, _, name = path.partition(":")
    cls: type[nn.Module] = getattr(importlib.import_module(module), name)
    return cls


def check_forward_contract(model: nn.Module) -> None:
    """Refuse a model of which any module asks for caches or metadata, or that cannot run on ids and positions."""
    for name, module in model.named_modules():
        cls = type(module)
        asked = [each for each in inspect.signature(cls.forward).parameters if each in _BANNED]
        if asked:
            raise TypeError(
                f"{cls.__qualname__}.forward ({name or 'the model itself'}) asks for {', '.join(asked)}, which models"
                " no longer get. To migrate: 1. drop kv_cache(s) and attn_metadata from every forward and every call;"
                " 2. give each Attention layer a prefix unique in the model, and call it as attn(query, key, value);"
                " 3. where the metadata itself is needed, read get_forward_context().attn_metadata[layer_name]"
            )
    parameters = list(inspect.signature(model.forward).parameters.values())
    names = [each.name for each in parameters]
    needed = [each.name for each in parameters[2:] if each.default is each.empty and each.kind not in (2, 4)]
    if names[:2] != ["input_ids", "positions"] or needed:
        raise TypeError(
            f"{type(model).__qualname__}.forward takes ({', '.join(names)}); it must take (input_ids, positions,"
            " inputs_embeds=None), where whatever follows positions is optional"
        )


ModelRegistry = _ModelRegistry()
for _arch, _path in {
    "Cohere2ForCausalLM": "minivllm.models.cohere2:Cohere2ForCausalLM",
    "Gemma2ForCausalLM": "minivllm.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "minivllm.models.gemma3:Gemma3ForCausalLM",
    "Gemma3nForCausalLM": "minivllm.models.gemma3n:Gemma3nForCausalLM",
    "GptOssForCausalLM": "minivllm.models.gpt_oss:GptOssForCausalLM",
    "Llama4ForCausalLM": "minivllm.models.llama4:Llama4ForCausalLM",
    "LlamaForCausalLM": "minivllm.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "minivllm.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "minivllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "minivllm.models.qwen3:Qwen3ForCausalLM",
}.items():
    ModelRegistry.register_model(_arch, _path)
