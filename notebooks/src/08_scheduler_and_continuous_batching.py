# %% [markdown]
# # Scheduler and continuous batching
#
# After this notebook you can:
#
# - **predict** who computes how many tokens in the next step
# - **explain** chunked prefill and mixed batches as one rule with one budget
# - **follow** a request through admission, preemption and its return
# - **compare** first come, first served with priorities
# - **recognise** a request that can never fit
#
# **Prerequisites:** notebook 02 (blocks and the pool); no attention is needed here
#
# **Minutes:** 45
#
# **vLLM version studied:** 0.32.0

# %%
import torch

from minivllm import check

torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False, linewidth=88)

# %% [markdown]
# ## The question
#
# Requests arrive at any time. One has a prompt of 10,000 tokens, the next one of 5. Some
# will answer with one token, others with a thousand, and nobody knows before. The model
# computes in *steps*: one forward pass over some tokens of some requests.
#
# **Which tokens go into the next step, and what happens when memory runs out?**
#
# The part that decides is the *scheduler*. It sees no tensor: it counts tokens and
# blocks. So this notebook needs no model at all.

# %% [markdown]
# ## A toy by hand
#
# Three requests want 2, 6 and 3 output tokens; let the prompts cost nothing. A batch has
# two rows, and a step gives each row one token.
#
# The old way is *static batching*: fill the rows, run until all of them are done, then
# take the next ones. A row whose request is done idles:
#
# | step | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
# |---|---|---|---|---|---|---|---|---|---|
# | row 0 | A | A | - | - | - | - | C | C | C |
# | row 1 | B | B | B | B | B | B | - | - | - |
#
# *Continuous batching* decides anew before every step. A row that is free is filled at
# once.
#
# **Predict:** how many steps do the same three requests take then?

# %% predict
wanted = {"A": 2, "B": 6, "C": 3}
queue, rows, timeline = list(wanted), [], []
left = dict(wanted)
while queue or rows:
    while queue and len(rows) < 2:
        rows.append(queue.pop(0))
    timeline.append("".join(rows))
    left = {name: left[name] - (name in rows) for name in wanted}
    rows = [name for name in rows if left[name]]
print(len(timeline), "steps:", timeline)
assert len(timeline) == 6, "C takes A's row in step 2, and B's 6 tokens last longest"

# %% [markdown]
# ## Naive code
#
# Prompts do cost something, and more than one token of a request may be computed in a
# step. One rule covers all of it. Each request has two numbers:
#
# - `num_tokens`: tokens that are known, prompt and output together;
# - `num_computed_tokens`: how many of them have their keys and values in the cache.
#
# A step hands out at most `max_num_batched_tokens` tokens, the *token budget*, so that
# the second number catches up with the first. When it has, the model's output for the
# last token gives the next one: `num_tokens` grows by 1, and the chase goes on.


# %%
def naive_schedule(requests, budget):
    """requests: name -> (num_computed_tokens, num_tokens), the oldest first."""
    given = {}
    for name, (computed, known) in requests.items():
        num_new = min(known - computed, budget)
        if num_new:
            given[name] = num_new
            budget -= num_new
    return given


state = {"A": (0, 12), "B": (0, 3)}  # two prompts
for step in range(4):
    given = naive_schedule(state, budget=8)
    print(f"step {step}: {given}")
    for name, num_new in given.items():
        computed, known = state[name][0] + num_new, state[name][1]
        state = state | {name: (computed, known + (computed == known))}
assert given == {"A": 1, "B": 1}, "both prompts are computed: one token each from now"

# %% [markdown]
# Read what came out. In step 0 the budget cuts A's prompt: that is *chunked prefill*. In
# step 1 the rest of A and all of B share a step. From then on each gets one token a step:
# *decode*. Nowhere does the code say "prefill" or "decode". vLLM's scheduler says neither.

# %% [markdown]
# ## The real class
#
# [`Scheduler`](src:minivllm/core/scheduler.py) adds what the toy lacks: a limit of rows
# (`max_num_seqs`), blocks of memory, and two lists, `running` and `waiting`. Running
# requests come first in every step; then waiting ones are admitted.
#
# A toy of it: blocks of 4 tokens, a budget of 8. `num_blocks` counts the null block too.

# %%
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from minivllm.core.scheduler import Scheduler

spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
group = KVCacheGroupSpec(layer_names=("attn",), kv_cache_spec=spec)
toy = ModelConfig(model="toy", hf_config=None, dtype="float32", max_model_len=64)
assert spec.page_size_bytes == 2 * 4 * 8 * 4, "the scheduler will count pages, no bytes"


# %%
def make_scheduler(num_blocks=33, kind=Scheduler, **settings):
    """settings: those of SchedulerConfig."""
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 4} | settings
    vllm_config = VllmConfig(
        model_config=toy,
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(**settings),
    )
    memory = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=(group,)
    )
    return kind(vllm_config, memory)


assert make_scheduler().get_request_counts() == (0, 0), "nobody runs, nobody waits"

# %% [markdown]
# The engine's loop has three parts: `schedule`, run the model, `update_from_output`. Our
# "model" is one line: whoever has caught up gets token 7.

# %%
from minivllm.outputs import ModelRunnerOutput
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams


def run_step(scheduler):
    """One turn of the engine: returns what was decided, and the requests' news."""
    output = scheduler.schedule()
    sampled = []
    for req_id in output.num_scheduled_tokens:
        request = scheduler.requests[req_id]
        caught_up = request.num_computed_tokens == request.num_tokens
        sampled.append([7] if caught_up else [])
    ran = ModelRunnerOutput(
        req_ids=list(output.num_scheduled_tokens), sampled_token_ids=sampled
    )
    return output, scheduler.update_from_output(output, ran)


# %% [markdown]
# Two more helpers, and the two requests of before:


# %%
def add(scheduler, name, prompt_len, max_tokens=3, **more):
    params = SamplingParams(max_tokens=max_tokens)
    scheduler.add_request(Request(name, [1] * prompt_len, params, **more))


def run_all(scheduler):
    """Steps until nobody is left."""
    steps = []
    while scheduler.has_unfinished_requests():
        steps.append(run_step(scheduler)[0])
    return steps


scheduler = make_scheduler()
add(scheduler, "A", prompt_len=12)
add(scheduler, "B", prompt_len=3)
given = [step.num_scheduled_tokens for step in run_all(scheduler)]
print(given)
assert given[:3] == [{"A": 8}, {"A": 4, "B": 3}, {"A": 1, "B": 1}], "as in the toy"

# %% [markdown]
# What the model runner is told is a
# [`SchedulerOutput`](src:minivllm/core/scheduler_output.py). It is a *difference*: a
# request comes whole once, in `scheduled_new_reqs`; later only what changed is sent, in
# `scheduled_cached_reqs`. The runner keeps the rest.
#
# **Predict:** A's prompt needs 3 blocks, B's needs 1. In which steps do blocks go out?

