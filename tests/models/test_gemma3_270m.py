"""The real Gemma 3 270M, where its package is installed: greedy tokens, beyond every window, are Transformers' own."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from models.tiny import tiny_vllm_config

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.engine import LLMEngine
from minivllm.models.gguf import GGUFStream
from minivllm.models.loader import ModelFiles, load_hf_config, resolve_model
from minivllm.sampling.params import SamplingParams

CAPITAL = [2, 818, 5279, 529, 7001, 563]  # "<bos>The capital of France is"
TOKENS = 12


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    try:
        return resolve_model("gemma3-270m")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    """Transformers' model in float32, filled from the same dequantized tensors."""
    from transformers import Gemma3ForCausalLM

    hf_config = load_hf_config(files)
    with torch.device("meta"):
        model = Gemma3ForCausalLM(hf_config).eval()
    weights = dict(GGUFStream(files.path, hf_config))
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(hf_config)
    inner.embed_tokens.embed_scale = torch.tensor(hf_config.hidden_size**0.5)
    return model


def test_config(files: ModelFiles) -> None:
    config = load_hf_config(files)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (18, 4, 1)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (640, 256, 262144)
    assert (config.sliding_window, config.query_pre_attn_scalar, config.tie_word_embeddings) == (512, 256, True)
    assert [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()} == {
        "full_attention": 1e6,
        "sliding_attention": 1e4,
    }


def test_greedy_tokens_equal_transformers(reference: Any) -> None:
    """A short prompt, one just above a window, and one of more than 2.5 windows, together and in chunks."""
    rng = random.Random(3)
    story = [rng.choice(CAPITAL[1:]) if rng.random() < 0.5 else rng.randrange(1000, 50000) for _ in range(1299)]
    prompts = [CAPITAL, [2, *story[:516]], [2, *story]]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
            )
        expected.append(ids[0, len(prompt) :].tolist())
    hf_config = reference.config
    vllm_config = tiny_vllm_config("gemma3-270m", hf_config, block_size=16, max_model_len=1536)
    vllm_config = dataclasses.replace(
        vllm_config,
        cache_config=CacheConfig(num_gpu_blocks_override=700),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=4),
    )
    engine = LLMEngine(vllm_config)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert [answers[str(index)] for index in range(len(prompts))] == expected
