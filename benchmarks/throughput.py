"""Tokens a second of minivllm on four seeded workloads, and of Transformers' `generate` on the same weights.

W1: 1 request, 128 tokens in, 128 out. W2: 64 requests, 16-256 in, 16-128 out. W3: 32 requests that share a prefix of
256 tokens and bring 32 of their own, 32 out. W4: 8 requests, 1,024 in, 8 out. Greedy, eos ignored, model load excluded;
one warm-up, then the median of the runs. Prints JSON.

    python benchmarks/throughput.py --model smollm2-135m --dtype bfloat16 --runs 3 [--hf] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from minivllm import LLM, SamplingParams

Work = list[tuple[list[int], int]]  # (prompt token ids, tokens to generate)


def workload(name: str, vocab_size: int) -> Work:
    """The same requests for every engine and every run."""
    rng = random.Random(name)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab_size - 100) for _ in range(count)]

    if name == "W1":
        return [(ids(128), 128)]
    if name == "W2":
        return [(ids(rng.randint(16, 256)), rng.randint(16, 128)) for _ in range(64)]
    if name == "W3":
        shared = ids(256)
        return [(shared + ids(32), 32) for _ in range(32)]
    if name == "W4":
        return [(ids(1024), 8) for _ in range(8)]
    raise ValueError(f"workload {name!r} is not one of W1, W2, W3, W4")


def timed(run: Callable[[], None], runs: int) -> list[float]:
    """Seconds of each of `runs` runs, after one that is not counted."""
    seconds = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def minivllm_seconds(llm: LLM, work: Work, runs: int) -> list[float]:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in work]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]

    def run() -> None:
        # Each run starts cold: a prefix found from the last run would not be the engine's own work.
        assert llm.llm_engine.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        assert made == [count for _, count in work], made

    return timed(run, runs)


@torch.inference_mode()
def transformers_seconds(model: torch.nn.Module, work: Work, runs: int) -> list[float]:
    """`generate` in batches of 16, longest first, left-padded: what its users would do."""
    ordered = sorted(work, key=lambda item: -len(item[0]))
    batches = [ordered[start : start + 16] for start in range(0, len(ordered), 16)]

    def run() -> None:
        for batch in batches:
            width = max(len(prompt) for prompt, _ in batch)
            input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            longest = max(count for _, count in batch)
            # max == min length: eos is ignored, as in the other engine; the batch runs until its longest is done
            model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )

    return timed(run, runs)


def transformers_twin(llm: LLM) -> torch.nn.Module:
    """Transformers' own model holding the very weights that `llm` loaded."""
    from transformers import AutoModelForCausalLM

    from minivllm.models.loader import resolve_model, weight_stream

    config = llm.llm_engine.vllm_config.model_config
    dtype = getattr(torch, config.dtype)
    model = AutoModelForCausalLM.from_config(config.hf_config, dtype=dtype)
    state = {name: tensor.to(dtype) for name, tensor in weight_stream(resolve_model(config.model), config.hf_config)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit Transformers' model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def figures(work: Work, seconds: list[float]) -> dict[str, float]:
    median = statistics.median(seconds)
    tokens_in, tokens_out = sum(len(prompt) for prompt, _ in work), sum(count for _, count in work)
    return {
        "seconds": round(median, 4),
        "out_tok_s": round(tokens_out / median, 1),
        "total_tok_s": round((tokens_in + tokens_out) / median, 1),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", default="W1,W2,W3,W4")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--hf", action="store_true", help="also time Transformers' generate (minutes)")
    parser.add_argument("--out", default=None, help="write the JSON here too")
    args = parser.parse_args()

    started = time.perf_counter()
    cache_bytes = 512 << 20
    llm = LLM(args.model, dtype=args.dtype, kv_cache_memory_bytes=cache_bytes, max_model_len=2048)
    load_seconds = time.perf_counter() - started
    vocab_size = llm.llm_engine.vllm_config.model_config.hf_config.vocab_size
    names = args.workloads.split(",")
    result: dict[str, object] = {
        "model": args.model,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "load_seconds": round(load_seconds, 2),
    }
    ours = {name: figures(work := workload(name, vocab_size), minivllm_seconds(llm, work, args.runs)) for name in names}
    weights = sum(
        p.numel() * getattr(torch, args.dtype).itemsize for p in llm.llm_engine.model_runner.model.parameters()
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    result["minivllm"] = ours
    result["peak_mib"] = round(peak / 2**20)
    result["peak_over_weights_and_cache_mib"] = round((peak - weights - cache_bytes) / 2**20)
    if args.hf:
        twin = transformers_twin(llm)
        theirs = {}
        for name in names:
            work = workload(name, vocab_size)
            theirs[name] = figures(work, transformers_seconds(twin, work, args.runs))
        result["transformers_generate"] = theirs
        result["ratio"] = {n: round(theirs[n]["seconds"] / ours[n]["seconds"], 2) for n in names}
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