# %% predict
scheduler = make_scheduler()
add(scheduler, "A", prompt_len=12)
add(scheduler, "B", prompt_len=3)
blocks_in = []
for step in range(4):
    output, _ = run_step(scheduler)
    new = {data.req_id: data.block_ids[0] for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    known = {r: b and b[0] for r, b in zip(cached.req_ids, cached.new_block_ids)}
    blocks_in.append([bool(new), any(known.values())])
    print(f"step {step}: new {new}, known {known}, finished {output.finished_req_ids}")
assert blocks_in == [[True, False], [True, True], [False, True], [False, True]], (
    "A: 2 blocks for 8 tokens, 1 for 4 more, 1 for its 13th; B: 1, then 1 for its 5th"
)

# %% [markdown]
# `None` means: the blocks that it has still do. Where an id is in the list of
# `finished_req_ids`, the runner frees its row.

# %% [markdown]
# ## One budget for all
#
# Now more requests than rows: four requests, three rows.
#
# **Predict:** `D` has a prompt of 2 tokens. In which step is it admitted?

# %% predict
from minivllm.viz.structures import TimelineView

scheduler = make_scheduler(max_num_seqs=3)
for name, prompt_len in (("A", 3), ("B", 14), ("C", 4), ("D", 2)):
    add(scheduler, name, prompt_len)
steps = run_all(scheduler)
given = [step.num_scheduled_tokens for step in steps]
print(given)
assert max(sum(step.values()) for step in given) <= 8, "never more than the budget"
assert next(i for i, step in enumerate(given) if "D" in step) == 3, (
    "A needs a prefill and two decodes, steps 0 to 2; then its row is free"
)

# %%
TimelineView.of(steps)

# %% [markdown]
# Look at step 1: A's decode takes 1 token and the prefill of B fills the rest. That is why
# mixing pays. A decode alone leaves the machine mostly idle, since it loads all weights
# for a single token; the chunk beside it comes nearly for free.
#
# But A's next token now waits for a longer step. The budget is the knob: small for an even
# flow of tokens, large for throughput.

# %% [markdown]
# ### A long prompt in front
#
# Running requests are served in their order, so a long prompt in front of the line takes
# the whole budget until it is computed.
# `long_prefill_token_threshold` limits what one request gets in a step, if there are
# others.
#
# **Predict:** `A` has a prompt of 24 tokens, `B` one of 3. In which step does B get its
# first output token, without a threshold and with one of 4?

# %% predict
first = {}
for threshold in (0, 4):
    scheduler = make_scheduler(long_prefill_token_threshold=threshold)
    add(scheduler, "A", prompt_len=24)
    add(scheduler, "B", prompt_len=3)
    given = [step.num_scheduled_tokens for step in run_all(scheduler)]
    first[threshold] = next(i for i, step in enumerate(given) if "B" in step)
    print(f"threshold {threshold}: {given}")
assert first == {0: 3, 4: 0}, (
    "3 steps of 8 for A alone; or 4 for A and 3 for B in step 0, and A takes 5 steps"
)

# %% [markdown]
# ## Admission
#
# A waiting request is admitted if a row is free, budget is left, and its tokens fit the
# memory. Which tokens? Only its first chunk has to be stored in this step. But vLLM asks
# for room for the *whole sequence* as it is known now (`scheduler_reserve_full_isl`, on
# by default). The blocks are not reserved, only counted.
#
# Let us see why. 5 usable blocks; A takes 2 for its prompt. B's prompt of 16 needs 4, and
# 3 are free; its first chunk of 4 tokens needs 1.
#
# **Predict:** how many tokens are computed in total, with the rule and without? The two
# need 10 + 18 = 28: a prompt, and all output tokens but the last.

# %% predict
total, film = {}, {}
for whole in (True, False):
    scheduler = make_scheduler(
        num_blocks=6, max_num_batched_tokens=12, scheduler_reserve_full_isl=whole
    )
    add(scheduler, "A", prompt_len=8)
    add(scheduler, "B", prompt_len=16)
    film[whole] = run_all(scheduler)
    total[whole] = sum(step.total_num_scheduled_tokens for step in film[whole])
    print(f"whole sequence must fit: {whole}, tokens computed: {total[whole]}")
assert total == {True: 28, False: 32}, "B's first chunk of 4 was computed in vain"

# %%
TimelineView.of(film[False])

# %% [markdown]
# B came in with 4 tokens, had no room for the rest, and was put out. With many requests
# this repeats: prompts are begun, thrown out and begun again, while the decodes beside
# them get slower (vLLM #18115).
#
# Nothing is kept for tokens that are yet to be generated: nobody knows how many there will
# be. So memory can run out while requests decode. Then one of them must go.

# %% [markdown]
# ## Preemption
#
# When a running request needs a block and none is free, the scheduler *preempts* another
# one: all its blocks are freed, `num_computed_tokens` is set to 0, and it waits again, at
# the front. Its tokens are not lost, only their keys and values. When it returns, they are
# computed once more, prompt and output alike, in one prefill: *recompute*. (Older versions
# could also copy blocks to the CPU and back, *swapping*. V1 of vLLM dropped that.)
#
# The victim is the one that came last: the least work is lost, and the oldest request
# always gets on.
#
# 5 usable blocks: A's prompt of 11 takes 3, B's of 7 takes 2. They are full when A stores
# its 13th token.

# %%
from minivllm.viz.stepper import Stepper


def tell(scheduler, output):
    """One line: what happened, and how memory stands."""
    free = scheduler.kv_cache_manager.num_free_blocks
    queues = (scheduler.running, scheduler.waiting)
    runs, waits = ([request.request_id for request in queue] for queue in queues)
    out = f", preempted {output.preempted_req_ids}" if output.preempted_req_ids else ""
    return f"runs {runs}, waits {waits}, {free} blocks free{out}"


scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=24)
add(scheduler, "A", prompt_len=11, max_tokens=4)
add(scheduler, "B", prompt_len=7, max_tokens=4)
steps, trace = [], []
while scheduler.has_unfinished_requests():
    steps.append(run_step(scheduler)[0])
    trace.append((tell(scheduler, steps[-1]), TimelineView.of(steps)))
    print(f"step {len(steps) - 1}:", trace[-1][0])
