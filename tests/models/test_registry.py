"""The registry, and the contract that a model's forward must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import prefill, save_tiny, tiny_vllm_config
from torch import Tensor, nn

from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.loader import load_hf_config, load_model, resolve_model
from minivllm.models.registry import ModelRegistry, _ModelRegistry, check_forward_contract


@pytest.fixture
def archs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))


def test_every_supported_architecture_can_be_imported() -> None:
    archs = ModelRegistry.get_supported_archs()
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(archs)
    for arch in archs:
        assert ModelRegistry.resolve_model_cls([arch]).__name__ == arch


def test_the_first_known_architecture_wins() -> None:
    assert ModelRegistry.resolve_model_cls(["Strange", "LlamaForCausalLM"]) is LlamaForCausalLM


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_unknown_architecture_lists_the_known(architectures: list[str] | None) -> None:
    with pytest.raises(ValueError, match=r"is not known; known are .*'LlamaForCausalLM'.*register_model"):
        ModelRegistry.resolve_model_cls(architectures)


def test_register_refuses_what_is_no_model() -> None:
    registry = _ModelRegistry()
    with pytest.raises(ValueError, match=r"'module:Class', got 'minivllm.models.llama'"):
        registry.register_model("Mine", "minivllm.models.llama")
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module class"):
        registry.register_model("Mine", dict)  # type: ignore[arg-type]


class Shouting(LlamaForCausalLM):
    """A model from outside: Llama with its logits doubled."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden) * 2


@pytest.mark.usefixtures("archs")
def test_a_model_from_outside(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    vllm_config = tiny_vllm_config(str(tmp_path), hf_config)
    expected = prefill(load_model(vllm_config), vllm_config, [[5, 6, 7]])[0]
    ModelRegistry.register_model("ShoutingForCausalLM", Shouting)
    hf_config.architectures = ["ShoutingForCausalLM"]
    assert torch.equal(prefill(load_model(vllm_config), vllm_config, [[5, 6, 7]])[0], expected * 2)


class OldLayer(nn.Module):
    def forward(self, hidden: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Tensor:
        return hidden


class OldModel(nn.Module):
    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[Tensor], attn_metadata: Any) -> Tensor:
        return positions


class OldInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OldLayer()])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return positions


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OldModel(), r"OldModel.forward \(the model itself\) asks for kv_caches, attn_metadata"),
        (OldInside(), r"OldLayer.forward \(layers.0\) asks for kv_cache, attn_metadata"),
    ],
)
def test_the_older_way_is_refused_with_the_migration(model: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=rf"{message}.* 1\. drop .* 2\. give .* 3\. where .*get_forward_context"):
        check_forward_contract(model)


@pytest.mark.usefixtures("archs")
def test_the_older_way_is_refused_by_the_loader(tmp_path: Path) -> None:
    class Old(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, positions)

    save_tiny("llama", tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    ModelRegistry.register_model("LlamaForCausalLM", Old)
    with pytest.raises(TypeError, match=r"Old.forward \(the model itself\) asks for kv_caches"):
        load_model(tiny_vllm_config(str(tmp_path), hf_config))


def test_forward_must_run_on_ids_and_positions() -> None:
    class Swapped(nn.Module):
        def forward(self, positions: Tensor, input_ids: Tensor) -> Tensor:
            return positions

    class Greedy(nn.Module):
        def forward(self, input_ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
            return positions

    class Open(nn.Module):
        def forward(self, input_ids: Tensor, positions: Tensor, *rest: Tensor, **more: Tensor) -> Tensor:
            return positions

    for model in (Swapped(), Greedy()):
        with pytest.raises(TypeError, match=r"it must take \(input_ids, positions, inputs_embeds=None\)"):
            check_forward_contract(model)
    check_forward_contract(Open())
