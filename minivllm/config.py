"""Every setting of the engine, frozen and checked once, before anything is built.

Mirrors `vllm.config` (vLLM 0.32.0): the same names for the settings kept, without parallelism, speculation,
LoRA, multimodal and KV-connector settings. No torch here: `core/` decides with these values alone, and a dtype is
its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Dtype = Literal["float32", "bfloat16", "float16"]
SchedulerPolicy = Literal["fcfs", "priority"]

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_size(dtype: str) -> int:
    """Bytes of one element of `dtype`, a torch dtype's name such as "bfloat16"."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known here; known are {sorted(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _at_least(owner: str, minimum: int, **values: Any) -> None:
    """Refuse every value that is not an integer of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{owner}.{name} must be an integer, got {value!r}")
        if value < minimum:
            raise ValueError(f"{owner}.{name} must be at least {minimum}, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, how long, in which dtype.

    hf_config: the Transformers config object (text part), read once by the loader.
    max_model_len: the most tokens one sequence may hold, prompt and output together.

    Mirrors: vllm/config/model.py ModelConfig.
    Leaves out: quantization, multimodal and pooling settings, revisions, remote code.
    """

    model: str
    hf_config: Any
    dtype: Dtype
    max_model_len: int
    tokenizer: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("ModelConfig", 1, max_model_len=self.max_model_len)
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {list(get_args(Dtype))} or 'auto', got {self.dtype!r}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut into blocks.

    block_size: tokens a block. kv_cache_memory_bytes: bytes for all layers' pages together, instead of
    gpu_memory_utilization (a fraction of the device's memory). prefix_cache_retention_interval: None caches every
    window checkpoint, 0 only the tail of a prompt, N one tail every N tokens (sliding-window and Mamba groups).

    Mirrors: vllm/config/cache.py CacheConfig.
    Leaves out: quantised caches, offloading to the CPU, choice of the hash.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_retention_interval: int | None = 0
    disable_hybrid_kv_cache_manager: bool = False
    mamba_cache_mode: Literal["none", "align", "all"] = "none"

    def __post_init__(self) -> None:
        _at_least("CacheConfig", 1, block_size=self.block_size)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.kv_cache_memory_bytes is not None:
            _at_least("CacheConfig", 1, kv_cache_memory_bytes=self.kv_cache_memory_bytes)
        if self.num_gpu_blocks_override is not None:
            _at_least("CacheConfig", 2, num_gpu_blocks_override=self.num_gpu_blocks_override)
        if self.prefix_cache_retention_interval is not None:
            _at_least("CacheConfig", 0, prefix_cache_retention_interval=self.prefix_cache_retention_interval)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold.

    max_num_batched_tokens: the token budget of a step, prefill and decode alike. max_num_seqs: rows of the batch.
    max_num_active_seqs: at most this many admitted at once (None: max_num_seqs). watermark: the fraction of all
    blocks kept free on admission while something runs. scheduler_reserve_full_isl: admit a request only if its whole
    current sequence fits, not just its first chunk.

    Mirrors: vllm/config/scheduler.py SchedulerConfig.
    Leaves out: asynchronous scheduling, priorities of modalities, encoder budgets.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_num_active_seqs: int | None = None
    enable_chunked_prefill: bool = True
    policy: SchedulerPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        _at_least(
            "SchedulerConfig", 1, max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs
        )
        _at_least("SchedulerConfig", 0, long_prefill_token_threshold=self.long_prefill_token_threshold)
        if self.max_num_active_seqs is not None:
            _at_least("SchedulerConfig", 1, max_num_active_seqs=self.max_num_active_seqs)
        if self.policy not in get_args(SchedulerPolicy):
            raise ValueError(f"scheduling policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The one object handed down to scheduler, runner, model and builders.

    Mirrors: vllm/config/vllm.py VllmConfig.
    Leaves out: parallelism, speculation, LoRA, structured outputs, compilation, KV transfer, observability.
    """

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: str = "cpu"
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        budget, longest = self.scheduler_config.max_num_batched_tokens, self.model_config.max_model_len
        if not self.scheduler_config.enable_chunked_prefill and budget < longest:
            raise ValueError(
                f"max_num_batched_tokens={budget} is below max_model_len={longest} and chunked prefill is off, so the"
                " longest prompts could never run: raise max_num_batched_tokens or set enable_chunked_prefill=True"
            )
        if budget < self.scheduler_config.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={budget} is below max_num_seqs={self.scheduler_config.max_num_seqs}: every"
                " running request needs one token a step, so raise the first or lower the second"
            )
