# %% [markdown]
# # Paged KV cache
#
# After this notebook you can:
#
# - **explain** why the cache is cut into blocks, and what that costs
# - **compute** the bytes of a block and the number of blocks that fit a memory
# - **follow** blocks through the pool: handed out, shared, cached, freed, reused
# - **write** keys and values into pages, and gather them again
# - **read** the signs of a pool that is full
#
# **Prerequisites:** PyTorch tensors; what attention does with keys and values
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
# Attention of a new token reads the keys and values of all tokens before it. They never
# change, so they are computed once and kept: the *KV cache*. A server has one big memory
# for it and many requests, and nobody knows how long an answer will get.
#
# **How can many requests of unknown length share one memory, with little waste and no
# copying?**

# %% [markdown]
# ## A toy by hand
#
# The memory holds 32 tokens, and no request may be longer than 16. The simple way
# reserves 16 places for each request, in one piece: two requests fit, whatever their
# length. With requests of 6 and 3 tokens, 9 places of 32 are used.
#
# Now cut the memory into 8 *blocks* of 4 tokens. A request takes a block when it needs
# one, from anywhere. `A` with 6 tokens needs 2 blocks, `B` with 3 tokens needs 1. After a
# while of serving the free blocks are well shuffled, so let `A` have 7 and 2 and `B` 5.

# %%
from minivllm.viz.structures import CacheView

CacheView.of(8, 4, {"A": ([7, 2], 6), "B": ([5], 3)})

# %% [markdown]
# Block 0 is special. vLLM never hands it out; it is the *null block*, a place holder for
# "no block here". So 7 blocks are usable.
#
# What is wasted is only the rest of each request's *last* block: 2 places of `A`, 1 of
# `B`. At most `block_size - 1` tokens a request, however long it is.
#
# **Predict:** how many requests of 5 tokens fit into the 7 usable blocks, and how many
# places are wasted then?

# %% predict
block_size, usable = 4, 7
blocks_needed = -(-5 // block_size)  # rounded up
requests = usable // blocks_needed
wasted = requests * (blocks_needed * block_size - 5)
print(f"{blocks_needed} blocks each: {requests} requests, {wasted} places wasted")
assert (requests, wasted) == (3, 9), "2 blocks each, 3 places unused in each second one"

# %% [markdown]
# ## Naive code
#
# A list of free blocks, and a rule: take one when the blocks so far are full.

# %%
from collections import deque


def grow(blocks, num_tokens, free):
    """Make `blocks` long enough for num_tokens; takes them from the left of `free`."""
    while len(blocks) * block_size < num_tokens:
        blocks.append(free.popleft())


free, blocks_of_a = deque([7, 2, 5, 3, 6, 1, 4]), []
for num_tokens in (3, 4, 5, 9):
    grow(blocks_of_a, num_tokens, free)
    print(f"{num_tokens} tokens: blocks {blocks_of_a}, free {list(free)}")
assert blocks_of_a == [7, 2, 5], "9 tokens need 3 blocks"

# %% [markdown]
# When the request ends its blocks go back to the list. That is all of paging. What the
# real classes add is *sharing*: two requests that begin with the same text may use the
# same blocks.

# %% [markdown]
# ## How big is a block?
#
# For each token, each layer keeps one key and one value for each KV head:
#
# `bytes = 2 * block_size * num_kv_heads * head_size * bytes of a number`
#
# That is a block's *page* in one layer. A layer says what it keeps by a *spec*;
# [`FullAttentionSpec`](src:minivllm/core/kv_cache_interface.py) is the plainest. SmolLM2
# has 30 layers with 3 KV heads of 64 numbers.

# %%
from minivllm.core.kv_cache_interface import FullAttentionSpec

spec = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16")
print("page of one layer:", spec.page_size_bytes, "bytes")
print("block in all 30 layers:", 30 * spec.page_size_bytes, "bytes")
assert spec.page_size_bytes == 2 * 16 * 3 * 64 * 2

# %% [markdown]
# **Predict:** how many blocks fit into 64 MiB, and how many tokens is that?

# %% predict
num_blocks = (64 * 2**20) // (30 * spec.page_size_bytes)
print(num_blocks, "blocks,", (num_blocks - 1) * 16, "tokens besides the null block")
assert num_blocks == 182, "67,108,864 bytes / 368,640 bytes, rounded down"

# %% [markdown]
# ## The pool
#
# [`BlockPool`](src:minivllm/core/block_pool.py) knows every block: how many requests use
# it (`ref_cnt`), and whether its contents can be found again (`block_hash`). It moves
# no bytes; it is bookkeeping, in plain Python. Free blocks wait in a *queue*, and the one
# at its front is handed out next.

# %%
from minivllm.core.block_pool import BlockPool
from minivllm.viz.structures import KVPoolView


def fresh_pool():
    return BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)


