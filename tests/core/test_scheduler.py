"""The scheduler's rules, one by one; whole runs are compared with vLLM's in tests/golden/test_scheduler_trace.py."""

from __future__ import annotations

from typing import Any

import pytest
from core.tiny_runner import BLOCK, FULL, MAMBA, TinyRunner, make_request, make_scheduler, sliding

from minivllm.core.request_queue import create_request_queue
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.request import Request, RequestStatus
from minivllm.sampling.params import SamplingParams


def start(scheduler: Scheduler | TinyRunner, **prompts: list[int] | int) -> TinyRunner:
    """A runner whose scheduler has these requests waiting; a number n is a prompt of n tokens of its own."""
    runner = scheduler if isinstance(scheduler, TinyRunner) else TinyRunner(scheduler)
    for request_id, prompt in prompts.items():
        arrival = float(len(runner.scheduler.requests))
        runner.scheduler.add_request(make_request(runner.scheduler, request_id, prompt, arrival_time=arrival))
    return runner


def counts(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


# --- the budget and its limits ---------------------------------------------------------------------------------------


def test_one_budget_for_prefill_and_decode() -> None:
    runner = start(make_scheduler(40, max_num_batched_tokens=10), a=3, b=12)
    assert counts(runner.step()) == {"a": 3, "b": 7}
    assert counts(runner.step()) == {"a": 1, "b": 5}
    assert counts(runner.step()) == {"a": 1, "b": 1}
    runner.run()
    assert {name: len(tokens) for name, tokens in runner.outputs.items()} == {"a": 4, "b": 4}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(40, max_model_len=16, max_num_batched_tokens=16, enable_chunked_prefill=False)
    runner = start(scheduler, a=10, b=8, c=2)
    assert counts(runner.step()) == {"a": 10}  # c would fit, but it may not overtake b
    assert counts(runner.step()) == {"a": 1, "b": 8, "c": 2}


def test_a_long_prefill_is_cut_while_others_are_there() -> None:
    runner = start(make_scheduler(60, max_num_batched_tokens=40, long_prefill_token_threshold=8), a=30, b=4)
    assert counts(runner.step()) == {"a": 8, "b": 4}
    runner.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert counts(runner.step()) == {"a": 22}


def test_the_adaptive_threshold_is_at_least_a_fair_share() -> None:
    settings: dict[str, Any] = {"long_prefill_token_threshold": 4, "long_prefill_token_threshold_adaptive": True}
    runner = start(make_scheduler(60, max_num_batched_tokens=40, **settings), a=30, b=30)
    assert counts(runner.step()) == {"a": 20, "b": 20}


def test_at_most_max_num_active_seqs_run() -> None:
    runner = start(make_scheduler(60, max_num_seqs=4, max_num_active_seqs=2), a=4, b=4, c=4)
    assert counts(runner.step()) == {"a": 4, "b": 4}
    assert runner.scheduler.get_request_counts() == (2, 1)
    runner.run()


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "admitted"), [(True, ["a"]), (False, ["a", "b"])])
def test_admission_reserves_the_whole_sequence(reserve: bool, admitted: list[str]) -> None:
    # 9 free blocks; a takes 5, b needs 8 for all of it and 1 for its first chunk.
    scheduler = make_scheduler(10, max_num_batched_tokens=24, scheduler_reserve_full_isl=reserve)
    assert list(counts(start(scheduler, a=20, b=32).step())) == admitted


@pytest.mark.parametrize(("watermark", "admitted"), [(0.0, ["a", "b"]), (0.3, ["a"])])
def test_the_watermark_keeps_blocks_free_once_something_runs(watermark: float, admitted: list[str]) -> None:
    scheduler = make_scheduler(10, watermark=watermark)
    assert list(counts(start(scheduler, a=20, b=8).step())) == admitted


def test_the_watermark_never_holds_back_the_first() -> None:
    assert list(counts(start(make_scheduler(10, watermark=0.9), a=20).step())) == ["a"]


