"""The runner keeps its batch in line with the scheduler, whatever order requests come and go in."""

from __future__ import annotations

import pytest

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.engine import LLMEngine
from minivllm.models.llama import LlamaForCausalLM
from minivllm.sampling.params import SamplingParams
from tests.models.tiny import tiny_config, tiny_model


@pytest.fixture
def engine() -> LLMEngine:
    config = VllmConfig(
        model_config=ModelConfig(model="none", hf_config=tiny_config("llama"), dtype="float32", max_model_len=64),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks_override=40),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
    )
    model = LlamaForCausalLM(vllm_config=config)
    model.load_weights(iter(tiny_model("llama", seed=1).state_dict().items()))
    return LLMEngine(config, model=model)


def run(engine: LLMEngine, request_id: str, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add_request(request_id, prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.parametrize("aborted", [False, True])
def test_an_id_may_be_used_again_at_once(engine: LLMEngine, aborted: bool) -> None:
    """The step that hears of the first request's end may already run the second of the same id."""
    prompts = [[5, 6, 7, 8, 9], [20, 21], [5, 6, 7, 8, 40, 41, 42]]
    expected = [run(engine, str(index), prompt) for index, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, expected, strict=True):
        if aborted:
            engine.add_request("x", [30, 31, 32, 33, 34, 35], SamplingParams(max_tokens=5))
            engine.step()
            engine.abort_request("x")
        assert run(engine, "x", prompt) == answer
        engine.model_runner.input_batch.check_integrity()
    engine.scheduler.kv_cache_manager.check_integrity()
