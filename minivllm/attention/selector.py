"""Chooses the attention backend of a layer, and says why where it refuses one.

Backends are named by class path and imported when they are first asked for, so that one whose packages are missing
costs nothing. Mirrors vllm/v1/attention/selector.py and backends/registry.py (0.32.0).
"""

from __future__ import annotations

import importlib
from collections.abc import Collection

import torch

from minivllm.attention.backend import AttentionBackend, AttentionFeature

_BUILT_IN: dict[str, str] = {"TORCH": "minivllm.attention.backends.torch_paged:TorchPagedBackend"}
# What "auto" tries, in this order, for a device type; types not named here try what "cpu" tries.
_PREFERRED: dict[str, tuple[str, ...]] = {"cpu": ("TORCH",), "cuda": ("TORCH",)}
_registered: dict[str, str | type[AttentionBackend]] = dict(_BUILT_IN)


def register_backend(name: str, backend: str | type[AttentionBackend]) -> None:
    """Make a backend of your own known as `name` (capitals do not matter): its class, or "module:Class".

    It is used where a user asks for it by name, never by "auto". A name may be registered again, so that a notebook
    cell can be run twice, but not that of a built-in backend.

    Mirrors: vllm/v1/attention/backends/registry.py register_backend.
    """
    key = name.upper()
    if key == "AUTO" or key in _BUILT_IN:
        raise ValueError(f"attention backend name {name!r} is taken: {', '.join(['AUTO', *_BUILT_IN])} are built in")
    if isinstance(backend, str):
        if not all(backend.partition(":")):
            raise ValueError(f"attention backend {name!r}: a path has the form 'module:Class', got {backend!r}")
    else:
        _require_backend_class(name, backend)
    _registered[key] = backend


def available_backends() -> list[str]:
    """Names that `attention_backend` may have, "auto" aside."""
    return list(_registered)


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    name: str = "auto",
    features: Collection[AttentionFeature] = (),
) -> type[AttentionBackend]:
    """The backend class for such a layer; ValueError with every reason where none, or not the one named, can serve it.

    Mirrors: vllm/v1/attention/selector.py get_attn_backend.
    """
    if head_size < 1:
        raise ValueError(f"head_size must be at least 1, got {head_size}")
    device, wanted = torch.device(device), name.upper()
    layer = f"a layer with head_size={head_size}, {dtype}, device {device.type!r}, features {sorted(features)}"
    if wanted != "AUTO" and wanted not in _registered:
        raise ValueError(
            f"unknown attention backend {name!r}; known are auto, {', '.join(_registered)}. Others can be added with"
            " minivllm.attention.selector.register_backend"
        )
    candidates = _PREFERRED.get(device.type, _PREFERRED["cpu"]) if wanted == "AUTO" else (wanted,)
    refusals: list[str] = []
    for candidate in candidates:
        backend, reasons = _examine(candidate, head_size, dtype, device, features)
        if backend is not None and not reasons:
            return backend
        refusals += reasons
    others = [other for other in _registered if other not in candidates]
    usable = [other for other in others if not _examine(other, head_size, dtype, device, features)[1]]
    raise ValueError(
        f"attention backend {name!r} cannot serve {layer}: {'; '.join(refusals)}."
        f" Backends that can: {', '.join(usable) or 'none'}"
    )


def _examine(
    name: str, head_size: int, dtype: torch.dtype, device: torch.device, features: Collection[AttentionFeature]
) -> tuple[type[AttentionBackend] | None, list[str]]:
    """The class of a registered backend, and why it cannot serve the layer; None where it cannot even be imported."""
    backend = _registered[name]
    if isinstance(backend, str):
        module, _, attribute = backend.partition(":")
        try:
            backend = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            return None, [f"{name} cannot be imported: {error}"]
        _require_backend_class(name, backend)
        _registered[name] = backend
    return backend, backend.validate_configuration(head_size, dtype, device, features)


def _require_backend_class(name: str, backend: object) -> None:
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise TypeError(f"attention backend {name!r} must be a subclass of AttentionBackend, got {backend!r}")
    if missing := sorted(backend.__abstractmethods__):
        raise TypeError(f"attention backend {name!r}: {backend.__qualname__} does not define {', '.join(missing)}")