assert steps[2].preempted_req_ids == ["B"], "A needs a fourth block, and B came last"

# %%
Stepper(trace)

# %% [markdown]
# Two things to see. In step 2 B gave 2 blocks and A took 1; still nobody is admitted: in a
# step that had to preempt, memory is short, and whoever came in would soon be put out
# again. In step 3 B may come in, but needs 3 blocks for its 9 tokens, and 1 is free.
#
# **Predict:** B had computed 8 tokens and knew 9. How many does it compute in step 4?

# %% predict
back = steps[4]
print(back.num_scheduled_tokens, back.scheduled_cached_reqs.resumed_req_ids)
print("its table, whole:", back.scheduled_cached_reqs.new_block_ids[0])
assert back.num_scheduled_tokens == {"B": 9}, (
    "7 of the prompt and 1 output token again, and the output token that was next"
)

# %% [markdown]
# B is no new request: the runner knows its tokens. Only its blocks are others, so an id in
# `resumed_req_ids` comes with the *whole* table, and the runner replaces the row (notebook
# 03). With prefix caching most of those tokens would have been found again (notebook 09).
#
# What did it cost? B has 7 + 3 tokens to compute, and computed more:

# %%
computed_by_b = sum(step.num_scheduled_tokens.get("B", 0) for step in steps)
print("tokens computed by B:", computed_by_b)
assert computed_by_b == 7 + 1 + 9 + 1, "8 of them were for nothing"

# %% [markdown]
# ## Priorities
#
# With `policy="priority"` the smallest number goes first, then the earliest arrival. It
# orders the waiting requests, and it chooses the victim: the running request with the
# *largest* (priority, arrival time), wherever it stands.
#
# 6 usable blocks. A (priority 1) came first. B (priority 0, more important) joins a step
# later. In step 2 A takes its decode token, then B needs a fourth... and none is free.
#
# **Predict:** who is preempted in step 2, under "fcfs" and under "priority"?

# %% predict
victims, film = {}, {}
for policy in ("fcfs", "priority"):
    scheduler = make_scheduler(
        num_blocks=7, max_num_batched_tokens=16, max_num_seqs=2, policy=policy
    )
    add(scheduler, "A", 9, priority=1, arrival_time=0.0)
    steps = [run_step(scheduler)[0]]
    add(scheduler, "B", 12, priority=0, arrival_time=1.0)
    film[policy] = steps + run_all(scheduler)
    victims[policy] = film[policy][2].preempted_req_ids
    print(policy, [step.num_scheduled_tokens for step in film[policy]])
assert victims == {"fcfs": ["B"], "priority": ["A"]}, (
    "the last one, B itself, or the least important, A, though it was served already"
)

# %%
TimelineView.of(film["priority"])

# %% [markdown]
# Under "priority" A had its token of step 2 already. It is taken back, and the budget gets
# it again: `num_scheduled_tokens` names B alone.
#
# Under "fcfs" B preempts *itself*: it is the last one, and so the victim. Then no more
# running requests are served in that step. That is harmless under "fcfs", where nobody
# stands behind it; under "priority" those who do lose a step. vLLM 0.32.0 does the same.

# %% [markdown]
# ## A request that can never fit
#
# A single request may want more blocks than there are. Preempting others does not help,
# and preempting itself helps least: it would come back, fail at the same place, and be
# preempted again, for ever. vLLM 0.32.0 has that fault (vLLM #39734): the server looks
# alive and this request, with all behind it, never ends. Here it ends with an error.
#
# There are two cases. The prompt is too long from the start:

# %%
scheduler = make_scheduler(num_blocks=4)  # 3 usable: 12 tokens
add(scheduler, "A", prompt_len=13)
_, news = run_step(scheduler)
print(news[0].finish_reason)
print(news[0].error)
assert news[0].finish_reason == "error"
assert not scheduler.has_unfinished_requests(), "it is gone, and blocks nobody"

# %% [markdown]
# Or it fits, and outgrows the pool while it decodes.
#
# **Predict:** the prompt has 11 tokens, the pool room for 12. How many output tokens does
# the request get before it fails? Remember that the newest token is not in the cache yet.

# %% predict
scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=16)
add(scheduler, "A", prompt_len=11, max_tokens=10)
news = []
while scheduler.has_unfinished_requests():
    news += run_step(scheduler)[1]
