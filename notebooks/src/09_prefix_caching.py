# %% [markdown]
# # Prefix caching
#
# After this notebook you can:
#
# - **explain** why a block's name must cover everything before it
# - **predict** how many tokens of a prompt are found, and why never all
# - **follow** cached blocks through the free queue until they are evicted
# - **find** the hit that several groups of layers agree on
# - **recognise** a cache that answers with the wrong tokens
#
# **Prerequisites:** notebook 02 (blocks and the pool); 08 helps (scheduler)
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
# A thousand users talk to the same assistant: a thousand prompts begin with the same
# system text. Each turn of a chat begins with all turns before it. The keys and values of
# such a beginning were computed already, and may still lie in memory.
#
# **How does a request find the keys and values that somebody else computed, and when must
# it not use them?**

# %% [markdown]
# ## A toy by hand
#
# Blocks hold 4 tokens. `A` was computed, and its *full* blocks are kept:
#
# | | block 0 | block 1 | block 2 |
# |---|---|---|---|
# | `A` | 1 2 3 4 | 5 6 7 8 | 9 10 |
# | `B` | 1 2 3 4 | 5 6 50 51 | 52 |
# | `C` | 9 9 9 9 | 5 6 7 8 | 1 |
#
# `B` may use A's block 0. In block 1 it agrees for two tokens, but a block is taken as a
# whole or not at all.
#
# `C` has the same tokens as `A` in block 1, at the same positions. May it use that block?
# No. From the second layer on, the key and value of a token depend on all tokens before
# it: attention has mixed them in. So what counts is not the block but the *prefix* that
# ends with it.
#
# **Predict:** how many tokens can `B` and `C` take from `A`?

# %% predict
tokens_a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
tokens_b = [1, 2, 3, 4, 5, 6, 50, 51, 52]
tokens_c = [9, 9, 9, 9, 5, 6, 7, 8, 1]


def common_blocks(one, other):
    """Full blocks of 4 that both begin with."""
    count, most = 0, min(len(one), len(other)) // 4
    while count < most and one[: 4 * count + 4] == other[: 4 * count + 4]:
        count += 1
    return count


reused = [4 * common_blocks(tokens_a, other) for other in (tokens_b, tokens_c)]
print("B:", reused[0], "tokens, C:", reused[1])
assert reused == [4, 0], "one whole block for B; C parts from A at its first token"

# %% [markdown]
# ## Naive code
#
# A dictionary from prefixes to blocks, and a walk from left to right:

# %%
cache = {tuple(tokens_a[:4]): 1, tuple(tokens_a[:8]): 2}  # prefix -> block id


def naive_hit(token_ids):
    """Ids of the blocks that are cached, from the first one on."""
    blocks = []
    for end in range(4, len(token_ids) + 1, 4):
        if tuple(token_ids[:end]) not in cache:
            break
        blocks.append(cache[tuple(token_ids[:end])])
    return blocks


print("B:", naive_hit(tokens_b), " C:", naive_hit(tokens_c))
assert naive_hit(tokens_b) == [1], "as by hand"

# %% [markdown]
# It is right, and too slow: a prompt of n tokens has n / 4 keys of up to n tokens each.
#
# ## Chained hashes
#
# So a prefix gets a short name. The name of block i is a hash of *the name of block i - 1*
# and the tokens of block i. Equal names mean equal tokens, all the way back, and each
# token is hashed once. By hand:

# %%
import hashlib


def chain(token_ids):
    """A name for each full block, here cut to 4 hex digits."""
    names, parent = [], "root"
    for start in range(0, len(token_ids) - 3, 4):
        text = f"{parent} {token_ids[start : start + 4]}"
        parent = hashlib.sha256(text.encode()).hexdigest()
        names.append(parent[:4])
    return names


print("A:", chain(tokens_a), " B:", chain(tokens_b), " C:", chain(tokens_c))
assert chain(tokens_a)[0] == chain(tokens_b)[0], "same first block"
assert chain(tokens_a)[1] != chain(tokens_c)[1], "same tokens, but another parent"

# %% [markdown]
# The real one is [`make_block_hasher`](src:minivllm/core/block_hash.py). A
# [`Request`](src:minivllm/request.py) calls it whenever tokens are added, and keeps the
# hashes of its full blocks in `block_hashes`. Only new blocks are hashed.
#
# **Predict:** two prompts of 13 tokens differ in token 5 alone. Which of their hashes are
# equal?

