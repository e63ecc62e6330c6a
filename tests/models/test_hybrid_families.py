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
from minivllm.models.registry import ModelRegistry

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {}),
    "cohere2 biases": ("cohere2", {"attention_bias": True, "sliding_window": 5, "layer_norm_eps": 1e-2}),
    "cohere2 not tied": ("cohere2", {"tie_word_embeddings": False}),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n no sharing": ("gemma3n_text", {"num_kv_shared_layers": 0, "altup_active_idx": 1}),
    "gemma3n no scale": ("gemma3n_text", {"altup_correct_scale": False, "attention_bias": True, "sliding_window": 5}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss all experts": ("gpt_oss", {"num_experts_per_tok": 5, "sliding_window": 5}),
    "gpt_oss one expert, no biases": ("gpt_oss", {"num_experts_per_tok": 1, "attention_bias": False}),
    "gpt_oss gate": ("gpt_oss", {"swiglu_limit": 0.5, "swiglu_alpha": 0.7}),
    "llama4": ("llama4_text", {}),
    "llama4 plain": ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True}),
    "llama4 experts everywhere": ("llama4_text", {"interleave_moe_layer_step": 1, "attention_chunk_size": 7}),
    "llama4 dense": ("llama4_text", {"moe_layers": [], "rms_norm_eps": 1e-2}),
    "llama4 no chunks": ("llama4_text", {"attention_chunk_size": None, "tie_word_embeddings": True}),
    "llama4 scaled rope": ("llama4_text", {"rope_parameters": LLAMA3_ROPE}),
    "gpt_oss layers": ("gpt_oss", {"layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 2]}),
}
ARCHS = ["cohere2", "gemma3n_text", "gpt_oss", "llama4_text"]
LENGTHS = [1, 4, 17, 39, 58]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [random.Random(length).choices(range(3, 160), k=length) for length in LENGTHS]


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


def poisoned(tiny: Path, preempted: list[str] | None = None, **settings: Any) -> LLM:
    """An engine in whose pages every slot holds NaN until it is written, and again once its block is freed.

    Blocks that are kept for the prefix cache keep what they hold. preempted: gets the ids of preempted requests.
    """
    llm = LLM(str(tiny), **{"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "block_size": 4} | settings)
    scheduler, layers = llm.llm_engine.scheduler, llm.llm_engine.model_runner.layers.values()
    pool, schedule = scheduler.kv_cache_manager.block_pool, scheduler.schedule

    def poisoning_schedule() -> Any:
        output = schedule()
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash is None]
        for layer in layers:
            layer.kv_cache[free] = float("nan")
        if preempted is not None:
            preempted.extend(output.preempted_req_ids)
        return output

    for layer in layers:
        layer.kv_cache.fill_(float("nan"))
    scheduler.schedule = poisoning_schedule  # type: ignore[method-assign]
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
    assert generate(poisoned(tiny, block_size=block_size, enable_prefix_caching=False)) == expected


@pytest.mark.parametrize("budget", [7, 24])
def test_chunked(tiny: Path, expected: list[list[int]], budget: int) -> None:
    assert generate(poisoned(tiny, max_num_batched_tokens=budget, max_num_seqs=5)) == expected


def test_preempted_and_resumed(tiny: Path, expected: list[list[int]]) -> None:
    preempted: list[str] = []
    settings = {"num_gpu_blocks_override": 80, "kv_cache_memory_bytes": None, "max_model_len": 70}
    settings |= {"max_num_batched_tokens": 64, "max_num_seqs": 15}
    llm = poisoned(tiny, preempted, enable_prefix_caching=False, **settings)
    assert generate(llm, PROMPTS * 3) == expected * 3
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
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 4"),
        ("cohere2", {"sliding_window": None}, "layer 0 is a sliding_attention layer, but .*sliding_window"),
        ("cohere2", {"sliding_window": 0}, "sliding_window.* must be at least 1"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok must be 1 in Llama 4, got 2"),
        ("llama4_text", {"attention_chunk_size": 0}, "layer 0 is a chunked_attention layer, but attention_chunk_size"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale must be at least 1 token, got 0"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for num_hidden_layers=4"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer 0 is a 'sliding_attention' layer"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer 0 is a 'chunked_attention' layer"),
        ("gemma3n_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers must be 0 to 5, .* got 6"),
        ("gemma3n_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be 0 to 5, .* got -1"),
        ("gemma3n_text", {"num_kv_shared_layers": 4}, "layer 2 is a full_attention layer .* lower"),
        ("gemma3n_text", {"altup_active_idx": 3}, "altup_active_idx must be 0 to 2, .* got 3"),
        ("gemma3n_text", {"activation_sparsity_pattern": [1.0] * 6}, "from 0 to below 1, got 1.0"),
    ],
)
def test_what_a_model_cannot_do_is_refused(arch: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_model(arch).save_pretrained(tmp_path)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    for name, value in settings.items():
        setattr(hf_config, name, value)
    with pytest.raises(ValueError, match=message):
        load_model(tiny_vllm_config(str(tmp_path), hf_config))


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("llama4_text", "model.layers.1.feed_forward.experts.gate_up_proj"),
    ],
)
def test_weights_fit_one_to_one(arch: str, name: str) -> None:
    """Stacked experts and sinks are filled whole; what is missing, left over or of another shape is named."""
    reference = tiny_model(arch)
    cls = ModelRegistry.resolve_model_cls([type(reference).__name__])
    model: Any = cls(vllm_config=tiny_vllm_config(arch, reference.config))
    weights = reference.state_dict()
    model.load_weights(weights.items())
    assert torch.equal(model.get_parameter(name), weights[name])
    with pytest.raises(ValueError, match=f"1 of .* are missing: '{name}'"):
        model.load_weights((key, value) for key, value in weights.items() if key != name)
    with pytest.raises(ValueError, match=f"weight '{name}.extra' of shape .* has no place in"):
        model.load_weights([(f"{name}.extra", weights[name])])
    with pytest.raises(ValueError, match=f"weight '{name}' has shape .*, but .* needs"):
        model.load_weights([(name, weights[name][None])])