def ids(blocks):
    return [block.block_id for block in blocks]


pool = fresh_pool()
blocks_a = pool.get_new_blocks(2)
blocks_b = pool.get_new_blocks(1)
print("A:", ids(blocks_a), " B:", ids(blocks_b), " free:", pool.get_num_free_blocks())
assert pool.get_num_free_blocks() == 4, "8 minus the null block, minus 3 in use"
KVPoolView.of(pool)

# %% [markdown]
# When a request ends, its blocks are given back *from the last to the first*, and go to
# the front of the queue: their memory is likely still warm, and nothing of them is worth
# keeping.
#
# **Predict:** `A` has blocks 1 and 2, and 4, 5, 6, 7 are free. `A` ends. What is the free
# queue then?

# %% predict
pool = fresh_pool()
blocks_a, blocks_b = pool.get_new_blocks(2), pool.get_new_blocks(1)
pool.free_blocks(reversed(blocks_a))
print(ids(pool.free_block_queue.get_all_free_blocks()))
assert ids(pool.free_block_queue.get_all_free_blocks()) == [2, 1, 4, 5, 6, 7], (
    "tail first: 2, then 1, in front of those that were free already"
)

# %% [markdown]
# ## Blocks that can be found again
#
# A *full* block never changes again. So it can be given a name that says what is in it: a
# hash of its tokens and of everything before them. If another request begins with the
# same tokens it may use the block, without computing anything. This is *prefix caching*,
# the subject of notebook 09; here only what it means for the pool:
#
# - a shared block has `ref_cnt` 2; it becomes free when both have let go;
# - a free block with a hash is not worthless: it goes to the *end* of the queue, and
#   until it is handed out for something else, it can still be found.
#
# The hashes come from [`make_block_hasher`](src:minivllm/core/block_hash.py); a
# [`Request`](src:minivllm/request.py) keeps those of its full blocks.

# %%
from minivllm.core.block_hash import make_block_hasher
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

hasher = make_block_hasher(block_size=4)


def make_request(name, token_ids):
    params = SamplingParams(max_tokens=8)
    return Request(name, token_ids, params, block_hasher=hasher)


first = make_request("A", [1, 2, 3, 4, 5, 6, 7, 8, 9])
second = make_request("B", [1, 2, 3, 4, 5, 6, 0, 0])
same = [x == y for x, y in zip(first.block_hashes, second.block_hashes)]
print("full blocks:", len(first.block_hashes), len(second.block_hashes))
print("same hash:", same)
assert same == [True, False], "tokens 0-3 agree; in block 1 the tokens differ"

# %% [markdown]
# Now a life of two blocks in a film. `A` fills two blocks, both get their hash. `B` finds
# the first one and shares it, and takes a new block for the rest. Then `A` ends, then
# `B`.
#
# **Predict:** after both have ended, which blocks are free *and* can still be found?

# %% predict
pool, film = fresh_pool(), []
held_a = pool.get_new_blocks(2)
for block, block_hash in zip(held_a, first.block_hashes):
    pool.cache_block(block, block_hash, group_id=0)
