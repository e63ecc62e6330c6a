"""The user face on the real SmolLM2-135M-Instruct: generate, chat, stream, seeds, stops, log-probabilities, shell."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from minivllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=256 << 20, max_model_len=1024, max_num_seqs=16)


def all_blocks_free(llm: LLM) -> bool:
    manager = llm.llm_engine.scheduler.kv_cache_manager
    manager.check_integrity()
    return manager.block_pool.get_num_free_blocks() == llm.llm_engine.kv_cache_config.num_blocks - 1


@pytest.fixture(autouse=True)
def _nothing_left_behind(llm: LLM):
    yield
    assert all_blocks_free(llm)
    assert not llm.llm_engine.has_unfinished_requests()


def test_generate_one_and_many(llm: LLM) -> None:
    one = llm.generate(CAPITAL, GREEDY, use_tqdm=False)
    assert "Paris" in one[0].outputs[0].text
    assert one[0].prompt == CAPITAL
    assert one[0].prompt_token_ids == llm.get_tokenizer().encode(CAPITAL)
    assert one[0].outputs[0].finish_reason == "length"
    many = llm.generate([CAPITAL, [504, 2], {"prompt": "Two plus two is"}, {"prompt_token_ids": [504, 2]}], GREEDY)
    assert many[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert many[1].outputs[0].token_ids == many[3].outputs[0].token_ids
    assert [output.prompt for output in many] == [CAPITAL, None, "Two plus two is", None]
    assert llm.generate([504, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == many[1].outputs[0].token_ids


def test_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate([CAPITAL] * 3, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]


def test_chat_stops_at_the_end_of_its_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello in one short sentence."}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None  # ended by eos, not by a stop string or stop token
    assert "<|im_end|>" not in output.outputs[0].text
    both = llm.chat([messages, messages], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert len(both) == 2


def test_stream_grows_and_ends_equal_to_generate(llm: LLM) -> None:
    texts, last = [], None
    for last in llm.stream(CAPITAL, GREEDY):
        texts.append(last.outputs[0].text)
    assert last is not None
    assert last.finished
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert len(texts) == GREEDY.max_tokens
    assert last.outputs[0].token_ids == llm.generate(CAPITAL, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_two_streams_read_in_turn(llm: LLM) -> None:
    first, second = llm.stream(CAPITAL, GREEDY), llm.stream("Two plus two is", GREEDY)
    next(first)
    next(second)
    assert list(first)[-1].finished
    assert list(second)[-1].finished


def test_stop_strings_across_tokens_are_not_printed(llm: LLM) -> None:
    free = llm.generate(CAPITAL, SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)[0].outputs[0].text
    stop = free[3:9]
    stopped = llm.generate(CAPITAL, SamplingParams(temperature=0.0, max_tokens=24, stop=stop), use_tqdm=False)[0]
    assert stopped.outputs[0].text == free[: free.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    kept = llm.generate(CAPITAL, params, use_tqdm=False)[0]
    assert kept.outputs[0].text == free[: free.index(stop) + len(stop)]


def test_stop_token_ids_and_bad_words(llm: LLM) -> None:
    plain = llm.generate(CAPITAL, GREEDY, use_tqdm=False)[0].outputs[0]
    target = plain.token_ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[target])
    stopped = llm.generate(CAPITAL, params, use_tqdm=False)[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == target
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(target) + 1]
    params = SamplingParams(temperature=0.0, max_tokens=16, bad_words=["Paris"])
    assert "Paris" not in llm.generate(CAPITAL, params, use_tqdm=False)[0].outputs[0].text


def test_seeds_do_not_depend_on_batch_mates(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=12, ignore_eos=True)
    alone = llm.generate(CAPITAL, seeded, use_tqdm=False)[0].outputs[0].token_ids
    mates = [SamplingParams(temperature=0.7, max_tokens=9, top_p=0.9), seeded, SamplingParams(seed=1, max_tokens=3)]
    together = llm.generate(["Once", CAPITAL, "A long time ago"], mates, use_tqdm=False)
    assert together[1].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, seed=43, max_tokens=12, ignore_eos=True)
    assert llm.generate(CAPITAL, other, use_tqdm=False)[0].outputs[0].token_ids != alone


def test_n_samples(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    output = llm.generate(CAPITAL, params, use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    again = llm.generate(CAPITAL, params, use_tqdm=False)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    """Against a full forward of the same model by Transformers' definition: log_softmax of the last position."""
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate(CAPITAL, params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    total = 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank == 1  # greedy
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
        assert len(entry) == 2  # the sampled token is one of the top two
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry
        assert entry[token].logprob <= 0.0
    # The prompt's own log-probabilities do not depend on how it is cut into chunks, nor on the prefix cache.
    assert output.num_cached_tokens == 0
    chunked = LLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=64 << 20, max_model_len=256, max_num_seqs=2,
                  max_num_batched_tokens=2)  # fmt: skip
    again = chunked.generate(CAPITAL, params, use_tqdm=False)[0]
    for ours, theirs in zip(output.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True):  # type: ignore[index]
        assert ours is not None
        assert theirs is not None
        assert {t: e.rank for t, e in ours.items()} == {t: e.rank for t, e in theirs.items()}
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_greedy_equals_transformers_on_the_real_weights(llm: LLM) -> None:
    from transformers import LlamaForCausalLM

    from minivllm.models.loader import resolve_model, weight_stream

    config = llm.llm_engine.vllm_config.model_config.hf_config
    twin = LlamaForCausalLM(config).eval()
    twin.load_state_dict(dict(weight_stream(resolve_model("smollm2-135m"), config)), strict=False)
    twin.tie_weights()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [CAPITAL, "def fibonacci(n):", "Water boils at"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        with torch.no_grad():
            made = twin.generate(ids, do_sample=False, min_new_tokens=24, max_new_tokens=24, pad_token_id=2)
        assert output.outputs[0].token_ids == made[0, ids.shape[1] :].tolist()


def test_the_shell_command() -> None:
    command = [sys.executable, "-m", "minivllm", "--max-tokens", "8", "--max-model-len", "256", "Say hi."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip()
    assert "tok/s" in done.stderr
    bad = subprocess.run([*command[:3], "--model", "nowhere", "x"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert "nowhere" in bad.stderr
