"""minivllm: the pipeline of vLLM V1, small enough to read.

`from minivllm import LLM, SamplingParams` is all that a script needs. Names are resolved on first use, so that
`import minivllm` itself loads neither torch nor anything of Jupyter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.engine import LLMEngine
    from minivllm.llm import LLM
    from minivllm.models.registry import ModelRegistry
    from minivllm.outputs import CompletionOutput, RequestOutput
    from minivllm.sampling.params import SamplingParams

__version__ = "0.1.0"
VLLM_VERSION = "0.32.0"  # the vLLM release whose names, decisions and numbers are mirrored

_HOMES = {
    "LLM": "minivllm.llm",
    "LLMEngine": "minivllm.engine",
    "ModelRegistry": "minivllm.models.registry",
    "CompletionOutput": "minivllm.outputs",
    "RequestOutput": "minivllm.outputs",
    "SamplingParams": "minivllm.sampling.params",
}

__all__ = [
    "LLM",
    "VLLM_VERSION",
    "CompletionOutput",
    "LLMEngine",
    "ModelRegistry",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}; public names: {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)