film.append(("A filled two blocks", KVPoolView.of(pool)))
hit = pool.get_cached_block(second.block_hashes[0], group_ids=[0])
pool.touch(hit)
held_b = [*hit, *pool.get_new_blocks(1)]
film.append(("B shares the first, and has one more", KVPoolView.of(pool)))
pool.free_blocks(reversed(held_a))
film.append(("A has ended", KVPoolView.of(pool)))
pool.free_blocks(reversed(held_b))
film.append(("B has ended", KVPoolView.of(pool)))
findable = [block.block_id for block in pool.blocks if block.block_hash]
print("A had", ids(held_a), " B had", ids(held_b), " findable:", findable)
assert findable == [1, 2], "A's two; B's own block was never full, so it has no hash"

# %%
from minivllm.viz.stepper import Stepper

Stepper(film)

# %% [markdown]
# Look at the free queue of the last step: block 3 has no hash and stands in front; then
# the blocks that were never used; at the end the two cached ones, the *second* before
# the *first*. The first will stay findable longest, since without it the second is of no
# use to anybody.

# %% [markdown]
# ## The manager
#
# The scheduler does not talk to the pool. It asks
# [`KVCacheManager.allocate_slots`](src:minivllm/core/kv_cache_manager.py): "this request
# computes so many more tokens; give it the blocks that it still lacks". The manager needs
# to know the pool's size and what the layers keep, a
# [`KVCacheConfig`](src:minivllm/core/kv_cache_interface.py).

# %%
from minivllm.core.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from minivllm.core.kv_cache_manager import KVCacheManager

toy_spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
toy_config = KVCacheConfig(
    num_blocks=8,
    kv_cache_tensors=(),  # where the bytes lie: not the manager's business
    kv_cache_groups=(KVCacheGroupSpec(layer_names=("attn",), kv_cache_spec=toy_spec),),
)


def make_manager():
    return KVCacheManager(
        toy_config,
        max_model_len=28,
        scheduler_block_size=4,
        hash_block_size=4,
        max_in_flight_tokens=28,
        enable_caching=True,
    )


# %% [markdown]
# A prompt of 6 tokens, then one token a step. The loop below is what the scheduler and the
# model do together, with the model left out.
#
# **Predict:** in which of these steps does the request get a new block? Steps compute the
# tokens 0-5, 6, 7, 8.

# %% predict
manager, request, got = make_manager(), make_request("A", [1, 2, 3, 4, 5, 6]), []
for num_new_tokens in (6, 1, 1, 1):
    new_blocks = manager.allocate_slots(request, num_new_tokens)
    got.append(new_blocks.get_block_ids()[0])
    request.num_computed_tokens += num_new_tokens  # the model has computed them
    request.append_output_token_ids(7)  # and sampled one more
    print(f"{request.num_computed_tokens} computed:", manager.get_block_ids("A")[0])
print("new in each step:", got)
assert got == [[1, 2], [], [], [3]], "two for the prompt; the ninth token needs a third"

# %% [markdown]
# Block ids come as a tuple with one list a *KV-cache group*, `([1, 2, 3],)` here. Models
# with several kinds of layers have several groups (notebook 04).
#
# And when there are no blocks left? `allocate_slots` returns `None` and changes nothing.
# The scheduler then makes room: it *preempts* a running request, frees all its blocks,
# and computes it again later (notebook 08).

# %%
manager = make_manager()
long, other = make_request("long", list(range(20))), make_request("other", [9] * 12)
assert manager.allocate_slots(long, 20) is not None, "5 of 7 blocks"
refused = manager.allocate_slots(other, 12)
print("3 blocks wanted, 2 free:", refused)
assert refused is None
long.num_computed_tokens = 20
manager.free(long)
got = manager.allocate_slots(other, 12).get_block_ids()
print("after the long one ended:", got)
assert got == ([6, 7, 5],), "never used, never used, then the tail of the long one"

# %% [markdown]
# Blocks 6 and 7 had been free all the time. Block 5 was the *last* of the long request:
# all its five blocks were full and are still cached, and those of its beginning stay
# findable longest.

