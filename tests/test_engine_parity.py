"""One request alone, batched, chunked, preempted, resumed and prefix-cached: the same tokens, and Transformers' own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from tests.models.tiny import save_tiny

ARCHS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"]
WINDOWED = ["mistral", "gemma2", "gemma3_text"]
# Blocks that hold one longest request, but not all eight at once. Gemma's layers lie in three and in four groups.
FEW_BLOCKS = {"gemma2": 64, "gemma3_text": 86}
LENGTHS = [1, 3, 4, 5, 16, 17, 33, 61]  # one token, block borders (4 and 16), odd lengths, past 2.5 windows
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module", params=ARCHS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=11)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """Greedy tokens by Transformers, one prompt at a time, without a cache: nothing but the model's own forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts(model.config.vocab_size):
        ids = list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def run(tiny: Path, batch: list[list[int]], params: SamplingParams = GREEDY, **settings: object) -> tuple[LLM, list]:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8} | settings
    llm = LLM(str(tiny), **settings)  # type: ignore[arg-type]
    outputs = llm.generate(batch, params, use_tqdm=False)
    all_blocks_free(llm)
    return llm, outputs


def all_blocks_free(llm: LLM) -> None:
    manager = llm.llm_engine.scheduler.kv_cache_manager
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == llm.llm_engine.kv_cache_config.num_blocks - 1


def tokens(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def config(tiny: Path) -> dict[str, Any]:
    return dict(json.loads((tiny / "config.json").read_text()))


def vocab(tiny: Path) -> int:
    return int(config(tiny)["vocab_size"])


def arch(tiny: Path) -> str:
    return str(config(tiny)["model_type"])


def test_alone(tiny: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(tiny), dtype="float32", kv_cache_memory_bytes=8 << 20, enable_prefix_caching=False)
    for prompt, answer in zip(prompts(vocab(tiny)), expected, strict=True):
        assert tokens(llm.generate(prompt, GREEDY, use_tqdm=False)) == [answer]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_batched(tiny: Path, expected: list[list[int]], block_size: int) -> None:
    assert tokens(run(tiny, prompts(vocab(tiny)), block_size=block_size)[1]) == expected


@pytest.mark.parametrize("budget", [8, 11, 37])
def test_chunked(tiny: Path, expected: list[list[int]], budget: int) -> None:
    """A budget far below the prompts cuts each into many chunks, mixed with other requests' decodes."""
    _llm, outputs = run(tiny, prompts(vocab(tiny)), max_num_batched_tokens=budget, block_size=4)
    assert tokens(outputs) == expected


def test_preempted_and_resumed(tiny: Path, expected: list[list[int]]) -> None:
    """A pool that cannot hold all requests at once: some are preempted, recomputed, and end with the same tokens."""
    preempted: list[str] = []
    llm = LLM(
        str(tiny), dtype="float32", block_size=4, num_gpu_blocks_override=FEW_BLOCKS.get(arch(tiny), 24),
        max_model_len=80, max_num_seqs=8, enable_prefix_caching=False,
    )  # fmt: skip
    schedule = llm.llm_engine.scheduler.schedule

    def watched() -> object:
        output = schedule()
        preempted.extend(output.preempted_req_ids)
        return output

    llm.llm_engine.scheduler.schedule = watched  # type: ignore[method-assign,assignment]
    assert tokens(llm.generate(prompts(vocab(tiny)), GREEDY, use_tqdm=False)) == expected
    assert preempted, "the pool was meant to be too small for all requests at once"
    all_blocks_free(llm)


def test_prefix_cached(tiny: Path, expected: list[list[int]]) -> None:
    """The same prompts again are found in the cache, lengths on block borders included, and give the same tokens."""
    batch = prompts(vocab(tiny))
    llm, first = run(tiny, batch, block_size=4)
    again = llm.generate(batch, GREEDY, use_tqdm=False)
    assert tokens(first) == tokens(again) == expected
    # A hit is at most num_tokens - 1, in whole blocks: one token is always left to compute.
    assert [output.num_cached_tokens for output in again] == [(length - 1) // 4 * 4 for length in LENGTHS]
    all_blocks_free(llm)


def test_continued_conversation_hits_generated_tokens(tiny: Path, expected: list[list[int]]) -> None:
    """Generated tokens are cached too: a prompt that repeats the last answer hits beyond the first prompt."""
    batch = prompts(vocab(tiny))
    llm, _ = run(tiny, batch, block_size=4)
    longer = [prompt + answer[:-1] for prompt, answer in zip(batch, expected, strict=True)]
    one_more = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outputs = llm.generate(longer, one_more, use_tqdm=False)
    assert tokens(outputs) == [answer[-1:] for answer in expected]
    # Of a window only the end of the prompt is kept by default (prefix_cache_retention_interval=0).
    known = batch if arch(tiny) in WINDOWED else longer
    assert [output.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in known]


def test_arrivals_in_the_middle(tiny: Path, expected: list[list[int]]) -> None:
    """Requests that arrive while others decode change nobody's tokens."""
    llm = LLM(str(tiny), dtype="float32", kv_cache_memory_bytes=8 << 20, block_size=4, max_num_batched_tokens=16,
              max_num_seqs=4)  # fmt: skip
    engine, waiting, done = llm.llm_engine, list(enumerate(prompts(vocab(tiny)))), {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and step % 3 == 0:
            index, prompt = waiting.pop(0)
            engine.add_request(str(index), prompt, GREEDY)
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0].token_ids
        step += 1
    assert [done[index] for index in range(len(expected))] == expected
    all_blocks_free(llm)


def test_attention_sees_no_stale_memory(tiny: Path, expected: list[list[int]]) -> None:
    """Every page holds NaN before it is written, and again as soon as it is free, also below a window: any read past
    what a request wrote, or of what it gave back, would spoil its tokens."""
    llm = LLM(str(tiny), dtype="float32", kv_cache_memory_bytes=1 << 20, block_size=4, max_num_batched_tokens=16)
    engine, poisoned = llm.llm_engine, 0
    caches = [layer.kv_cache for layer in engine.model_runner.layers.values()]
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def poisoning() -> object:
        nonlocal poisoned
        output = schedule()
        pool = scheduler.kv_cache_manager.block_pool
        # Cached blocks of no request keep their content: a later request may find it. Everything else is no one's.
        free = [block.block_id for block in pool.blocks if not block.ref_cnt and block.block_hash is None]
        poisoned += len(free)
        for cache in caches:
            cache[free] = float("nan")
        return output

    for cache in caches:
        cache.fill_(float("nan"))
    scheduler.schedule = poisoning  # type: ignore[method-assign,assignment]
    assert tokens(llm.generate(prompts(vocab(tiny)), GREEDY, use_tqdm=False)) == expected
    assert poisoned
