"""2,000 random engine steps on real tiny models: arrivals, aborts, preemptions, shared prefixes, a pool far too small.

After every step the whole state is checked: reference counts, owners, free + used = total - 1, and that the runner's
tables are the manager's. In the end every request has the tokens that it gets alone, and every block is free.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from models.tiny import save_tiny

from minivllm import LLM, SamplingParams

STEPS = 1000
NUM_BLOCKS = {"llama": 17, "qwen2": 42}
# Qwen2 with two full and one sliding layer: three KV-cache groups, two of them alike.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
}


@pytest.mark.parametrize("arch", MODELS)
def test_random_steps(arch: str, tmp_path: Path) -> None:
    save_tiny(arch, tmp_path, seed=5, **MODELS[arch])
    common: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 48}
    llm = LLM(
        str(tmp_path), **common, num_gpu_blocks_override=NUM_BLOCKS[arch], max_num_seqs=6, max_num_batched_tokens=20,
        scheduling_policy="priority",
    )  # fmt: skip
    engine, rng = llm.llm_engine, random.Random(13)
    assert len(engine.kv_cache_config.kv_cache_groups) == (3 if MODELS[arch] else 1)
    prompts: dict[str, tuple[list[int], SamplingParams]] = {}
    finished: dict[str, list[int]] = {}
    stems = [[rng.randrange(3, 160) for _ in range(30)] for _ in range(3)]
    preempted = aborted = hits = 0

    for step in range(STEPS):
        live = [key for key in prompts if key not in finished]
        if len(live) < 9 and rng.random() < 0.4:
            stem = rng.choice(stems)[: rng.randint(1, 30)]
            prompt = stem + [rng.randrange(3, 160) for _ in range(rng.randint(0, 6))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 10), ignore_eos=True)
            engine.add_request(str(step), prompt, params, priority=rng.randrange(3))
            prompts[str(step)] = (prompt, params)
        if live and rng.random() < 0.03:
            victim = rng.choice(live)
            engine.abort_request(victim)
            del prompts[victim]
            aborted += 1
        scheduled = engine.scheduler.schedule
        seen: list[Any] = []

        def watched(schedule: Any = scheduled, into: list[Any] = seen) -> Any:
            into.append(schedule())
            return into[-1]

        engine.scheduler.schedule = watched  # type: ignore[method-assign]
        outputs = engine.step()
        engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
        preempted += len(seen[0].preempted_req_ids)
        for output in outputs:
            if output.finished:
                assert output.error is None
                finished[output.request_id] = output.outputs[0].token_ids
                hits += output.num_cached_tokens > 0
        check(engine)

    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        check(engine)
    manager = engine.scheduler.kv_cache_manager
    assert manager.num_free_blocks == engine.kv_cache_config.num_blocks - 1
    assert min(preempted, aborted, hits) > 10, (preempted, aborted, hits)  # or the test would prove little

    alone = LLM(str(tmp_path), **common, enable_prefix_caching=False, kv_cache_memory_bytes=4 << 20, max_num_seqs=1)
    for key in rng.sample(sorted(finished), 40):
        prompt, params = prompts[key]
        assert finished[key] == alone.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def check(engine: Any) -> None:
    manager, batch = engine.scheduler.kv_cache_manager, engine.model_runner.input_batch
    manager.check_integrity()
    batch.check_integrity()
    used: set[int] = set()
    for request in engine.scheduler.running:
        for group, ids in enumerate(manager.get_block_ids(request.request_id)):
            used.update(block for block in ids if block)
            state = engine.model_runner.requests[request.request_id].block_ids[group]
            # The runner's table keeps the ids of blocks that have left a window; below it nothing reads them.
            assert len(state) == len(ids)
            assert all(ours == theirs or theirs == 0 for ours, theirs in zip(state, ids, strict=True))
            row = batch.req_id_to_index.get(request.request_id)
            assert row is None or batch.block_table[group].get_row(row) == state
    assert len(used) + manager.num_free_blocks == engine.kv_cache_config.num_blocks - 1