@pytest.mark.parametrize("specs", [(FULL,), (FULL, sliding(6))], ids=["full", "full+sliding"])
def test_a_prompt_cached_in_full_leaves_tokens_to_compute(specs: tuple[Any, ...]) -> None:
    """vLLM #11186, #17999: a hit on every block of the prompt would leave a query of length 0."""
    scheduler = make_scheduler(40, *specs, caching=True)
    prompt = list(range(2, 2 + 3 * BLOCK))
    runner = start(start(scheduler, a=prompt).run(), b=prompt)
    output = runner.step()
    assert counts(output) == {"b": BLOCK}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 2 * BLOCK
    runner.run()
    assert runner.finished["b"].num_cached_tokens == 2 * BLOCK


def test_groups_do_not_evict_each_others_hits() -> None:
    """vLLM #44409: blocks hit in one group must be held before another group takes free blocks."""
    scheduler = make_scheduler(12, FULL, sliding(6), caching=True, retention=None)
    prompt = list(range(2, 2 + 4 * BLOCK))
    runner = start(start(scheduler, a=prompt).run(), b=[*prompt, 99])
    output = runner.step()  # the runner reads every slot of the hit
    assert output.scheduled_new_reqs[0].num_computed_tokens == 4 * BLOCK
    runner.run()


def test_a_salt_keeps_prefixes_apart() -> None:
    scheduler = make_scheduler(40, caching=True)
    runner = TinyRunner(scheduler)
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        scheduler.add_request(make_request(scheduler, name, list(range(9)), cache_salt=salt))
        runner.run()
    assert [runner.finished[name].num_cached_tokens for name in "abc"] == [0, 0, 8]


# --- preemption ------------------------------------------------------------------------------------------------------


def test_fcfs_preempts_the_last_and_admits_nobody_in_that_step() -> None:
    scheduler = make_scheduler(7, max_num_seqs=3)  # 6 free blocks
    runner = start(scheduler, a=8, b=8, c=8)
    assert counts(runner.step()) == {"a": 8, "b": 8, "c": 8}
    scheduler.add_request(make_request(scheduler, "d", 1))
    output = runner.step()
    assert output.preempted_req_ids == ["c"]
    assert counts(output) == {"a": 1, "b": 1}
    assert [request.request_id for request in scheduler.waiting] == ["c", "d"]
    preempted = scheduler.requests["c"]
    assert (preempted.status, preempted.num_computed_tokens, preempted.num_preemptions) == (
        RequestStatus.PREEMPTED, 0, 1,
    )  # fmt: skip
    runner.run()
    assert {name: item.finish_reason for name, item in runner.finished.items()} == dict.fromkeys("abcd", "length")


