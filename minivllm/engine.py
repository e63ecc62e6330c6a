"""The engine: requests in, steps of the whole pipeline, outputs out.

One step is schedule → execute → update, in that order and in one process. Mirrors `vllm/v1/engine/llm_engine.py` and
the in-process part of `vllm/v1/engine/core.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from minivllm.config import VllmConfig
from minivllm.core.block_hash import make_block_hasher
from minivllm.core.kv_cache_groups import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from minivllm.core.scheduler import Scheduler
from minivllm.output_processor import OutputProcessor
from minivllm.outputs import RequestOutput
from minivllm.request import Request, RequestStatus
from minivllm.sampling.params import SamplingParams
from minivllm.worker.memory import determine_available_memory
from minivllm.worker.model_runner import ModelRunner

Prompt = str | Sequence[int] | dict[str, Any]


class LLMEngine:
    """Adds, steps and aborts requests.

    Mirrors: vllm/v1/engine/llm_engine.py LLMEngine.
    Leaves out: multiprocessing, LoRA, multimodal inputs, metrics.

    vllm_config: every setting. tokenizer: a Transformers tokenizer, or None where only token ids go in and out.
    model: a loaded model; None loads `vllm_config.model_config.model`.
    """

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any | None = None, model: torch.nn.Module | None = None):
        self.vllm_config = vllm_config
        self.tokenizer = tokenizer
        self.model_runner = ModelRunner(vllm_config)
        self.model_runner.load_model(model)
        # The order matters (vLLM #14309): what a step needs is measured first, with no cache and no metadata; what
        # memory is left decides the number of blocks; only then do caches exist and find their layers.
        specs = self.model_runner.get_kv_cache_spec()
        available = determine_available_memory(vllm_config, self.model_runner.profile_run)
        self.kv_cache_config = get_kv_cache_config(vllm_config, specs, available)
        self.model_runner.initialize_kv_cache(self.kv_cache_config)
        self.scheduler = Scheduler(vllm_config, generate_scheduler_kv_cache_config([self.kv_cache_config]))
        self.output_processor = OutputProcessor(tokenizer)
        _, hash_block_size = resolve_kv_cache_block_sizes(self.kv_cache_config, vllm_config)
        caching = vllm_config.cache_config.enable_prefix_caching
        self._block_hasher = make_block_hasher(hash_block_size) if caching else None

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue one request.

        prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. priority: lower runs first under the
        "priority" policy. cache_salt: requests share prefix-cache blocks only within one salt.
        Raises ValueError or TypeError for what can never run; nothing is queued then.
        """
        text, token_ids, salt = self._read_prompt(prompt)
        params = self._check(token_ids, SamplingParams() if params is None else params)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        eos = self.vllm_config.model_config.eos_token_ids
        for index, engine_id in enumerate(self.output_processor.add_request(request_id, text, token_ids, params)):
            request = Request(
                engine_id, token_ids, params.for_sample(index), eos_token_id=eos[0] if eos else None,
                arrival_time=arrival, priority=priority, cache_salt=cache_salt or salt,
                block_hasher=self._block_hasher,
            )  # fmt: skip
            self.scheduler.add_request(request)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained tokens or ended, in the order they were scheduled."""
        scheduler_output = self.scheduler.schedule()
        try:
            runner_output = self.model_runner.execute_model(scheduler_output)
        except BaseException:
            # The scheduler has already counted this step's tokens, and cached their blocks: no request can go on, and
            # no block can be trusted.
            self.abort_request(self.output_processor.request_ids())
            self.scheduler.reset_prefix_cache()
            raise
        news = self.scheduler.update_from_output(scheduler_output, runner_output)
        outputs, stopped = self.output_processor.process_outputs(news)
        if stopped:
            self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        return outputs

    def abort_request(self, request_ids: str | Sequence[str]) -> list[RequestOutput]:
        """Stop requests and free their blocks; ids that are not running are ignored, as a request may just have ended.

        Returns each one's last output, finish reason "abort".
        """
        outputs = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            self.scheduler.finish_requests(self.output_processor.engine_ids(request_id), RequestStatus.FINISHED_ABORTED)
            if (output := self.output_processor.abort(request_id)) is not None:
                outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False (and nothing done) while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """The text (None for token ids), the token ids and the cache salt of a prompt."""
        salt: str | None = None
        if isinstance(prompt, dict):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                raise ValueError(
                    "a prompt given as a dict holds 'prompt' (text) or 'prompt_token_ids' (ids), and 'cache_salt' if"
                    f" wanted; got the keys {sorted(prompt)}"
                )
            salt = prompt.get("cache_salt")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "a text prompt needs a tokenizer and this model has none: give token ids, or LLM(tokenizer=...)"
                )
            return prompt, self.tokenizer.encode(prompt), salt
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise TypeError(f"a prompt is a str, token ids or a dict, got {type(prompt).__name__}: {prompt!r}")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"prompt token ids must be integers, got {token!r} ({type(token).__name__})")
        return None, [int(token) for token in prompt], salt

    def _check(self, token_ids: list[int], params: SamplingParams) -> SamplingParams:
        """Refuse what can never run; returns the params with text settings turned into ids."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}: {params!r}")
        longest, vocab_size = self.vllm_config.model_config.max_model_len, self.model_runner.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: it must hold at least one token")
        if len(token_ids) >= longest:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len={longest} must hold it and at least one"
                " output token: shorten the prompt or raise max_model_len"
            )
        for position, token in enumerate(token_ids):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt token id {token} at position {position} is outside the vocabulary of {vocab_size}:"
                    f" ids go from 0 to {vocab_size - 1}"
                )
        return params.resolve(
            vocab_size=vocab_size,
            tokenizer=self.tokenizer,
            eos_token_ids=self.vllm_config.model_config.eos_token_ids,
            room=longest - len(token_ids),
        )