# %% [markdown]
# ## The memory itself
#
# So far only ids moved. The bytes lie in one tensor a layer, its *pages*:
#
# `kv_cache`: `[num_blocks, 2, block_size, num_kv_heads, head_size]`, keys at 0, values at 1.
#
# A token's place in it is its *slot*: `block_id * block_size + offset` (notebook 03). With
# the blocks 7 and 2, a request's six tokens have the slots 28, 29, 30, 31, 8, 9.
#
# Let the real attention layer fill them. It takes queries, keys and values; pages, slots
# and the block table reach it through the forward context (notebook 01). To see which
# places it writes and reads, all pages hold NaN before.

# %%
from minivllm.attention.layer import Attention
from minivllm.config import CacheConfig, ModelConfig, VllmConfig

config = VllmConfig(
    model_config=ModelConfig(
        model="toy", hf_config=None, dtype="float32", max_model_len=28
    ),
    cache_config=CacheConfig(block_size=4),
)
layer = Attention(
    num_heads=2, head_size=8, scale=8**-0.5, vllm_config=config, prefix="attn"
)
backend = layer.get_attn_backend()
print("backend", backend.get_name(), "pages", backend.get_kv_cache_shape(8, 4, 2, 8))
assert layer.get_kv_cache_spec(config) == toy_spec, "what the layer keeps, by its spec"

# %%
from minivllm.attention.metadata import CommonAttentionMetadata

starts, lengths = torch.tensor([0, 6]).int(), torch.tensor([6]).int()
common = CommonAttentionMetadata(
    query_start_loc=starts,  # [num_reqs + 1]: one request, batch rows 0 to 5
    query_start_loc_cpu=starts,
    seq_lens=lengths,  # [num_reqs]
    seq_lens_cpu=lengths,
    num_computed_tokens_cpu=torch.tensor([0]).int(),
    num_reqs=1,
    num_actual_tokens=6,
    max_query_len=6,
    max_seq_len=6,
    block_table_tensor=torch.tensor([[7, 2]]).int(),  # [num_reqs, blocks]
    slot_mapping=torch.tensor([28, 29, 30, 31, 8, 9]),  # [num_tokens] int64
)
builder = backend.get_builder_cls()(toy_spec, ["attn"], config, torch.device("cpu"))
metadata = builder.build(0, common)
slots = common.slot_mapping
assert slots.tolist() == [7 * 4, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 2 * 4, 2 * 4 + 1]

# %% [markdown]
# **Predict:** in which blocks will keys lie, and will the output be free of NaN though
# most of the pages hold nothing else?

# %% predict
from minivllm.forward_context import set_forward_context

query, key, value = torch.randn(3, 6, 16)  # each [num_tokens, heads * head_size]
layer.kv_cache = torch.full((8, 2, 4, 2, 8), torch.nan)
with set_forward_context(
    {"attn": metadata}, layers={"attn": layer}, slot_mapping={"attn": slots}
):
    output = layer(query, key, value)
kv_cache = layer.kv_cache
print("offsets written in block 7:", ~kv_cache[7, 0].isnan().any(-1).any(-1))
print("offsets written in block 2:", ~kv_cache[2, 0].isnan().any(-1).any(-1))
print("NaN in the output:", output.isnan().any().item())
assert torch.equal(kv_cache[7, 0], key[:4].view(4, 2, 8)), "tokens 0 to 3: block 7"
assert torch.equal(kv_cache[2, 1, :2], value[4:].view(2, 2, 8)), "4 and 5: block 2"
assert not output.isnan().any(), "only the six tokens' places are ever read"

# %% [markdown]
# Reading goes the other way: take the request's blocks *in its order*, join them, and
# drop the unused rest of the last one. Attention over that is attention over contiguous
# keys and values; paging is invisible to the mathematics.