@pytest.mark.parametrize("caching", [False, True])
def test_a_resumed_request_gets_a_new_table(caching: bool) -> None:
    """vLLM #46595, #26385: appended to the old table the new blocks would stand in the wrong places."""
    scheduler = make_scheduler(7, caching=caching, max_num_seqs=3)
    runner = start(scheduler, a=8, b=8, c=8).run()
    resumed = [output for output in runner.steps if output.scheduled_cached_reqs.resumed_req_ids]
    assert resumed
    for output in resumed:
        cached = output.scheduled_cached_reqs
        for req_id, blocks, outputs in zip(cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                assert len(blocks[0]) >= -(-(8 + outputs) // BLOCK)  # all of it, what was computed before included
    # A preempted request must not be told apart from one that ran alone.
    alone = start(make_scheduler(7, caching=caching), c=8).run()
    assert runner.outputs["c"] == alone.outputs["c"]
    assert runner.finished["c"].num_cached_tokens == 0  # of the first admission only


def priority_scheduler(num_blocks: int, priorities: dict[str, int], length: int = 8, **settings: Any) -> TinyRunner:
    scheduler = make_scheduler(num_blocks, policy="priority", **settings)
    for place, (name, priority) in enumerate(priorities.items()):
        scheduler.add_request(
            make_request(scheduler, name, length, max_tokens=12, priority=priority, arrival_time=float(place))
        )
    return TinyRunner(scheduler)


def test_priority_decides_who_starts() -> None:
    runner = priority_scheduler(40, {"a": 2, "b": 0, "c": 1, "d": 0}, max_num_seqs=3)
    assert list(counts(runner.step())) == ["b", "d", "c"]


def test_a_victim_already_scheduled_gives_its_tokens_back() -> None:
    # Running in the order z, a: z is scheduled first, then a lacks a block and z is the less important.
    runner = priority_scheduler(8, {"z": 5})
    runner.step()
    runner.scheduler.add_request(make_request(runner.scheduler, "a", 15, max_tokens=12, priority=0))
    assert counts(runner.step()) == {"z": 1, "a": 15}
    output = runner.step()
    assert output.preempted_req_ids == []
    while not (output := runner.step()).preempted_req_ids:
        assert counts(output) == {"z": 1, "a": 1}
    assert output.preempted_req_ids == ["z"]
    assert counts(output) == {"a": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.req_ids == ["a"]
    runner.run()


def test_the_tokens_given_back_go_to_the_next() -> None:
    runner = priority_scheduler(
        12, {"z": 5}, length=40, max_num_batched_tokens=11, long_prefill_token_threshold=8,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    assert counts(runner.step()) == {"z": 11}
    for name, length in (("a", 3), ("c", 20)):
        request = make_request(runner.scheduler, name, length, max_tokens=3, arrival_time=float(length))
        runner.scheduler.add_request(request)
    assert counts(runner.step()) == {"z": 8, "a": 3}
    assert counts(runner.step()) == {"z": 8, "a": 1, "c": 2}
    output = runner.step()  # z was given 8 of 11; with them back, c gets as many as the threshold lets it
    assert (output.preempted_req_ids, counts(output)) == (["z"], {"a": 1, "c": 8})
    runner.run()


def test_a_victim_leaves_nothing_uncomputed_in_the_cache() -> None:
    """Blocks are cached when slots are given; a victim of the same step never gets to write them.

    In 0.32 its next admission hits them: it would read slots that hold anything, and the runner here would notice.
    """
    settings = {"caching": True, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 8}
    runner = priority_scheduler(12, {"z": 5}, length=40, **settings)  # 11 blocks, z needs 10
    assert counts(runner.step()) == {"z": 16}
    runner.scheduler.add_request(make_request(runner.scheduler, "a", 3, max_tokens=3, priority=0))
    assert counts(runner.step()) == {"z": 8, "a": 3}
    assert counts(runner.step()) == {"z": 8, "a": 1}
    output = runner.step()  # z was given its last 8 tokens, two blocks, when a lacked one
    assert (output.preempted_req_ids, counts(output)) == (["z"], {"a": 1})
    resumed = runner.step().scheduled_cached_reqs
    assert (resumed.resumed_req_ids, resumed.num_computed_tokens) == ({"z"}, [32])
    runner.run()


def test_self_preemption_stops_the_running_loop() -> None:
    """0.32's rule: whoever stands behind it in the queue waits for the next step, free blocks or not."""
    runner = priority_scheduler(8, {"z": 5})
    runner.step()
    runner.scheduler.add_request(make_request(runner.scheduler, "a", 13, max_tokens=12, priority=0))
    runner.step()
    assert [request.request_id for request in runner.scheduler.running] == ["z", "a"]
    while not (output := runner.step()).preempted_req_ids:
        assert counts(output) == {"z": 1, "a": 1}
    # z, first in the queue, needs a fourth block; a needs none, and yet is not looked at.
    assert output.preempted_req_ids == ["z"]
    assert counts(output) == {}
    assert [request.request_id for request in runner.scheduler.running] == ["a"]
    assert counts(runner.step()) == {"a": 1}
    runner.run()


# --- what can never fit ----------------------------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_ends_at_once() -> None:
    """vLLM #39734: it would wait, or preempt itself, for ever."""
    scheduler = make_scheduler(6)
    runner = start(scheduler, a=8)
    runner.step()
    scheduler.add_request(make_request(scheduler, "huge", 24))
    scheduler.add_request(make_request(scheduler, "b", 4))
    assert counts(runner.step()) == {"a": 1, "b": 4}
    error = runner.finished["huge"]
    assert (error.finish_reason, error.new_token_ids) == ("error", [])
    assert error.error is not None
    for part in ("'huge'", "24 tokens", "needs 6", "has 5", "num_gpu_blocks_override", "shorten the prompt"):
        assert part in error.error
    runner.run()
    assert runner.finished["a"].finish_reason == runner.finished["b"].finish_reason == "length"


def test_an_error_alone_is_still_work_to_do() -> None:
    runner = start(make_scheduler(6), huge=24)
    assert runner.scheduler.has_unfinished_requests()
    runner.run()
    assert list(runner.finished) == ["huge"]


def test_a_pool_exactly_full_is_used() -> None:
    """vLLM #47272, #48724: the null block is no capacity; all others are."""
    scheduler = make_scheduler(6)
    scheduler.add_request(make_request(scheduler, "a", 5 * BLOCK - 1, max_tokens=2))
    runner = TinyRunner(scheduler).run()
    assert runner.finished["a"].finish_reason == "length"
    assert len(runner.outputs["a"]) == 2


def test_a_request_that_outgrows_the_pool_keeps_its_tokens() -> None:
    scheduler = make_scheduler(6)
    scheduler.add_request(make_request(scheduler, "a", 5 * BLOCK - 2, max_tokens=20))
    scheduler.add_request(make_request(scheduler, "b", 2, max_tokens=10))
    runner = TinyRunner(scheduler).run()
    assert runner.finished["a"].finish_reason == "error"
    assert len(runner.outputs["a"]) == 3
    assert (runner.finished["b"].finish_reason, len(runner.outputs["b"])) == ("length", 10)


def test_without_reservation_it_fails_where_it_no_longer_fits() -> None:
    scheduler = make_scheduler(
        10, FULL, sliding(5), max_num_batched_tokens=32, scheduler_reserve_full_isl=False, max_model_len=60
    )
    scheduler.add_request(make_request(scheduler, "a", 24, max_tokens=30))
    runner = TinyRunner(scheduler).run()
    assert runner.finished["a"].finish_reason == "error"


# --- ends ------------------------------------------------------------------------------------------------------------


def finish(sampled: list[int], prompt: int = 3, **settings: Any) -> tuple[str | None, Any, list[int]]:
    """How a request ends whose model gives `sampled`, and what it got."""
    scheduler = make_scheduler(40, max_model_len=16)
    scheduler.add_request(make_request(scheduler, "a", prompt, **{"eos_token_id": 2, "max_tokens": 6} | settings))
    runner = TinyRunner(scheduler, sample=lambda request_id, tokens: sampled[len(tokens) - prompt]).run()
    item = runner.finished["a"]
    return item.finish_reason, item.stop_reason, runner.outputs["a"]


@pytest.mark.parametrize(
    ("sampled", "settings", "expected"),
    [
        ([7, 8, 2, 9], {}, ("stop", None, [7, 8, 2])),
        ([7, 2, 9, 9, 9, 9], {"ignore_eos": True}, ("length", None, [7, 2, 9, 9, 9, 9])),
        ([7, 8, 9], {"stop_token_ids": [8]}, ("stop", 8, [7, 8])),
        ([2, 8, 2, 9], {"min_tokens": 3}, ("stop", None, [2, 8, 2])),
        ([8, 8, 8, 9], {"min_tokens": 3, "stop_token_ids": [8]}, ("stop", 8, [8, 8, 8])),
        ([7, 7], {"max_tokens": 2}, ("length", None, [7, 7])),
        ([7, 2], {"max_tokens": 2}, ("stop", None, [7, 2])),
        ([7], {"max_tokens": 1}, ("length", None, [7])),
        ([7, 7, 7], {"prompt": 13}, ("length", None, [7, 7, 7])),  # max_model_len
        ([7, 7, 7], {"prompt": 13, "min_tokens": 5}, ("length", None, [7, 7, 7])),  # holds back stops, not limits
        ([7], {"prompt": 15}, ("length", None, [7])),
    ],
)
def test_stops(sampled: list[int], settings: dict[str, Any], expected: tuple[str, Any, list[int]]) -> None:
    assert finish(sampled, **settings) == expected


def test_without_max_tokens_only_the_length_ends_it() -> None:
    scheduler = make_scheduler(40, max_model_len=16)
    scheduler.add_request(Request("a", [5], SamplingParams(max_tokens=None)))
    runner = TinyRunner(scheduler).run()
    assert len(runner.outputs["a"]) == 15


def test_aborts_of_running_waiting_and_preempted_requests() -> None:
    scheduler = make_scheduler(7, max_num_seqs=3)
    runner = start(scheduler, a=8, b=8, c=8, d=4)
    runner.step()
    assert runner.step().preempted_req_ids == ["c"]
    scheduler.finish_requests(["a", "c", "d", "gone"], RequestStatus.FINISHED_ABORTED)
    runner.check_pool()
    output = runner.step()
    assert output.finished_req_ids == {"a", "c", "d"}
    assert counts(output) == {"b": 1}
    runner.run()
    assert list(runner.finished) == ["b"]


def test_an_abort_while_the_step_runs_drops_its_tokens() -> None:
    scheduler = make_scheduler(20)
    runner = start(scheduler, a=4, b=4)
    output = scheduler.schedule()
    ran = runner.execute(output)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert [item.request_id for item in scheduler.update_from_output(output, ran)] == ["b"]
    runner.run()


def test_an_end_needs_a_finished_status() -> None:
    with pytest.raises(ValueError, match="RUNNING"):
        make_scheduler(20).finish_requests("a", RequestStatus.RUNNING)


def test_ids_are_unique_while_they_live() -> None:
    scheduler = make_scheduler(20)
    runner = start(scheduler, a=4)
    with pytest.raises(ValueError, match="'a' is already scheduled"):
        start(scheduler, a=4)
    runner.run()
    start(scheduler, a=4).run()


def test_a_prompt_as_long_as_max_model_len_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64 tokens.*max_model_len=64"):
        start(make_scheduler(40, max_model_len=64), a=64)


def test_an_idle_step_is_empty() -> None:
    output = make_scheduler(20).schedule()
    assert (output.total_num_scheduled_tokens, output.scheduled_new_reqs) == (0, [])
    assert output.finished_req_ids == set()


def test_the_prefix_cache_is_reset_only_when_nobody_holds_blocks() -> None:
    scheduler = make_scheduler(40, caching=True)
    runner = start(scheduler, a=list(range(9)))
    runner.step()
    assert not scheduler.reset_prefix_cache()
    runner.run()
    assert scheduler.reset_prefix_cache()
    assert start(scheduler, b=list(range(9))).run().finished["b"].num_cached_tokens == 0


# --- queues ----------------------------------------------------------------------------------------------------------


def queued(policy: Any) -> tuple[Any, list[Request]]:
    given = [("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("d", 0, 1.0)]
    requests = [Request(name, [1], SamplingParams(), priority=p, arrival_time=t) for name, p, t in given]
    queue = create_request_queue(policy)
    for request in requests:
        queue.add_request(request)
    return queue, requests


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cdba")])
def test_queues(policy: str, order: str) -> None:
    queue, requests = queued(policy)
    assert "".join(request.request_id for request in queue) == order
    assert queue.peek_request() is queue.pop_request()
    assert len(queue) == 3
    queue.remove_requests({requests[1]})
    queue.remove_requests({requests[1]})
    assert "".join(request.request_id for request in queue) == order[1:].replace("b", "")
    queue.prepend_request(requests[1])
    front = {"fcfs": "bcd", "priority": "dba"}[policy]
    assert "".join(queue.pop_request().request_id for _ in range(3)) == front
    assert not queue


# --- Mamba states at block borders -----------------------------------------------------------------------------------


def aligned_scheduler(**settings: Any) -> Scheduler:
    return make_scheduler(60, FULL, MAMBA, caching=True, **settings)


@pytest.mark.parametrize(
    ("prompt", "start_at", "num_new", "shared", "expected"),
    [
        (20, 0, 10, 0, 8),  # down to a border
        (20, 0, 3, 0, 0),  # not enough left of the budget for a block
        (18, 0, 18, 0, 16),  # stop at the last border, so that its state is kept
        (18, 16, 2, 0, 2),  # the rest
        (16, 0, 16, 0, 16),
        (20, 6, 10, 0, 2),  # finish the block first
        (20, 0, 16, 9, 8),  # where a shared prefix ends
        (20, 0, 8, 13, 8),  # not reached yet
        (20, 19, 1, 0, 1),
    ],
)
def test_chunks_end_where_a_state_can_be_cached(
    prompt: int, start_at: int, num_new: int, shared: int, expected: int
) -> None:
    scheduler = aligned_scheduler()
    request = make_request(scheduler, "a", prompt)
    request.shared_prefix_boundary = shared
    assert scheduler._end_on_block_border(request, start_at, num_new) == expected


def test_decode_is_not_held_to_borders() -> None:
    scheduler = aligned_scheduler()
    request = make_request(scheduler, "a", 6)
    request.append_output_token_ids([1, 2])
    assert scheduler._end_on_block_border(request, 7, 1) == 1


def test_a_block_wider_than_the_budget_is_computed_in_parts() -> None:
    scheduler = aligned_scheduler(max_num_batched_tokens=3, max_num_seqs=2)
    request = make_request(scheduler, "a", 12)
    assert scheduler._end_on_block_border(request, 0, 3) == 3
    assert scheduler._end_on_block_border(request, 3, 3) == 1


def test_chunks_of_whole_steps_end_on_borders() -> None:
    runner = start(aligned_scheduler(max_num_batched_tokens=10), a=18, b=6)
    assert counts(runner.step()) == {"a": 8}  # no block is left of the budget for b
    assert counts(runner.step()) == {"a": 8}
    assert counts(runner.step()) == {"a": 2, "b": 4}
    assert counts(runner.step()) == {"a": 1, "b": 2}
    runner.run()


def test_a_state_is_kept_where_a_shared_prefix_ends() -> None:
    prefix = list(range(10))
    runner = start(aligned_scheduler(), a=[*prefix, *range(50, 60)]).run()
    start(runner, b=[*prefix, *range(70, 80)])
    assert counts(runner.step()) == {"b": 8}  # full attention knows the prefix, the state does not: it is kept now
    runner.run()
    start(runner, c=[*prefix, *range(90, 100)])
    assert runner.step().scheduled_new_reqs[0].num_computed_tokens == 8
    runner.run()


def test_a_state_written_in_this_step_is_no_hit_yet() -> None:
    prompt = list(range(9))
    runner = start(aligned_scheduler(), a=prompt, b=prompt)
    assert list(counts(runner.step())) == ["a"]
    assert counts(runner.step()) == {"a": 1, "b": 1}
    runner.run()


def test_full_attention_is_not_held_to_borders() -> None:
    assert counts(start(make_scheduler(20, max_num_batched_tokens=9), a=18).step()) == {"a": 9}