print([(item.new_token_ids, item.finish_reason) for item in news])
assert sum(len(item.new_token_ids) for item in news) == 2, (
    "one after the prompt, one after its 12th token; the 13th has no place"
)

# %% [markdown]
# ## Exercise: hand out the budget
#
# Write the heart of `schedule()` for a step with memory enough: running requests first,
# then waiting ones while there are rows and budget. `chunk_limit` is the most that one
# request may get. The check runs it on 40 steps and compares.
#
# `check.hint()` gives hints one by one, `check.solution()` shows an answer.

# %% exercise ex08

# %% [markdown]
# ## Exercise: make room
#
# A running request needs blocks. Name the victims, in their order. Stop when there is
# room, and also when the victim is the request itself.

# %% exercise ex08_2

# %% [markdown]
# ## Break it on purpose
#
# **No preemption.** Take it out, and let requests wait for blocks instead. Two requests,
# 4 usable blocks, each needs a third one:


# %%
class Patient(Scheduler):
    """Leaves a running request alone when there is no block for it."""

    def _schedule_running(self, step):
        for request in self.running:
            num_new = request.num_tokens - request.num_computed_tokens
            blocks = self.kv_cache_manager.allocate_slots(request, num_new)
            if blocks is not None:
                step.known[request.request_id] = blocks.get_block_ids(allow_none=True)
                step.give(request.request_id, num_new)


patient = make_scheduler(num_blocks=5, kind=Patient, max_num_batched_tokens=16)
add(patient, "A", prompt_len=8)
add(patient, "B", prompt_len=8)
given = [run_step(patient)[0].num_scheduled_tokens for _ in range(4)]
print(given, "running:", [request.request_id for request in patient.running])
assert given[1:] == [{}, {}, {}], "each waits for blocks that the other holds: deadlock"

# %% [markdown]
# Each holds what the other needs. A step that hands out no token, while requests run, is
# the sign to look for; the tests of this project fail on it.
#
# **Chunked prefill off, and a prompt above the budget.** Such a prompt could never run, so
# the configuration is refused:

# %%
try:
    make_scheduler(enable_chunked_prefill=False)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("a prompt of 60 tokens could never run in a budget of 8")

# %% [markdown]
# **The same id twice, and a prompt as long as the model's context:**

# %%
scheduler = make_scheduler()
for name, prompt_len in (("A", 5), ("A", 5), ("B", 64)):
    try:
        add(scheduler, name, prompt_len)
    except ValueError as error:
        print("ValueError:", error)
assert scheduler.get_request_counts() == (0, 1), "only the first A was taken"

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`Scheduler`](src:minivllm/core/scheduler.py) | `Scheduler` in [vllm/v1/core/sched/scheduler.py](vllm:vllm/v1/core/sched/scheduler.py) | same decisions, tested on vLLM's own traces; synchronous only |
# | [`Scheduler.schedule`](src:minivllm/core/scheduler.py) | `schedule`, same file | one long method there, also for encoders, speculation, connectors |
# | [`SchedulerOutput`](src:minivllm/core/scheduler_output.py) | `SchedulerOutput` in [vllm/v1/core/sched/output.py](vllm:vllm/v1/core/sched/output.py) | fewer fields |
# | [`create_request_queue`](src:minivllm/core/request_queue.py) | `create_request_queue` in [vllm/v1/core/sched/request_queue.py](vllm:vllm/v1/core/sched/request_queue.py) | same two policies |
# | [`check_stop`](src:minivllm/core/scheduler.py) | `check_stop` in [vllm/v1/core/sched/utils.py](vllm:vllm/v1/core/sched/utils.py) | `min_tokens` holds back stop tokens only; there the length limit too |
# | a request larger than the pool ends with an error | is preempted for ever | vLLM #39734 |

# %% [markdown]
# ## What was left out
#
# - **Asynchronous scheduling.** vLLM decides step n + 1 while step n still runs, with a
#   place holder for the token that is not there yet.
# - **Speculative decoding.** A decode of several guessed tokens; the rule is the same,
#   and some tokens are taken back.
# - **Prefix caching.** It makes `num_computed_tokens` begin above 0: notebook 09.
# - **What the runner does with the output**: notebooks 03 (tables and slots) and 05
#   (metadata).
# - **Several machines.** Prefill and decode on different ones, with K and V sent between
#   them (KV connectors).