# %% predict
from minivllm.core.block_hash import make_block_hasher
from minivllm.request import LoRARequest, MultiModalFeature, Request
from minivllm.sampling.params import SamplingParams


def make_request(name, token_ids, hash_block_size=4, **more):
    params = SamplingParams(max_tokens=8)
    hasher = make_block_hasher(hash_block_size)
    return Request(name, token_ids, params, block_hasher=hasher, **more)


def same_hashes(one, other):
    return [x == y for x, y in zip(one.block_hashes, other.block_hashes)]


first = make_request("first", list(range(13)))
second = make_request("second", [*range(5), 99, *range(6, 13)])
print("full blocks:", len(first.block_hashes), " same:", same_hashes(first, second))
assert same_hashes(first, second) == [True, False, False], (
    "token 5 is in block 1; block 2 has the same tokens, but its parent differs"
)

# %% [markdown]
# ### Extra keys
#
# Sometimes equal tokens do not mean equal keys and values. Then something else must go
# into the hash:
#
# - a **LoRA adapter** changes the weights;
# - an **image** stands behind place holder tokens that are always the same;
# - a **salt** keeps tenants apart on purpose: whoever can measure that a prompt came back
#   fast learns that somebody else sent it.
#
# [`generate_block_hash_extra_keys`](src:minivllm/core/block_hash.py) lists them for a
# block.

# %%
from minivllm.core.block_hash import generate_block_hash_extra_keys

tokens = list(range(12))
image = MultiModalFeature(identifier="cat", offset=2, length=4)
special = {
    "plain": make_request("plain", tokens),
    "salted": make_request("salted", tokens, cache_salt="tenant 1"),
    "image": make_request("image", tokens, mm_features=(image,)),
    "lora": make_request("lora", tokens, lora_request=LoRARequest("sql", 1, "sql-dir")),
}
for name, request in special.items():
    keys = [generate_block_hash_extra_keys(request, s, s + 4) for s in (0, 4, 8)]
    print(f"{name:7}", keys)
assert keys[0] == keys[2], "an adapter counts in each block"

# %% [markdown]
# The image covers positions 2 to 5, so it is in blocks 0 and 1, each time with its offset
# from the block's start, here 2 and -2.
#
# **Predict:** the salt is in block 0 alone. Which hashes of "plain" and "salted" are equal?

# %% predict
same = same_hashes(special["plain"], special["salted"])
print(same)
assert same == [False, False, False], "the chain carries it on: a parent differs"

# %% [markdown]
# ## The real class
#
# [`KVCacheManager`](src:minivllm/core/kv_cache_manager.py) has two methods for it.
# `get_computed_blocks` looks a request up, before it is admitted. `allocate_slots` takes
# the blocks of the hit, adds new ones for the rest, and gives every block that becomes
# full its hash. `start` below does with a request what the scheduler does, and takes the
# step for done.

# %%
import math

from minivllm.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from minivllm.core.kv_cache_manager import KVCacheManager

shape = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
full = FullAttentionSpec(block_size=4, **shape)
assert full.page_size_bytes == 2 * 4 * 8 * 4


# %%
def make_manager(*specs, num_blocks=8):
    sizes = [spec.block_size for spec in specs]
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer.{i}",), kv_cache_spec=spec)
        for i, spec in enumerate(specs)
    )
    memory = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=(), kv_cache_groups=groups
    )
    return KVCacheManager(
        memory,
        max_model_len=64,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        max_in_flight_tokens=64,
        prefix_cache_retention_interval=0,
    )


# %%
def start(manager, request):
    """Look up, allocate, compute. Returns how many tokens were found."""
    blocks, num_hit, boundary = manager.get_computed_blocks(request)
    request.shared_prefix_boundary = boundary
    rest = request.num_tokens - num_hit
    assert manager.allocate_slots(request, rest, num_hit, blocks), "no room"
    request.num_computed_tokens = request.num_tokens
    return num_hit


manager = make_manager(full)
a, b, c = (
    make_request(name, tokens)
    for name, tokens in (("A", tokens_a), ("B", tokens_b), ("C", tokens_c))
)
hits = [start(manager, request) for request in (a, b)]
print(
    "hits:", hits, " A:", manager.get_block_ids("A"), " B:", manager.get_block_ids("B")
)
assert hits == [0, 4], "B begins with A's block 1"
assert manager.get_computed_blocks(c)[1] == 0, "C finds nothing"

