"""Random requests, aborts and pools: after every step nothing is lost, shared or written twice, and all of it ends."""

from __future__ import annotations

import random
from itertools import product

import pytest
from core.tiny_runner import BLOCK, FULL, MAMBA, TinyRunner, make_request, make_scheduler, random_prompt, sliding

from minivllm.core.kv_cache_interface import KVCacheSpec
from minivllm.core.scheduler import Scheduler
from minivllm.request import Request, RequestStatus

GROUPS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "full+sliding": (FULL, sliding(6)),
    "full+mamba": (FULL, MAMBA),
}
STEPS = 250  # a case, before the queue is drained
LONGEST = 40  # max_model_len


def random_scheduler(rng: random.Random, caching: bool, specs: tuple[KVCacheSpec, ...], policy: str) -> Scheduler:
    """Pools from too small for some requests to roomy for a few."""
    chunked = rng.random() < 0.75
    return make_scheduler(
        rng.randint(6, 10) * len(specs),
        *specs,
        max_model_len=LONGEST,
        caching=caching,
        retention=rng.choice([None, 0, 2 * BLOCK] if len(specs) > 1 else [None, 0]),
        policy=policy,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=rng.choice([8, 13, 24]) if chunked else LONGEST,
        max_num_seqs=rng.choice([3, 8]),
        max_num_active_seqs=rng.choice([None, 2, 5]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        scheduler_reserve_full_isl=rng.random() < 0.6,
        watermark=rng.choice([0.0, 0.1]),
    )


def random_request(rng: random.Random, scheduler: Scheduler, number: int) -> Request:
    return make_request(
        scheduler,
        f"r{number}",
        random_prompt(rng, LONGEST - 1 if rng.random() < 0.1 else LONGEST // 2),
        max_tokens=rng.randint(1, 16),
        min_tokens=rng.randint(0, 1),
        stop_token_ids=[3],
        arrival_time=float(number // 2),  # ties
        priority=rng.randrange(3),
        cache_salt=rng.choice([None, None, "salt"]),
    )


@pytest.mark.parametrize(
    ("caching", "specs", "policy", "seed"),
    [
        pytest.param(caching, specs, policy, seed, id=f"{name}-{policy}-{'cached' if caching else 'plain'}-{seed}")
        for caching, (name, specs), policy, seed in product(
            (False, True), GROUPS.items(), ("fcfs", "priority"), range(2)
        )
    ],
)
def test_random_steps(caching: bool, specs: tuple[KVCacheSpec, ...], policy: str, seed: int) -> None:
    rng = random.Random(f"{caching} {len(specs)} {policy} {seed}")
    scheduler = random_scheduler(rng, caching, specs, policy)
    runner = TinyRunner(scheduler, sample=lambda request_id, tokens: rng.choice([0, 0, 1, 1, 1, 3]))
    requests: dict[str, Request] = {}
    aborted: set[str] = set()

    def abort(chance: float) -> None:
        alive = list(scheduler.requests)
        if alive and rng.random() < chance:
            gone = rng.sample(alive, rng.randint(1, min(2, len(alive))))
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
            aborted.update(gone)

    for _ in range(STEPS):
        if rng.random() < 0.35 and len(scheduler.requests) < 12:
            for _ in range(rng.randint(1, 3)):
                request = random_request(rng, scheduler, len(requests))
                requests[request.request_id] = request
                scheduler.add_request(request)
        abort(0.05)
        runner.step()
        if rng.random() < 0.02:
            held = bool(scheduler.running)
            assert scheduler.reset_prefix_cache() is not held
    runner.run(limit=1000)

    assert set(runner.finished) | aborted == set(requests)
    for request_id, item in runner.finished.items():
        request, tokens = requests[request_id], runner.outputs[request_id]
        assert list(request.output_token_ids) == tokens
        if item.finish_reason == "length":
            limit = min(request.sampling_params.max_tokens or LONGEST, LONGEST - request.num_prompt_tokens)
            assert len(tokens) == limit
        elif item.finish_reason == "stop":
            assert (item.stop_reason, tokens[-1]) == (3, 3)
        else:
            assert item.finish_reason == "error"
            assert -(-request.num_tokens // BLOCK) * len(specs) >= scheduler.kv_cache_config.num_blocks - 1
        assert 3 not in tokens[:-1]
    # The run has to have met what it is for.
    assert len(requests) > 50
    assert any(output.preempted_req_ids for output in runner.steps)
    assert any(output.scheduled_cached_reqs.resumed_req_ids for output in runner.steps)
    if caching:
        assert runner.num_hits
