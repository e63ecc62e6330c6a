# %% [markdown]
# # Quickstart and map of the pipeline
#
# After this notebook you can:
#
# - **generate** text with a real model, with vLLM's own calls
# - **name** the stages between a prompt and its answer, and the file of each
# - **run** one step of the engine by hand and read what each stage hands to the next
# - **predict** how many tokens of which request a step computes
# - **find** the notebook that explains a stage in depth
#
# **Prerequisites:** PyTorch; what a language model's logits are. No knowledge of vLLM
#
# **Minutes:** 35
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
# A language model is a function: token ids in, one number for each token of the
# vocabulary out (*logits*), for every position. To answer a prompt one calls it again
# and again. A *serving engine* does this for hundreds of prompts at a time on one
# device, and that is where vLLM's many parts come from.
#
# **What happens between a prompt and its answer, and which part does what?**
#
# `minivllm` is vLLM's pipeline made small: the same names, the same decisions, the same
# numbers. In this notebook you use it, then take one step apart.
#
# Now and then a text ends with **Predict**. Decide on an answer before you look at the
# cell below it, then run the cell: the message of its `assert` says why.

# %% [markdown]
# ## A first answer
#
# [`LLM`](src:minivllm/llm.py) is the front door, with vLLM's name and arguments. The
# model is SmolLM2 with 135 million parameters; it runs on a CPU. Most settings below are
# tiny on purpose, so that we can see things happen:
#
# - `block_size=4`: the cache is cut into blocks of 4 tokens;
# - `max_num_batched_tokens=16`: one step computes at most 16 tokens, for all requests
#   together (vLLM would take thousands);
# - `kv_cache_memory_bytes`: 8 MiB for the cache;
# - `dtype="float32"`: so that your machine gets the same tokens as ours.

# %%
from minivllm import LLM, SamplingParams

llm = LLM(
    "smollm2-135m",
    dtype="float32",
    block_size=4,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    kv_cache_memory_bytes=8 * 2**20,
)
assert llm.llm_engine.vllm_config.model_config.dtype == "float32"

# %%
greedy = SamplingParams(temperature=0.0, max_tokens=12)
prompt = "The first ten prime numbers are"
answer = llm.generate(prompt, greedy, use_tqdm=False)[0]
print(answer.prompt + answer.outputs[0].text)
assert answer.finished
assert answer.outputs[0].finish_reason == "length", "it stopped after max_tokens"

# %% [markdown]
# `temperature=0.0` means *greedy*: always take the likeliest token. The answer is a
# [`RequestOutput`](src:minivllm/outputs.py). Inside the engine there is no text, only
# token ids; the tokenizer translates at both ends.

# %%
tokenizer = llm.get_tokenizer()
print("prompt ids:", answer.prompt_token_ids)
print("as text:   ", [tokenizer.decode(each) for each in answer.prompt_token_ids])
print("output ids:", answer.outputs[0].token_ids)
assert len(answer.prompt_token_ids) == 6
assert len(answer.outputs[0].token_ids) == 12

# %% [markdown]
# Several prompts at once, each with its own parameters; a conversation through the
# model's chat template; and a stream that grows:

# %%
params = [greedy, SamplingParams(temperature=0.0, max_tokens=30, stop=["."])]
both = llm.generate([prompt, "Once upon a time"], params, use_tqdm=False)
for each in both:
    print(repr(each.outputs[0].text), each.outputs[0].finish_reason)
assert both[0].outputs[0].token_ids == answer.outputs[0].token_ids, (
    "a neighbour in the batch changes nothing"
)
assert both[1].outputs[0].finish_reason == "stop", "the stop string ended it"

# %%
chat = [{"role": "user", "content": "What is the capital of France?"}]
print("chat:", llm.chat(chat, greedy, use_tqdm=False)[0].outputs[0].text)
four = SamplingParams(temperature=0.0, max_tokens=4)
for growing in llm.stream(prompt, four):
    print("stream:", growing.outputs[0].text)
assert growing.finished

# %% [markdown]
# With a temperature above 0 the next token is drawn at random. A `seed` makes a request's
# draws its own: they do not depend on who else is in the batch.

# %%
dice = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, seed=7)
alone = llm.generate(prompt, dice, use_tqdm=False)[0].outputs[0].token_ids
crowd = llm.generate([prompt, "A", "B"], [dice, greedy, greedy], use_tqdm=False)
print("the same in a crowd:", crowd[0].outputs[0].token_ids == alone)
assert crowd[0].outputs[0].token_ids == alone