# %%
from minivllm.viz.structures import KVPoolView

KVPoolView.of(manager.block_pool)

# %% [markdown]
# Block 1 is used by both: `ref_cnt` 2. It is full, so nobody writes it again; that is what
# makes sharing safe. B's third token of block 1 goes to a block of its own.
#
# `A` need not have ended. B can even hit a block that A computes in the *same* step: each
# layer writes all keys and values of the step before its attention reads any.

# %% [markdown]
# ## Never all of it
#
# **Predict:** a prompt of 12 tokens is sent twice, one after the other. How many tokens
# does the second one find?

# %% predict
manager, prompt = make_manager(full), list(range(12))
hits = [start(manager, make_request(name, prompt)) for name in ("one", "two")]
print("hits:", hits, " tables:", *(manager.get_block_ids(n)[0] for n in ("one", "two")))
assert hits == [0, 8], (
    "the last token is always computed, since the next one is sampled from its logits: "
    "the hit is at most num_tokens - 1 = 11, and whole blocks: 8"
)

# %%
KVPoolView.of(manager.block_pool)

# %% [markdown]
# Look at the hashes: blocks 3 and 4 have the same. The last block was computed twice, and
# both are kept; vLLM does not merge them, since tables only ever grow at their end. A
# lookup gives the oldest.

# %% [markdown]
# ## The free queue decides what is forgotten
#
# There is no separate memory for the cache. Cached blocks that nobody uses are *free
# blocks*, and the next request may be given them; then their hash is removed. So the order
# of the free queue is the policy of eviction:
#
# - a request gives its blocks back from the last to the first;
# - blocks without a hash go to the *front* of the queue, cached ones to its *end*;
# - a hit takes a block out of the queue, from the middle too.
#
# Together that is "least recently used first, and tails before heads".
#
# **Predict:** 7 usable blocks. `A` with 12 tokens runs and ends. Then `X` comes with 20
# other tokens. How many tokens of A, sent again with one more, are still found?

# %% predict
manager, film = make_manager(full), []
pool = manager.block_pool
a, x = make_request("A", list(range(12))), make_request("X", list(range(100, 120)))
start(manager, a)
film.append(("A fills three blocks", KVPoolView.of(pool)))
manager.free(a)
film.append(("A has ended: 3, 2, 1 stand at the end of the queue", KVPoolView.of(pool)))
start(manager, x)
film.append(("X takes five blocks, the last is A's tail", KVPoolView.of(pool)))
again = make_request("A again", list(range(13)))
found, num_hit, _ = manager.get_computed_blocks(again)
print("hit:", num_hit, "tokens, blocks", found.get_block_ids()[0])
assert num_hit == 8, "4 unused blocks and A's tail went to X; the head is still there"

# %%
from minivllm.viz.stepper import Stepper

Stepper(film)

# %% [markdown]
# Had the head gone first, blocks 2 and 3 would be useless: nobody reaches them but through
# block 1. That is why the tail is given back first.

# %% [markdown]
# ## Generated tokens count
#
# Hashes do not care who wrote a token. A block that fills up while a request decodes gets
# its hash as well. So the next turn of a chat, whose prompt holds the last answer, finds
# that answer too.
#
# **Predict:** the prompt has 6 tokens, the answer 3, of which the last is not computed.
# The next turn sends all 9 and 5 new tokens. How many are found?

# %% predict
manager = make_manager(full)
turn = make_request("turn 1", list(range(6)))
start(manager, turn)
for answer in (70, 71, 72):
    turn.append_output_token_ids(answer)
    if answer != 72:
        manager.allocate_slots(turn, 1)
        turn.num_computed_tokens = turn.num_tokens
manager.free(turn)
next_turn = make_request("turn 2", [*turn.all_token_ids, 1, 2, 3, 4, 5])
num_hit = manager.get_computed_blocks(next_turn)[1]
print("hit:", num_hit, "of", next_turn.num_tokens)
assert num_hit == 8, "6 of the prompt and 2 of the answer fill two blocks"

# %% [markdown]
# The same saves a request that was *preempted* (notebook 08). Its blocks went to the free
# queue with their hashes. If nobody took them, it finds them when it returns, and most of
# the recomputing is spared. Here with the real scheduler, 5 usable blocks, once without
# the prefix cache and once with it.

