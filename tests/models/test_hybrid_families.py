"""Models whose layers keep caches of different kinds: logits against Transformers, and the engine in every situation.

Prompts are longer than 2.5 windows or chunks. What the engine's parity tests ask of the Llama family is asked here of
mixtures of experts, sinks, layers without positions and chunks; every page holds NaN before it is written.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import prefill, relative_error, save_tiny, tiny_model, tiny_vllm_config
from transformers import AutoModelForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.models.loader import load_hf_config, load_model, resolve_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss all experts": ("gpt_oss", {"num_experts_per_tok": 5, "sliding_window": 5}),
    "gpt_oss one expert, no biases": ("gpt_oss", {"num_experts_per_tok": 1, "attention_bias": False}),
    "gpt_oss gate": ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 0.7}),
    "gpt_oss layers": ("gpt_oss", {"layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 2]}),
}
ARCHS = {"gpt_oss": 39}  # and how many blocks are too few for all prompts at once
LENGTHS = [1, 4, 17, 39, 58]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [[random.Random(length).randrange(3, 160) for _ in range(length)] for length in LENGTHS]


def reference_model(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize(("arch", "settings"), CASES.values(), ids=CASES.keys())
def test_logits_equal_transformers(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(arch, tmp_path, seed=5, **settings)
    reference = reference_model(tmp_path)
    vllm_config = tiny_vllm_config(str(tmp_path), load_hf_config(resolve_model(str(tmp_path))))
    model = load_model(vllm_config)
    for prompt, logits in zip(PROMPTS, prefill(model, vllm_config, PROMPTS), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
        assert relative_error(logits, expected) < 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module", params=ARCHS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), seed=11)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    """Greedy tokens by Transformers, one prompt at a time, without a cache."""
    reference, answers = reference_model(tiny), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.no_grad():
                ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def poisoned(tiny: Path, **settings: Any) -> LLM:
    """An engine in whose pages every slot holds NaN until it is written."""
    llm = LLM(str(tiny), **{"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "block_size": 4} | settings)
    for layer in llm.llm_engine.model_runner.layers.values():
        layer.kv_cache.fill_(float("nan"))
    return llm


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    manager = llm.llm_engine.scheduler.kv_cache_manager
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == llm.llm_engine.kv_cache_config.num_blocks - 1
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_layers_are_of_two_kinds(tiny: Path) -> None:
    llm = poisoned(tiny)
    kinds = {type(group.kv_cache_spec) for group in llm.llm_engine.kv_cache_config.kv_cache_groups}
    assert len(kinds) == 2


def test_alone(tiny: Path, expected: list[list[int]]) -> None:
    llm = poisoned(tiny, enable_prefix_caching=False)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert generate(llm, [prompt]) == [answer]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_batched(tiny: Path, expected: list[list[int]], block_size: int) -> None:
    assert generate(poisoned(tiny, block_size=block_size)) == expected


@pytest.mark.parametrize("budget", [7, 24])
def test_chunked(tiny: Path, expected: list[list[int]], budget: int) -> None:
    assert generate(poisoned(tiny, max_num_batched_tokens=budget, max_num_seqs=5)) == expected


def test_preempted_and_resumed(tiny: Path, expected: list[list[int]]) -> None:
    preempted: list[str] = []
    few = {"num_gpu_blocks_override": ARCHS[tiny.name.rstrip("0")], "kv_cache_memory_bytes": None, "max_model_len": 70}
    llm = poisoned(tiny, **few, enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=5)
    schedule = llm.llm_engine.scheduler.schedule

    def watched() -> object:
        output = schedule()
        preempted.extend(output.preempted_req_ids)
        return output

    llm.llm_engine.scheduler.schedule = watched  # type: ignore[method-assign,assignment]
    assert generate(llm) == expected
    assert preempted, "the pool was meant to be too small for all requests at once"


def test_prefix_cached(tiny: Path, expected: list[list[int]]) -> None:
    """The same prompts again, and longer ones that begin with the last answers, give the same tokens."""
    llm = poisoned(tiny)
    assert generate(llm) == expected
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert [output.num_cached_tokens for output in again][-1] >= 48
    longer = [prompt + answer[:-1] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    one_more = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert generate(llm, longer, one_more) == [answer[-1:] for answer in expected]


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok must be 1 to num_local_experts=5, got 6"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer 0 is a 'chunked_attention' layer"),
    ],
)
def test_what_a_model_cannot_do_is_refused(arch: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model(arch).save_pretrained(tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    for name, value in settings.items():
        setattr(hf_config, name, value)
    with pytest.raises(ValueError, match=message):
        load_model(tiny_vllm_config(str(tmp_path), hf_config))