# %% [markdown]
# ## A toy by hand
#
# How does one answer come about? Our prompt has 6 tokens, at positions 0 to 5.
#
# | step | computes positions | samples the token of position |
# |---|---|---|
# | 0 | 0, 1, 2, 3, 4, 5 | 6 |
# | 1 | 6 | 7 |
# | 2 | 7 | 8 |
#
# The first step is called *prefill*, the others *decode*. A decode computes one token
# only, because attention finds the keys and values of all earlier tokens in the *KV
# cache*. They lie in blocks of 4, and the blocks lie anywhere. Say the request got the
# blocks 7, 2 and 5 of a cache with 8 blocks; after step 2, eight tokens are in it:

# %%
from minivllm.viz.structures import CacheView

CacheView.of(8, 4, {"A": ([7, 2, 5], 8)})

# %% [markdown]
# **Predict:** the whole answer above has 12 tokens after a prompt of 6. How many tokens
# does the model compute in all? (The last one is sampled, and never computed.)

# %% predict
num_prompt, num_output = 6, 12
computed = num_prompt + num_output - 1
without_cache = sum(num_prompt + i for i in range(num_output))
print(f"with a cache {computed} tokens, without one {without_cache}")
assert computed == 17, "6 in the prefill, then one in each of 11 decodes"

# %% [markdown]
# ## Naive code
#
# Without a cache generation is a loop of ten lines: everything is computed again for
# each new token. Here the engine itself is used as the naive function: it is asked for
# one token at a time, and a `cache_salt` of its own keeps each call from finding what the
# calls before have left.


# %%
def next_token(token_ids):
    """The likeliest next token, computed from nothing."""
    fresh = {"prompt_token_ids": token_ids, "cache_salt": str(len(token_ids))}
    one = SamplingParams(temperature=0.0, max_tokens=1)
    return llm.generate(fresh, one, use_tqdm=False)[0].outputs[0].token_ids[0]


token_ids = list(answer.prompt_token_ids)
for _ in range(4):
    token_ids.append(next_token(token_ids))
print("naive: ", token_ids[6:])
print("engine:", answer.outputs[0].token_ids[:4])
assert token_ids[6:] == answer.outputs[0].token_ids[:4], "a cache changes no token"

# %% [markdown]
# The naive loop is correct, and that makes it the *witness*: whatever the engine does to
# be fast, its greedy tokens must stay the same.

# %% [markdown]
# ## The map
#
# What the engine does to be fast, in each step:
#
#     LLM.generate ─► LLMEngine.step()
#        │
#        │  1  Scheduler.schedule()            DECIDES: how many tokens for whom,
#        │       └► KVCacheManager             which blocks. Plain Python
#        │  2  ModelRunner.execute_model()     PREPARES: rows, positions, slots,
#        │       ├► BlockTable                 attention metadata
#        │       ├► set_forward_context
#        │       ├► model(input_ids, positions)  COMPUTES: writes keys and values
#        │       │    └► Attention               to slots, attends over blocks
#        │       └► Sampler                    logits to token ids
#        │  3  Scheduler.update_from_output()  appends the tokens, ends requests
#        ▼
#     RequestOutput
#
# | stage | hands on | file | notebook |
# |---|---|---|---|
# | [`Scheduler.schedule`](src:minivllm/core/scheduler.py) | `SchedulerOutput` | `core/scheduler.py` | 08 |
# | [`KVCacheManager.allocate_slots`](src:minivllm/core/kv_cache_manager.py) | block ids | `core/kv_cache_manager.py` | 02, 09 |
# | [`InputBatch`](src:minivllm/worker/input_batch.py) | one row a request | `worker/input_batch.py` | 03 |
# | [`BlockTable`](src:minivllm/worker/block_table.py) | `slot_mapping` | `worker/block_table.py` | 03 |
# | [`CommonAttentionMetadata`](src:minivllm/attention/metadata.py) | the batch, for builders | `attention/metadata.py` | 05 |
# | [`set_forward_context`](src:minivllm/forward_context.py) | all of it, to the layers | `forward_context.py` | 01 |
# | [`Attention`](src:minivllm/attention/layer.py) | hidden states | `attention/layer.py` | 01, 07 |
# | [`Sampler`](src:minivllm/sampling/sampler.py) | token ids | `sampling/sampler.py` | - |
#
# The folders are storeys of a house: `core/` decides and knows no tensors, `worker/`
# prepares, `attention/`, `layers/` and `models/` compute. Imports only run downwards.

# %% [markdown]
# ## One step, stage by stage
#
# [`LLMEngine.step`](src:minivllm/engine.py) is three calls. We make them ourselves and
# keep what each hands on. `restart` gives us an engine with an empty cache, around the
# weights that are loaded already.

# %%
from minivllm import LLMEngine


def restart():
    """A new engine for `llm`: empty cache, same weights."""
    old = llm.llm_engine
    llm.llm_engine = LLMEngine(old.vllm_config, old.tokenizer, old.model_runner.model)
    return llm.llm_engine