# %%
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.scheduler import Scheduler
from minivllm.outputs import ModelRunnerOutput


def make_scheduler(caching):
    config = VllmConfig(
        model_config=ModelConfig(
            model="toy", hf_config=None, dtype="float32", max_model_len=64
        ),
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=2),
    )
    group = KVCacheGroupSpec(layer_names=("attn",), kv_cache_spec=full)
    return Scheduler(
        config,
        KVCacheConfig(num_blocks=6, kv_cache_tensors=(), kv_cache_groups=(group,)),
    )


# %%
def run_all(scheduler):
    """Whoever has caught up gets token 7; returns all steps."""
    steps = []
    while scheduler.has_unfinished_requests():
        steps.append(scheduler.schedule())
        ids = list(steps[-1].num_scheduled_tokens)
        running = [scheduler.requests[i] for i in ids]
        done = [r.num_computed_tokens == r.num_tokens for r in running]
        ran = ModelRunnerOutput(
            req_ids=ids, sampled_token_ids=[[7] if d else [] for d in done]
        )
        scheduler.update_from_output(steps[-1], ran)
    return steps


assert run_all(make_scheduler(caching=True)) == [], "nobody is there yet"

# %% [markdown]
# A's prompt takes 3 blocks, B's 2. In step 2 A needs a fourth, and B is preempted with 8
# tokens computed, in 2 full blocks. A takes one of them.
#
# **Predict:** without the cache B computed 9 tokens when it came back. And with it?

# %% predict
back = {}
for caching in (False, True):
    scheduler = make_scheduler(caching)
    for name, length, offset in (("A", 11, 100), ("B", 7, 200)):
        params = SamplingParams(max_tokens=4)
        tokens = list(range(offset, offset + length))
        hasher = make_block_hasher(4) if caching else None
        scheduler.add_request(Request(name, tokens, params, block_hasher=hasher))
    steps = run_all(scheduler)
    given = [step.num_scheduled_tokens for step in steps]
    back[caching] = given[4]["B"]
    print(f"caching {caching}: preempted {steps[2].preempted_req_ids}, {given}")
assert back == {False: 9, True: 5}, (
    "A was given B's tail; B's head of 4 tokens was still there when B came back"
)

# %% [markdown]
# One care is needed. A block gets its hash when it is *allocated*, before the step has
# computed it. If the request is put out in that very step, nothing will be written there,
# yet the block can be found. So `Scheduler._preempt` takes such hashes away. In 0.32.0
# they stay.

# %% [markdown]
# ## Several groups
#
# A model that mixes full attention and sliding windows has several *KV-cache groups*
# (notebook 04), with one pool for all. A token's keys and values lie in one block of each
# group, and a hit must hold for all groups at once. What a group needs to go on from token
# N differs:
#
# - **full attention**: all blocks before N;
# - **sliding window** of w: only the last w - 1 tokens before N, that is
#   `ceil((w - 1) / block_size)` blocks side by side, ending at N. Or, near the start, all
#   blocks from the first on.
#
# Let a prompt have 21 tokens, at most 5 blocks of hit. We put hashes into the pool by hand,
# so that each group knows other blocks of it. x is cached, . is not:
#
# | group | needs | block 0 | 1 | 2 | 3 | 4 |
# |---|---|---|---|---|---|---|
# | 0: full | all | x | x | x | x | x |
# | 1: window 5 | 1 block | . | x | . | . | x |
# | 2: window 8 | 2 blocks | x | x | x | . | . |

# %%
from minivllm.core.kv_cache_interface import SlidingWindowSpec

