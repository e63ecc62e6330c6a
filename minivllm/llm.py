"""The front door: `LLM(model).generate(prompts, sampling_params)`, with vLLM's names and shapes.

Mirrors `vllm/entrypoints/llm.py`: an offline script for vLLM runs by changing its import.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, SchedulerPolicy, VllmConfig
from minivllm.engine import LLMEngine, Prompt
from minivllm.models.loader import (
    load_eos_token_ids,
    load_hf_config,
    load_tokenizer,
    resolve_dtype,
    resolve_max_model_len,
    resolve_model,
)
from minivllm.outputs import RequestOutput
from minivllm.sampling.params import SamplingParams


class LLM:
    """A model that answers prompts.

    Mirrors: vllm/entrypoints/llm.py LLM.
    Leaves out: parallelism, LoRA, quantization settings, pooling tasks, beam search.

    model: a Hugging Face folder (safetensors), a `.gguf` file, or an alias such as "smollm2-135m".
    tokenizer: a folder or name to read another tokenizer from. dtype: "auto" (the checkpoint's, at most 16 bits) or a
    torch dtype's name. device: "auto" is "cuda" where there is one, else "cpu". block_size: tokens a KV block.
    max_model_len: tokens of one sequence, prompt and output; None takes the model's own limit.
    max_num_seqs: sequences in one step; None is 64 on a CPU, else 256, or max_num_batched_tokens where that is less.
    max_num_batched_tokens: tokens of one step.
    gpu_memory_utilization: the fraction of the device's memory that weights, workspace and cache may take.
    kv_cache_memory_bytes: bytes for the KV cache instead. num_gpu_blocks_override: blocks instead of any measuring.
    disable_hybrid_kv_cache_manager: layers with a window or chunk keep all their blocks, so that one group is enough.
    seed: of the engine's own generator, for requests that bring no seed.
    Raises ValueError or TypeError for settings that cannot work, FileNotFoundError for a model that is not there.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        disable_hybrid_kv_cache_manager: bool = False,
        enable_chunked_prefill: bool = True,
        scheduling_policy: SchedulerPolicy = "fcfs",
        attention_backend: str = "auto",
        seed: int = 0,
    ) -> None:
        files, device = resolve_model(model), _resolve_device(device)
        most_seqs = 64 if device == "cpu" else 256  # more rows make a CPU no faster, only its logits larger
        hf_config = load_hf_config(files)
        loaded_tokenizer = load_tokenizer(files, tokenizer)
        model_config = ModelConfig(
            model=model, hf_config=hf_config, dtype=resolve_dtype(hf_config, dtype), tokenizer=tokenizer, seed=seed,
            max_model_len=resolve_max_model_len(hf_config, max_model_len),
            eos_token_ids=load_eos_token_ids(files, hf_config, loaded_tokenizer),
        )  # fmt: skip
        cache_config = CacheConfig(
            block_size=block_size, gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes, num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        )  # fmt: skip
        scheduler_config = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, enable_chunked_prefill=enable_chunked_prefill,
            max_num_seqs=min(most_seqs, max_num_batched_tokens) if max_num_seqs is None else max_num_seqs,
            policy=scheduling_policy,
        )  # fmt: skip
        vllm_config = VllmConfig(
            model_config=model_config, cache_config=cache_config, scheduler_config=scheduler_config,
            device=device, attention_backend=attention_backend,
        )  # fmt: skip
        self.llm_engine = LLMEngine(vllm_config, loaded_tokenizer)
        self._next_id = 0
        self._waiting: set[str] = set()  # request ids that a caller of generate or stream waits for
        self._outbox: dict[str, RequestOutput] = {}  # their latest output not yet read

    def get_tokenizer(self) -> Any:
        """The Transformers tokenizer, or None where the model came without one."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; outputs come in the order of the prompts.

        prompts: one prompt or a list: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
        sampling_params: one for all, or one a prompt. priority: one number a prompt, lower runs first.
        Raises ValueError or TypeError naming the prompt that cannot run; then none of the call's requests is left.
        """
        batch = self._batch(prompts)
        params = _one_each(sampling_params, len(batch), "sampling_params")
        priorities = _one_each(priority, len(batch), "priority")
        ids: list[str] = []
        try:
            for index, (prompt, each, rank) in enumerate(zip(batch, params, priorities, strict=True)):
                try:
                    ids.append(self._add(prompt, each, priority=rank or 0))
                except (TypeError, ValueError) as error:
                    if len(batch) == 1:
                        raise
                    raise type(error)(f"prompt {index}: {error}") from error
            return self._run(ids, use_tqdm)
        finally:  # also on an error or a keyboard interrupt: no request is left behind in the engine
            self._forget(ids)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the chat template."""
        if not messages:
            raise ValueError("messages is empty: give at least one {'role': ..., 'content': ...}")
        conversations = [messages] if isinstance(messages[0], dict) else list(messages)
        tokenizer = self.get_tokenizer()
        if tokenizer is None or not (chat_template or tokenizer.chat_template):
            raise ValueError(
                f"{self.llm_engine.vllm_config.model_config.model} has no chat template (a base model?): use"
                " generate(), or pass chat_template="
            )
        prompts: list[Prompt] = [
            {
                "prompt_token_ids": tokenizer.apply_chat_template(
                    conversation,
                    tokenize=True,
                    return_dict=False,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **(chat_template_kwargs or {}),
                )
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the request's output after every step that changed it; the last one is finished.

        Other requests of the engine go on in the same steps. Closing the iterator early aborts the request.
        vLLM offers this on its asynchronous engine only.
        """
        request_id = self._add(prompt, sampling_params)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while True:
                output = self._outbox.pop(request_id, None)
                if output is None:
                    self._step()
                    continue
                yield output
                if output.finished:
                    return
        finally:
            self._forget([request_id])

    def _step(self) -> None:
        """One engine step; outputs wait in the outbox, since two streams may be read in turn."""
        for output in self.llm_engine.step():
            if output.request_id in self._waiting:
                self._outbox[output.request_id] = output

    def _forget(self, ids: list[str]) -> None:
        """Nobody waits for `ids` any more: abort what still runs, drop what was not read."""
        self.llm_engine.abort_request(ids)
        self._waiting.difference_update(ids)
        for request_id in ids:
            self._outbox.pop(request_id, None)

    def _batch(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """One prompt or many: a list of ints is one prompt, a list of anything else is a list of prompts."""
        if isinstance(prompts, (str, dict)):
            return [prompts]
        batch = list(prompts)
        if batch and all(isinstance(item, int) for item in batch):
            return [batch]  # type: ignore[list-item]
        return batch  # type: ignore[return-value]

    def _add(self, prompt: Prompt, params: SamplingParams | None, priority: int = 0) -> str:
        request_id = str(self._next_id)
        self._next_id += 1
        self.llm_engine.add_request(request_id, prompt, params, priority=priority)
        self._waiting.add(request_id)
        return request_id

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step until every request of `ids` has ended."""
        from tqdm.auto import tqdm

        mine = set(ids)
        done: dict[str, RequestOutput] = {}
        tokens_in = tokens_out = 0
        with tqdm(total=len(ids), desc="Processed prompts", unit="req", disable=not use_tqdm) as bar:
            while len(done) < len(ids):
                self._step()
                for request_id in [key for key in self._outbox if key in mine]:
                    output = self._outbox.pop(request_id)
                    if not output.finished:
                        continue
                    done[request_id] = output
                    tokens_in += len(output.prompt_token_ids)
                    tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"in {tokens_in / elapsed:.1f} tok/s, out {tokens_out / elapsed:.1f} tok/s")
                    bar.update()
        return [done[request_id] for request_id in ids]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    """`value` for each of `count` prompts: a list must have that length, anything else is repeated."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for all or one a prompt")
    return list(value)


def _resolve_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here ({error}); 'auto' takes what there is") from error
    return device