def step(engine):
    """What LLMEngine.step does, without its care for errors."""
    scheduled = engine.scheduler.schedule()
    result = engine.model_runner.execute_model(scheduled)
    news = engine.scheduler.update_from_output(scheduled, result)
    outputs, _ = engine.output_processor.process_outputs(news)
    return scheduled, result, outputs


# %%
from minivllm.viz.structures import BlockTableView, SlotMappingView

engine, shapes = restart(), {}


def look(module, args, hidden):
    """Called after each run of the model, with what went in and what came out."""
    shapes.setdefault("input_ids, positions", [tuple(each.shape) for each in args])
    shapes.setdefault("hidden", tuple(hidden.shape))


hook = engine.model_runner.model.register_forward_hook(look)
engine.add_request("A", prompt, SamplingParams(temperature=0.0, max_tokens=3))
scheduled, result, outputs = step(engine)
hook.remove()
table = engine.model_runner.input_batch.block_table[0]
slots = SlotMappingView.of(table, ["A"], [0, 6], range(6))
blocks = BlockTableView.of(table, ["A"])
later = [step(engine) for _ in range(2)]
assert not engine.has_unfinished_requests(), "three tokens need three steps"

# %% [markdown]
# **Stage 1, the scheduler.** A request that is scheduled for the first time is described
# in full; its block ids come as a tuple with one list a *KV-cache group* (this model has
# one group).

# %%
new = scheduled.scheduled_new_reqs[0]
print("req_id", new.req_id, " block_ids", new.block_ids)
print("num_scheduled_tokens", scheduled.num_scheduled_tokens)
assert new.block_ids == ([1, 2],), "6 tokens need two blocks of 4; block 0 is reserved"
blocks

# %% [markdown]
# **Stage 2, the model runner.** It lays the step's tokens end to end and computes the
# *slot* of each: the place for its key and value.
#
# **Predict:** the slots of the positions 0 to 5 in the blocks 1 and 2.

# %% predict
print([slot for _, _, slot in slots.tokens])
assert [slot for _, _, slot in slots.tokens] == [4, 5, 6, 7, 8, 9], (
    "block 1 begins at slot 1 * 4, block 2 at 2 * 4"
)

# %%
slots

# %% [markdown]
# The model itself saw two flat arrays: no padding, no rectangle of `[batch, length]`, and
# nothing of slots or blocks. Those reached its attention layers through the *forward
# context* (notebook 01).

# %%
hidden = torch.randn(shapes["hidden"])
logits = engine.model_runner.model.compute_logits(hidden[-1:])
for name, shape in shapes.items():
    print(name, shape)
print("logits", tuple(logits.shape), "= (requests that sample, vocabulary)")
assert shapes["hidden"] == (6, 576), "one row for each of the step's tokens"

# %% [markdown]
# The model ran on all six tokens, but logits are needed for the last one only (its row
# is the request's entry in `logits_indices`). The sampler took the likeliest token.
# **Stage 3** appends it to the request; the output processor turns it into text.

# %%
print("sampled_token_ids", result.sampled_token_ids)
print("text so far", repr(outputs[0].outputs[0].text), "finished", outputs[0].finished)
for decode, sampled, (output,) in later:
    print(decode.num_scheduled_tokens, sampled.sampled_token_ids, end=" ")
    print(repr(output.outputs[0].text), output.outputs[0].finish_reason)
assert output.outputs[0].token_ids == answer.outputs[0].token_ids[:3]

# %% [markdown]
# ## Many requests in one step
#
# The scheduler has one rule: each step hands out at most `max_num_batched_tokens` tokens
# (16 here), first to requests that run already, then to waiting ones. It does not tell
# prefill and decode apart. A long prompt is cut into *chunks*, and the rest of a step is
# filled with other requests. This is *continuous batching*.
#
# Three requests arrive together: `A` with 20 prompt tokens, `B` with 6, `C` with 10. Each
# wants 3 output tokens.
#
# **Predict:** who gets how many tokens in the first three steps?

# %% predict
from minivllm.viz.structures import TimelineView

engine = restart()
three = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
for name, first, length in (("A", 100, 20), ("B", 200, 6), ("C", 300, 10)):
    engine.add_request(name, list(range(first, first + length)), three)
steps = []
while engine.has_unfinished_requests():
    steps.append(step(engine)[0])
given = [each.num_scheduled_tokens for each in steps]
print(given[:3])
assert given[0] == {"A": 16}, "the whole budget goes to the first prompt"
assert given[1] == {"A": 4, "B": 6, "C": 6}, "A's rest, all of B, a chunk of C: 16"
assert given[2] == {"A": 1, "B": 1, "C": 4}, "two decodes beside the rest of a prefill"

# %%
TimelineView.of(steps)