def test_gemma3n_suffix_has_no_pages_of_its_own(tmp_path: Path) -> None:
    """Sharing layers join the group of the layer that they read, alias its pages, and pass over K and V weights."""
    llm = LLM(str(save_tiny("gemma3n_text", tmp_path)), dtype="float32", kv_cache_memory_bytes=1 << 20, block_size=4)
    runner, targets = llm.llm_engine.model_runner, {3: 1, 4: 1, 5: 2}
    name = "model.layers.{}.self_attn.attn".format
    for reader, writer in targets.items():
        assert runner.layers[name(reader)].kv_cache.data_ptr() == runner.layers[name(writer)].kv_cache.data_ptr()
    placed = {layer for tensor in llm.llm_engine.kv_cache_config.kv_cache_tensors for layer in tensor.layers}
    assert placed == {name(index) for index in range(3)}


def test_gemma3n_passes_over_what_sharing_layers_do_not_project() -> None:
    reference = tiny_model("gemma3n_text")
    cls = ModelRegistry.resolve_model_cls([type(reference).__name__])
    model: Any = cls(vllm_config=tiny_vllm_config("gemma3n_text", reference.config))
    weights = list(reference.state_dict().items())
    model.load_weights([*weights, ("model.layers.4.self_attn.k_proj.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"weight 'model.layers.2.self_attn.k_proj.weight' has shape \(1,\)"):
        model.load_weights([*weights, ("model.layers.2.self_attn.k_proj.weight", torch.zeros(1))])


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16(arch: str, tmp_path: Path) -> None:
    """In bfloat16 the logits are about as near to float32's as those of Transformers in bfloat16 are."""
    save_tiny(arch, tmp_path, seed=5)
    hf_config = load_hf_config(resolve_model(str(tmp_path)))
    vllm_config = tiny_vllm_config(str(tmp_path), hf_config, dtype="bfloat16")
    logits = prefill(load_model(vllm_config), vllm_config, PROMPTS[2:3])[0]
    assert logits.dtype == torch.bfloat16
    reference = reference_model(tmp_path)
    with torch.no_grad():
        exact = reference(torch.tensor(PROMPTS[2:3])).logits[0]
        theirs = reference.to(torch.bfloat16)(torch.tensor(PROMPTS[2:3])).logits[0]

    def error(rounded: torch.Tensor) -> float:  # the median, since a router's choice may flip for a token or two
        return float(((rounded.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    assert error(logits) < 1.5 * error(theirs) < 0.15
