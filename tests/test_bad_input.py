"""What cannot run is refused with the value, the limit and the remedy; others go on and every block comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import CacheConfig, SchedulerConfig
from tests.models.tiny import save_tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=64, num_gpu_blocks_override=20, max_num_seqs=4, block_size=4)


@pytest.fixture(autouse=True)
def _engine_survives(llm: LLM) -> Any:
    """After every refusal here the engine answers the next request and holds no block."""
    yield
    output = llm.generate([5, 6, 7], PARAMS, use_tqdm=False)[0]
    assert output.finished
    assert len(output.outputs[0].token_ids) == 4
    manager = llm.llm_engine.scheduler.kv_cache_manager
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == llm.llm_engine.kv_cache_config.num_blocks - 1
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.llm_engine.output_processor) == 0


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([], ValueError, "empty"),
        (list(range(3, 67)), ValueError, r"64 tokens.*max_model_len=64"),
        ([5, 10_000_000], ValueError, r"10000000 at position 1.*vocabulary"),
        ([5, -1], ValueError, r"-1 at position 1"),
        ([5, 2.5], TypeError, r"2\.5"),
        ([5, True], TypeError, "True"),
        (b"bytes", TypeError, "bytes"),
        ({"text": "hi"}, ValueError, "prompt_token_ids"),
        ({"prompt_token_ids": [5], "temperature": 1}, ValueError, "temperature"),
        ("text without a tokenizer", ValueError, "tokenizer"),
        (None, TypeError, "None"),
    ],
)
def test_prompts(llm: LLM, prompt: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        llm.generate([[5, 6], prompt], PARAMS, use_tqdm=False)
    with pytest.raises(error, match=says):
        llm.llm_engine.add_request("x", prompt, PARAMS)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], PARAMS, use_tqdm=False) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": -0.1}, {"max_tokens": 0},
        {"min_tokens": -1}, {"n": 0}, {"presence_penalty": 3.0}, {"frequency_penalty": -3.0},
        {"repetition_penalty": 0.0}, {"logprobs": -2}, {"temperature": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [{"max_tokens": 2.5}, {"top_k": 1.5}, {"n": "2"}, {"seed": 1.5}], ids=str)
def test_parameters_of_a_wrong_type(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        SamplingParams(**settings)


def test_unknown_settings_are_type_errors(folder: Path) -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="blocksize"):
        LLM(str(folder), blocksize=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("settings", [{"allowed_token_ids": [9_999_999]}, {"logit_bias": {9_999_999: 1.0}}], ids=str)
def test_token_ids_of_parameters_outside_the_vocabulary(llm: LLM, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="9999999"):
        llm.generate([5], SamplingParams(**settings), use_tqdm=False)


def test_lists_of_another_length(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 entries for 2 prompts"):
        llm.generate([[5], [6]], [PARAMS] * 3, use_tqdm=False)


def test_a_duplicate_request_id(llm: LLM) -> None:
    llm.llm_engine.add_request("same", [5], PARAMS)
    with pytest.raises(ValueError, match="'same' is already running"):
        llm.llm_engine.add_request("same", [6], PARAMS)
    llm.llm_engine.abort_request("same")


def test_abort_frees_everything(llm: LLM) -> None:
    engine = llm.llm_engine
    for index in range(4):
        engine.add_request(f"r{index}", [5 + index] * 6, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    outputs = engine.abort_request(["r0", "r2", "never-seen"])
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
    assert all(output.finished for output in outputs)
    left = {output.request_id for output in engine.step()}
    assert left == {"r1", "r3"}
    engine.abort_request(["r1", "r3"])


def test_a_failing_step_frees_every_block(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.model_runner, "_sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([list(range(5, 25)), [7]], PARAMS, use_tqdm=False)
    # The blocks of the step that failed were never written: nothing may find them in the prefix cache.
    assert llm.generate(list(range(5, 25)), PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


def test_an_unread_stream_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"block_size": 2.5}, "block_size must be an integer"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_seqs"),
        ({"scheduling_policy": "random"}, "random"),
        ({"dtype": "float8"}, "float8"),
        ({"kv_cache_memory_bytes": 100}, "memory"),
        ({"num_gpu_blocks_override": 3, "max_model_len": 64}, "max_model_len"),
        ({"max_model_len": -5}, "-5"),
        ({"attention_backend": "FLASH"}, "TORCH"),
        ({"device": "warp"}, "warp"),
    ],
    ids=str,
)
def test_engine_settings(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        LLM(str(folder), **({"dtype": "float32"} | settings))


def test_configs_check_themselves() -> None:
    with pytest.raises(ValueError, match="watermark"):
        SchedulerConfig(watermark=1.0)
    with pytest.raises(ValueError, match="num_gpu_blocks_override"):
        CacheConfig(num_gpu_blocks_override=1)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match="smollm2-135m"):
        LLM(str(tmp_path / "nothing"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing more")
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        LLM(str(broken))
