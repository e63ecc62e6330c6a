"""Choosing a backend: by name, by default, and with reasons where one is refused."""

from __future__ import annotations

import pytest
import torch

from minivllm.attention import selector
from minivllm.attention.backend import AttentionBackend
from minivllm.attention.backends.torch_paged import TorchPagedBackend
from minivllm.attention.selector import available_backends, get_attn_backend, register_backend
from minivllm.config import ModelConfig, VllmConfig
from tests.attention.paged_case import PagedBatch, make_layer


class NarrowBackend(TorchPagedBackend):
    """Able to do little."""

    supported_dtypes = (torch.float16,)
    supported_devices = ("cuda",)
    supported_head_sizes = (64, 128)
    supported_features = frozenset({"sliding_window"})

    @staticmethod
    def get_name() -> str:
        return "NARROW"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(selector, "_registered", dict(selector._registered))


def test_auto_and_by_name() -> None:
    assert get_attn_backend(64, torch.bfloat16, "cpu") is TorchPagedBackend
    assert get_attn_backend(7, torch.float32, torch.device("cuda", 0), "torch") is TorchPagedBackend
    assert "TORCH" in available_backends()


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'FLASH'; known are auto, TORCH.*register_backend"):
        get_attn_backend(64, torch.bfloat16, "cpu", "FLASH")


def test_every_reason_and_the_alternatives_are_named() -> None:
    register_backend("narrow", NarrowBackend)
    with pytest.raises(ValueError) as caught:
        get_attn_backend(80, torch.float32, "cpu", "Narrow", ["sinks", "alibi_slopes", "sliding_window"])
    text = str(caught.value)
    assert "'Narrow' cannot serve a layer with head_size=80, torch.float32, device 'cpu'" in text
    assert "NARROW has no kernel for torch.float32, only for torch.float16" in text
    assert "NARROW does not run on 'cpu', only on cuda" in text
    assert "NARROW has no kernel for head_size=80: only 64, 128" in text
    assert "NARROW does not support alibi_slopes, sinks" in text
    assert text.endswith("Backends that can: TORCH")


def test_auto_refuses_with_reasons() -> None:
    with pytest.raises(ValueError, match=r"'auto' cannot serve .* TORCH has no kernel for torch.int8"):
        get_attn_backend(64, torch.int8, "cpu")


def test_bad_head_size_and_feature() -> None:
    with pytest.raises(ValueError, match="head_size must be at least 1, got 0"):
        get_attn_backend(0, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"unknown attention features \['speed'\]"):
        get_attn_backend(8, torch.float32, "cpu", features=["speed"])  # type: ignore[list-item]


def test_a_backend_of_ones_own_runs_a_layer() -> None:
    class Own(TorchPagedBackend):
        @staticmethod
        def get_name() -> str:
            return "OWN"

    register_backend("own", Own)
    register_backend("own", Own)  # a notebook cell may run twice
    config = VllmConfig(
        model_config=ModelConfig(model="none", hf_config=None, dtype="float32", max_model_len=64),
        attention_backend="own",
    )
    layer = make_layer(config)
    assert layer.get_attn_backend() is Own
    batch = PagedBatch(layer, config, [(3, 2), (4, 1)])
    torch.testing.assert_close(batch.run().double(), batch.expected(), rtol=1e-5, atol=1e-5)
    assert get_attn_backend(8, torch.float32, "cpu") is TorchPagedBackend  # auto never takes it


def test_a_backend_by_path_is_imported_when_asked_for() -> None:
    register_backend("by_path", f"{TorchPagedBackend.__module__}:{TorchPagedBackend.__name__}")
    assert get_attn_backend(8, torch.float32, "cpu", "BY_PATH") is TorchPagedBackend
    register_backend("gone", "no_such_package.module:Class")
    with pytest.raises(ValueError, match=r"GONE cannot be imported: No module named 'no_such_package'.*can: TORCH"):
        get_attn_backend(8, torch.float32, "cpu", "gone")
    register_backend("nameless", "minivllm.attention.selector:Missing")
    with pytest.raises(ValueError, match=r"NAMELESS cannot be imported: .*Missing"):
        get_attn_backend(8, torch.float32, "cpu", "nameless")
    register_backend("wrong", "minivllm.config:VllmConfig")
    with pytest.raises(TypeError, match="must be a subclass of AttentionBackend"):
        get_attn_backend(8, torch.float32, "cpu", "wrong")


@pytest.mark.parametrize(
    ("name", "backend", "error", "message"),
    [
        ("torch", NarrowBackend, ValueError, "'torch' is taken"),
        ("auto", NarrowBackend, ValueError, "'auto' is taken"),
        ("x", "module.Class", ValueError, "'module:Class', got 'module.Class'"),
        ("x", ":Class", ValueError, "'module:Class'"),
        ("x", int, TypeError, "must be a subclass of AttentionBackend"),
        ("x", 3, TypeError, "must be a subclass of AttentionBackend"),
    ],
)
def test_bad_registrations(name: str, backend: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register_backend(name, backend)  # type: ignore[arg-type]


def test_a_backend_must_be_whole() -> None:
    class Half(AttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "HALF"

    with pytest.raises(TypeError, match="get_impl_cls"):
        register_backend("half", Half)