windows = [SlidingWindowSpec(block_size=4, sliding_window=w, **shape) for w in (5, 8)]
request = make_request("R", list(range(21)))
known_blocks = ("xxxxx", ".x..x", "xxx..")
assert [-(-(spec.sliding_window - 1) // 4) for spec in windows] == [1, 2], "needed"


# %%
def three_groups(known):
    """A manager whose groups have the blocks marked x of the request above."""
    manager = make_manager(full, *windows, num_blocks=20)
    pool = manager.block_pool
    for group_id, marks in enumerate(known):
        for mark, block_hash in zip(marks, request.block_hashes):
            if mark == "x":
                (block,) = pool.get_new_blocks(1)
                pool.cache_block(block, block_hash, group_id)
    return manager


def hit_of(manager, group_id, limit):
    """Tokens that one group alone can go on from, at most `limit`."""
    group = manager.coordinator.managers[group_id]
    found = group.find_longest_cache_hit(request.block_hashes, limit, [group_id])
    return 4 * len(found[0])


manager = three_groups(known_blocks)
alone = [hit_of(manager, group_id, limit=20) for group_id in range(3)]
print("each group alone:", alone)
assert alone == [20, 20, 12], "5 blocks; block 4 will do; blocks 1 and 2 are a window"

# %% [markdown]
# The shortest is 12. Is that the answer? Ask group 1 again: to go on from token 12 it needs
# block 2, which it has not.
#
# So the groups are asked in turn, each with what the others left, until a whole round
# shortens nothing: a *fixed point*.
#
# **Predict:** where does it end?

# %% predict
length, rounds = 20, []
while not rounds or rounds[-1][-1] != rounds[-1][0]:
    asked = [length]
    for group_id in range(3):
        length = hit_of(manager, group_id, length)
        asked.append(length)
    rounds.append(asked)
    print(f"round {len(rounds)}: begins with {asked[0]}, groups say {asked[1:]}")
num_hit = manager.get_computed_blocks(request)[1]
assert length == num_hit == 8, (
    "group 1 falls back to block 1, token 8; group 2 has blocks 0 and 1 for that"
)

# %% [markdown]
# That is [`KVCacheCoordinator.find_longest_cache_hit`](src:minivllm/core/kv_cache_coordinator.py).
# Full attention is asked once: any shorter prefix of its hit is a hit again. A window has
# no such luck.
#
# The blocks that a window does not need are *null blocks* in its list, block 0:

# %%
blocks = manager.get_computed_blocks(request)[0].get_block_ids()
for group_id, ids in enumerate(blocks):
    print(f"group {group_id}: {ids}")
assert [len(ids) for ids in blocks] == [2, 2, 2], "8 tokens in each group"
assert blocks[1][0] == 0, "the window of 5 reads only block 1 of them"

# %% [markdown]
# ### What a window keeps
#
# A window's block is only ever useful near the place where a request goes on. So vLLM 0.32.0
# need not cache them all. `prefix_cache_retention_interval=0`, as here, caches only those
# before the end of the prompt, where the same prompt sent again would go on, and before a
# place where prompts were seen to part. `None` caches all that could be hit, N one window
# every N tokens.
#
# **Predict:** the prompt of 21 tokens runs through an empty cache. Which blocks are cached
# in the group of window 5?

# %% predict
manager = three_groups((".....",) * 3)
runner = make_request("R2", list(range(21)))
start(manager, runner)
cached = {}
for group_id, group in enumerate(manager.coordinator.managers):
    table = group.req_to_blocks["R2"]
    cached[group_id] = "".join("x" if block.block_hash else "." for block in table)
print(cached)
assert cached[1] == "....x.", (
    "one block, that before token 20: sent again, the prompt goes on there"
)

# %% [markdown]
# ### Blocks of several sizes
#
# Groups may have different block sizes, say 4 and 6. Then:
#
# - hashes are made for every 2 tokens, the **GCD**, so that each group can build its own;
# - a hit ends at multiples of 12, the **LCM**: elsewhere some group would be within a
#   block. Nothing is cached beyond the last such multiple either.
#
# **Predict:** a prompt of 23 tokens is sent twice. How many are found?

# %% predict
wide = SlidingWindowSpec(block_size=6, sliding_window=7, **shape)
manager = make_manager(full, wide, num_blocks=40)
sent = [make_request(n, list(range(23)), hash_block_size=2) for n in ("one", "two")]
hits = [start(manager, request) for request in sent]
print("hash block 2, so", len(sent[0].block_hashes), "hashes; hits:", hits)
assert hits == [0, 12], "full attention alone would find 20, the window 18"

# %% [markdown]
# ## Exercise: name the blocks
#
# Chain the hashes of a request's full blocks. The hash function is given; mind where the
# salt goes.
#
# `check.hint()` gives hints one by one, `check.solution()` shows an answer.

# %% exercise ex09

# %% [markdown]
# ## Exercise: the hit of a group
#
# Find the longest hit of a group, with full attention or a window. The check compares on
# 40 states of a cache.

# %% exercise ex09_2

# %% [markdown]
# ## Break it on purpose
#
# **A stale hash.** The rule "this hash means these tokens" must hold for ever. Suppose a
# request's tokens are replaced after its block was hashed: a client takes back the end of
# its input and sends something else. If the hashes are only ever *appended* to, the old
# one stays (vLLM #49377, #49449). Let us write what each block really holds beside the
# cache:

# %%
manager, contents = make_manager(full), {}
old, new = [1, 2, 3, 4], [1, 2, 3, 99]
edited = make_request("edited", [*new, 5])
edited.block_hashes = make_request("before", [*old, 5]).block_hashes  # stale
start(manager, edited)
contents[manager.get_block_ids("edited")[0][0]] = new
victim = make_request("victim", [*old, 6])
found, num_hit, _ = manager.get_computed_blocks(victim)
(block_id,) = found.get_block_ids()[0]
print("asked for", old, "and found", num_hit, "tokens; they are", contents[block_id])
assert contents[block_id] != old, "another request's keys and values, without an error"

# %% [markdown]
# Nothing raises. The victim's answer is wrong, and only that of somebody who happened to
# send these tokens later. The remedy is to drop the hashes from the first changed token on,
# and to hash anew.
#
# The other way to get there is a block that is handed out again and *keeps* its hash. The
# pool has a check for that; the tests call it after every step:

# %%
manager = make_manager(full)
start(manager, make_request("A", tokens_a))
pool = manager.block_pool
forgetful = pool.blocks[1]
kept, forgetful.block_hash = forgetful.block_hash, None
try:
    pool.check_integrity()
except RuntimeError as error:
    print("RuntimeError:", str(error).partition(":")[0])
else:
    raise AssertionError("the map still lists block 1")

# %% [markdown]
# **Forgetting while somebody runs.** After new weights are loaded all that is cached is
# wrong, and `reset_prefix_cache` forgets it. It refuses while blocks are in use:

# %%
manager = make_manager(full)
a = make_request("A", tokens_a)
start(manager, a)
refused = manager.reset_prefix_cache()
manager.free(a)
done = manager.reset_prefix_cache()
print("while A runs:", refused, " after:", done)
assert (refused, done) == (False, True)
assert manager.get_computed_blocks(make_request("A2", tokens_a))[1] == 0, "forgotten"

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`make_block_hasher`](src:minivllm/core/block_hash.py) | `get_request_block_hasher` in [vllm/v1/core/kv_cache_utils.py](vllm:vllm/v1/core/kv_cache_utils.py) | same equalities, other bytes; vLLM has a choice of hash functions |
# | [`generate_block_hash_extra_keys`](src:minivllm/core/block_hash.py) | the same name, same file | no prompt embeddings |
# | [`KVCacheManager.get_computed_blocks`](src:minivllm/core/kv_cache_manager.py) | the same in [vllm/v1/core/kv_cache_manager.py](vllm:vllm/v1/core/kv_cache_manager.py) | same hits, tested on vLLM's own traces |
# | [`BlockPool.free_blocks`](src:minivllm/core/block_pool.py) | the same in [vllm/v1/core/block_pool.py](vllm:vllm/v1/core/block_pool.py) | same order; no events |
# | [`SlidingWindowManager`](src:minivllm/core/single_type_manager.py) | the same in [vllm/v1/core/single_type_kv_cache_manager.py](vllm:vllm/v1/core/single_type_kv_cache_manager.py) | no hits that end within a block |
# | [`KVCacheCoordinator`](src:minivllm/core/kv_cache_coordinator.py) | `UnitaryKVCacheCoordinator`, `HybridKVCacheCoordinator` in [vllm/v1/core/kv_cache_coordinator.py](vllm:vllm/v1/core/kv_cache_coordinator.py) | one class for both |

# %% [markdown]
# ## What was left out
#
# - **Mamba and chunked local attention.** They have hits of their own kind: notebooks 10
#   and 11.
# - **Hits within a block.** 0.32.0 can, for some models, share a part of a block by
#   copying it.
# - **A cache outside the GPU.** KV connectors look prompts up in other memories, too.
# - **Log-probabilities of the prompt.** They need the logits of every prompt token, so
#   such a request never takes a hit.
# - **Where the time goes.** Hashing and lookup are plain Python and in the way of every
#   request: notebook 16.