# %% [markdown]
# ## How much fits?
#
# The engine cut 8 MiB into blocks. One token keeps a key and a value of 3 heads with 64
# numbers of 4 bytes, in each of 30 layers.
#
# **Predict:** how many blocks of 4 tokens are there?

# %% predict
bytes_per_token = 2 * 3 * 64 * 4 * 30
num_blocks = 8 * 2**20 // (4 * bytes_per_token)
print("bytes a token:", bytes_per_token, " blocks:", num_blocks)
assert llm.llm_engine.kv_cache_config.num_blocks == num_blocks == 45, (
    "8 MiB / (4 * 46,080 bytes), rounded down; one of them is the null block"
)

# %% [markdown]
# ## The second time is cheaper
#
# Full blocks stay in memory after their request has ended, until somebody needs the
# place. A prompt that begins with the same tokens uses them again: *prefix caching*
# (notebook 09). One token at least is always computed, since its logits are needed.
#
# **Predict:** a prompt of 20 tokens is sent twice. How many of its tokens come from the
# cache the second time?

# %% predict
restart()
twice = [
    llm.generate(list(range(100, 120)), three, use_tqdm=False)[0] for _ in range(2)
]
print("num_cached_tokens:", [each.num_cached_tokens for each in twice])
assert twice[0].outputs[0].token_ids == twice[1].outputs[0].token_ids
assert twice[1].num_cached_tokens == 16, (
    "at most 19, in whole blocks of 4: 16; a fifth block would leave nothing to compute"
)

# %% [markdown]
# ## Exercise: greedy decoding
#
# Write the naive loop for any model. `logits_of` stands for a model: it takes a list of
# token ids and returns one number for each token of its vocabulary.
#
# Replace the `raise` line and run the cell. `check.hint()` gives hints one by one,
# `check.solution()` shows an answer.

# %% exercise ex00

# %% [markdown]
# ## Exercise: a scheduler for one
#
# How many tokens of a lone request does each step compute? Think of the picture above,
# with only one row.

# %% exercise ex00_2

# %% [markdown]
# ## Break it on purpose
#
# Wrong input is refused at once, with the value and the remedy, and the engine goes on
# serving.

# %%
wrong = [
    lambda: llm.generate([7] * 128, greedy),
    lambda: llm.generate([10**6], greedy),
    lambda: llm.generate("", greedy),
    lambda: SamplingParams(temperature=-1.0),
    lambda: SamplingParams(temprature=0.0),
]
refused = 0
for attempt in wrong:
    try:
        attempt()
    except (TypeError, ValueError) as error:
        refused += 1
        print(f"{type(error).__name__}: {error}\n")
assert refused == len(wrong)

# %%
again = llm.generate(prompt, greedy, use_tqdm=False)[0]
print("still serving:", again.outputs[0].token_ids == answer.outputs[0].token_ids)
assert again.outputs[0].token_ids == answer.outputs[0].token_ids
assert not llm.llm_engine.has_unfinished_requests(), "nothing was left behind"

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`LLM`](src:minivllm/llm.py) | `LLM` in [vllm/entrypoints/llm.py](vllm:vllm/entrypoints/llm.py) | an offline script runs by changing the import; `stream` is new |
# | [`SamplingParams`](src:minivllm/sampling/params.py) | `SamplingParams` in [vllm/sampling_params.py](vllm:vllm/sampling_params.py) | no structured output, no beam search |
# | [`LLMEngine`](src:minivllm/engine.py) | `LLMEngine` in [vllm/v1/engine/llm_engine.py](vllm:vllm/v1/engine/llm_engine.py) and `EngineCore` | one process |
# | [`Scheduler`](src:minivllm/core/scheduler.py) | `Scheduler` in [vllm/v1/core/sched/scheduler.py](vllm:vllm/v1/core/sched/scheduler.py) | no speculation, no encoder inputs |
# | [`ModelRunner`](src:minivllm/worker/model_runner.py) | `GPUModelRunner` in [vllm/v1/worker/gpu_model_runner.py](vllm:vllm/v1/worker/gpu_model_runner.py) | one device, synchronous steps |
# | [`OutputProcessor`](src:minivllm/output_processor.py) | `OutputProcessor` in [vllm/v1/engine/output_processor.py](vllm:vllm/v1/engine/output_processor.py) | no metrics |

# %% [markdown]
# ## What was left out
#
# - **A server.** vLLM answers HTTP requests from a second process; this engine is called
#   from Python.
# - **Several devices.** vLLM splits models over GPUs; here there is one device.
# - **Speculative decoding, LoRA, multimodal inputs, quantised weights**: each would hook
#   into the stages above without changing the map.
# - **Why each stage is as it is.** That is the rest of the course: go on with 01 (how
#   layers find their cache), 02 (blocks) and 03 (slots).