# %%
pages = kv_cache[[7, 2]]  # [2 blocks, K and V, block_size, heads, head_size]
keys, values = pages.transpose(0, 1).flatten(1, 2)[:, :6]  # each [6, heads, head_size]
attend = torch.nn.functional.scaled_dot_product_attention
by_hand = attend(
    query.view(6, 2, 8).transpose(0, 1),  # [heads, num_tokens, head_size]
    keys.transpose(0, 1),
    values.transpose(0, 1),
    is_causal=True,
)
by_hand = by_hand.transpose(0, 1).reshape(6, 16)
print("keys come back in order:", torch.equal(keys, key.view(6, 2, 8)))
assert torch.equal(keys, key.view(6, 2, 8))
assert torch.allclose(output, by_hand, atol=1e-5), "the layer did the same"

# %% [markdown]
# That NaN trick is also how the tests of this project work: all memory that should never
# be read is poisoned, so that a stray read cannot pass unseen.

# %% [markdown]
# ## Exercise: write
#
# Write the keys and values of a step into the pages. Tokens with slot -1 are padding and
# must be written nowhere.
#
# `check.hint()` gives hints one by one, `check.solution()` shows an answer.

# %% exercise ex02

# %% [markdown]
# ## Exercise: gather
#
# And read a request back, in the order of its text.

# %% exercise ex02_2

# %% [markdown]
# ## Break it on purpose
#
# **More blocks than there are:**

# %%
pool = fresh_pool()
try:
    pool.get_new_blocks(8)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("only 7 blocks can be handed out")

# %% [markdown]
# **Freeing twice.** In a pool without reference counts the block would now be in the free
# queue twice, and two requests would write into it (vLLM #1556):

# %%
pool = fresh_pool()
twice = pool.get_new_blocks(1)
pool.free_blocks(twice)
try:
    pool.free_blocks(twice)
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("nobody had the block any more")

# %% [markdown]
# **A block in the wrong order** raises nothing at all. Gathering `[2, 7]` instead of
# `[7, 2]` gives numbers of the right shape, and a model that writes nonsense. Only a test
# against a known result finds it:

# %%
shuffled = kv_cache[[2, 7]].transpose(0, 1).flatten(1, 2)[0, :6]
print(
    "shape", tuple(shuffled.shape), " equal to the keys:", torch.equal(shuffled, keys)
)
assert shuffled.shape == keys.shape
assert not torch.equal(shuffled, keys)

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`BlockPool`](src:minivllm/core/block_pool.py) | `BlockPool` in [vllm/v1/core/block_pool.py](vllm:vllm/v1/core/block_pool.py) | no events, no metrics |
# | [`FreeKVCacheBlockQueue`](src:minivllm/core/block_pool.py) | `FreeKVCacheBlockQueue` in [vllm/v1/core/kv_cache_utils.py](vllm:vllm/v1/core/kv_cache_utils.py) | same order, tested on vLLM's own traces |
# | [`KVCacheBlock`](src:minivllm/core/block_pool.py) | `KVCacheBlock`, same file | same fields |
# | [`KVCacheManager`](src:minivllm/core/kv_cache_manager.py) | `KVCacheManager` in [vllm/v1/core/kv_cache_manager.py](vllm:vllm/v1/core/kv_cache_manager.py) | no connectors, no encoder cache |
# | [`FullAttentionSpec`](src:minivllm/core/kv_cache_interface.py) | `FullAttentionSpec` in [vllm/v1/kv_cache_interface.py](vllm:vllm/v1/kv_cache_interface.py) | dtypes are names, since `core/` has no torch |
# | `kv_cache` `[num_blocks, 2, block_size, heads, head_size]` | the backend decides: `get_kv_cache_shape` | one of several layouts there |

# %% [markdown]
# ## What was left out
#
# - **Slots of a whole batch, and the block table** that attention reads: notebook 03.
# - **Several groups** over one pool, page sizes that differ: notebook 04.
# - **Fast kernels** for writing and for attention over pages: notebooks 06 and 07.
# - **Prefix caching** in full, with its limits and its keys: notebook 09.
# - **Quantised caches**: a page may hold fp8 numbers with scales; not in this project.
