# %% [markdown]
# # KV-cache specs, page sizes, groups
#
# After this notebook you can:
#
# - **compute** the bytes of a page, for four kinds of layers
# - **predict** into which groups the layers of a hybrid model are dealt out
# - **derive** the number of blocks from bytes, and how many requests fit at once
# - **draw** how all groups lie over one allocation, and say why that is safe
# - **recognise** four errors of this place by their messages
#
# **Prerequisites:** PyTorch tensors; notebooks 02 (blocks and the pool) and 03 help
#
# **Minutes:** 40
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
# So far a block was a block: 4 tokens, one free queue, one table. But layers differ. A
# layer with *full attention* reads every earlier token. A *sliding-window* layer reads
# only the last few and could give older blocks back. A *Mamba* layer keeps one state of
# a fixed size and no tokens at all. Many models mix such layers; they are called
# *hybrid*.
#
# **How do layers that keep different things share one memory and one pool of blocks?**
#
# The answer has three words in it, and this notebook is about them:
#
# - a **spec** says what one layer keeps, and how many bytes a *page* has: the part of a
#   block that belongs to one layer;
# - a **group** is a set of layers that share one block table;
# - all groups draw **blocks of equal bytes** from one pool.

# %% [markdown]
# ## A toy by hand
#
# A page of an attention layer holds, for each of `block_size` tokens, a key and a value
# of every KV head:
#
# `page_size_bytes = block_size * num_kv_heads * (head_size + head_size_v) * bytes of a number`
#
# Keys and values have the same size in most models, hence the factor 2 that you often
# see. Let blocks hold 4 tokens; a layer has 2 KV heads of 8 numbers in bfloat16.

# %%
block_size, num_kv_heads, head_size, bytes_of_bf16 = 4, 2, 8, 2

per_token = num_kv_heads * (head_size + head_size) * bytes_of_bf16
page = block_size * per_token
print("bytes a token:", per_token, "  bytes a page:", page)
assert page == 4 * 2 * 16 * 2 == 256

# %% [markdown]
# The number of *query* heads plays no part: queries are not kept.
#
# Now a model of 8 layers. Layers 3 and 7 have full attention, the other six a window of
# 8 tokens. One request has 64 tokens.

# %%
max_model_len, window = 64, 8
kinds = ["full" if i % 4 == 3 else "window" for i in range(8)]
pages_of_full = max_model_len // block_size
pages_read = {"full": pages_of_full, "window": window // block_size}
print(kinds)
print("pages that the last token reads in a layer:", pages_read)
kept, read = 8 * pages_of_full, sum(pages_read[kind] for kind in kinds)
print(f"{kept} pages if every layer keeps all, {read} are read")
assert (kept, read) == (128, 2 * 16 + 6 * 2)

# %% [markdown]
# ## Naive code
#
# The obvious design has one table for all layers: a block is a page of *every* layer.
# Then the number of blocks is a division.


# %%
def naive_num_blocks(memory, pages):
    """memory: bytes. pages: bytes of a page, one a layer."""
    return memory // sum(pages)


memory = 64 * 1024
num_blocks = naive_num_blocks(memory, [page] * 8)
per_request = max_model_len // block_size
print(f"{num_blocks} blocks, a request of 64 tokens needs {per_request}")
assert num_blocks == 32
assert num_blocks // per_request == 2, "two such requests at once"

# %% [markdown]
# It is simple, and two things are wrong with it. A block cannot be given back while one
# full layer still needs its page, so the windowed layers keep what nobody will read.
# And with pages of unequal bytes "a block" is not even a multiple of anything.

# %% [markdown]
# ## The real classes: specs
#
# Each attention layer answers one question, `get_kv_cache_spec()`, with a small frozen
# value. Nothing else of the model reaches the planning of memory. No tensors yet: a
# dtype is its name.

# %%
from minivllm.core.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

shared = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}
full = FullAttentionSpec(**shared)
sliding = SlidingWindowSpec(**shared, sliding_window=8)
print(full.kind, full.page_size_bytes)
print(sliding.kind, sliding.page_size_bytes)
assert full.page_size_bytes == sliding.page_size_bytes == page

# %% [markdown]
# A window changes what is *kept*, not what a page holds. Two other kinds:
#
# - **MLA** (DeepSeek's attention) keeps one vector a token, from which all heads' keys
#   and values are both computed. `num_kv_heads` is 1, and V takes no room.
# - **Mamba** keeps a convolution state and an SSM state. A "page" is one copy of the
#   two, whatever `block_size` says.
#
# **Predict:** the page of an MLA layer with 4 tokens a block and a latent vector of 20
# numbers in bfloat16; and of a Mamba layer with states `[3, 16]` in bfloat16 and
# `[16, 2]` in float32.

# %% predict
mla = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=20, dtype="bfloat16")
mamba = MambaSpec(
    block_size=4, shapes=((3, 16), (16, 2)), dtypes=("bfloat16", "float32")
)
print("MLA", mla.page_size_bytes, "  Mamba", mamba.page_size_bytes)
assert mla.page_size_bytes == 4 * 20 * 2, "no factor 2: one vector serves K and V"
assert mamba.page_size_bytes == 48 * 2 + 32 * 4, "the block size is not in it"

# %% [markdown]
# A spec also knows the most blocks that one request holds at once. Full attention:
# `cdiv(max_model_len, block_size)`, where `cdiv` divides and rounds up. A window needs
# less, but more than you may think: while a step computes 16 tokens, the first of them
# still reads 7 earlier ones, and the last must be stored too. So it is
# `cdiv(window - 1 + 16, block_size)`, plus 1, because the window may begin in the middle
# of a block. The 16 is `max_num_batched_tokens`, the most that one step computes.
#
# **Predict:** that number for `sliding`, with 16 tokens in flight.

# %% predict
needs = {
    spec.kind: spec.max_blocks_per_request(max_model_len=64, max_in_flight_tokens=16)
    for spec in (full, sliding, mla, mamba)
}
print(needs)
assert needs["sliding_window"] == -(-(8 - 1 + 16) // 4) + 1 == 7, (
    "23 tokens are 6 blocks, and one more as they may begin inside a block"
)
assert needs["mamba"] == 1, "one state a request (without prefix caching)"

# %% [markdown]
# ## Groups
#
# Layers that always need the same blocks may share one table. So the six windowed layers
# could be one group and the two full ones another. But every block has the same bytes,
# whichever group takes it: a block for six layers is three times as large as one for
# two, and the group of two would leave two thirds of its blocks empty.
#
# The way out: **groups of equally many layers**. The six are dealt out into three groups
# of two. Each group has a table of its own, and a block is 2 pages for everyone.

# %%
from minivllm.core.layer_grouping import get_kv_cache_groups


def specs_of(*kinds):
    """Specs of layers, by name: as the runner collects them from a model."""
    return {f"layers.{i}": spec for i, spec in enumerate(kinds)}


model = specs_of(*[full if i % 4 == 3 else sliding for i in range(8)])
groups = get_kv_cache_groups(model)
for i, group in enumerate(groups):
    print(f"group {i}: {group.kv_cache_spec.kind:15}", *group.layer_names)
assert sorted(len(group.layer_names) for group in groups) == [2, 2, 2, 2]

# %% [markdown]
# Look at the windowed ones: not `0 1 | 2 4 | 5 6` but every third layer. The members of
# group `i` of `n` are `layers[i::n]`. With the layers of a model spread over a pipeline
# of machines, each machine then has its share of every group.
#
# The rule in full:
#
# 1. Put layers of one kind into a *bucket*, in the order of the model.
# 2. The group size is the size of the **smallest** bucket. But if the largest is less
#    than 1.5 times the smallest, it is the **largest**: a few layers more should not
#    split a bucket in two.
# 3. A bucket of `k` layers becomes `n = cdiv(k, group size)` groups, `layers[i::n]`.
#
# **Predict:** 5 windowed and 4 full layers. How many groups?

# %% predict
nine = get_kv_cache_groups(specs_of(*[sliding] * 5, *[full] * 4))
print([len(group.layer_names) for group in nine])
assert [len(group.layer_names) for group in nine] == [5, 4], (
    "5 is less than 1.5 * 4, so the group size is 5: two groups, and one page of five "
    "stays empty in the blocks of the full layers"
)

# %% [markdown]
# **Predict:** 6 windowed and 4 full layers, which is 1.5 times exactly. Which layers
# are in each group?

# %% predict
ten = get_kv_cache_groups(specs_of(*[sliding] * 6, *[full] * 4))
for group in ten:
    print(*group.layer_names)
assert [group.layer_names for group in ten[:2]] == [
    ("layers.0", "layers.2", "layers.4"),
    ("layers.1", "layers.3", "layers.5"),
], "the group size is 4, so the bucket of 6 needs two groups, [0::2] and [1::2]"

# %% [markdown]
# A model whose layers are all alike has one group with all its layers: that is the
# simple case of notebooks 02 and 03.

# %%
(only,) = get_kv_cache_groups(specs_of(*[full] * 8))
print(len(only.layer_names), "layers in one group")
assert len(only.layer_names) == 8

# %% [markdown]
# ## From bytes to blocks
#
# Now the division is right again. A block has the bytes of the widest group, and
# `num_blocks = memory // bytes_per_block`.
#
# **Predict:** 64 KiB, groups of two layers, pages of 256 bytes. How many blocks? (The
# naive design had 32.)

# %% predict
from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from minivllm.core.kv_cache_groups import bytes_per_block, get_kv_cache_config


def config_of(**cache):
    """The settings of this notebook: 64 tokens a request, at most 16 a step."""
    return VllmConfig(
        model_config=ModelConfig(
            model="toy", hf_config=None, dtype="bfloat16", max_model_len=64
        ),
        cache_config=CacheConfig(block_size=4, **cache),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8),
    )


kv_cache_config = get_kv_cache_config(config_of(), model, memory)
print("bytes a block:", bytes_per_block(groups))
print("num_blocks:", kv_cache_config.num_blocks)
assert kv_cache_config.num_blocks == 64 * 1024 // 512 == 128, (
    "four times as many, each a quarter as large"
)

# %% [markdown]
# One of the 128 is the *null block*, block 0. It is never handed out: it stands in a
# table where a window has moved on. So 127 can be used, and the check whether a request
# fits counts with 127.
#
# A request needs blocks in *every* group.
#
# **Predict:** how many blocks does one request of 64 tokens hold at most?

# %% predict
from minivllm.core.kv_cache_groups import blocks_per_request, get_kv_cache_capacity

needed = blocks_per_request(config_of(), kv_cache_config.kv_cache_groups, 64)
tokens, concurrency = get_kv_cache_capacity(config_of(), kv_cache_config)
print(f"{needed} blocks a request; {tokens} tokens, concurrency {concurrency:.2f}")
assert needed == 16 + 3 * 7, "16 in the full group, 7 in each of three windowed ones"
assert 3 < concurrency < 4, "128 / 37: three such requests, where naive code had two"

# %% [markdown]
# `concurrency` is what vLLM logs at start-up as "Maximum concurrency for ... tokens per
# request". It divides by all blocks, the null block included, so it is a little too
# high. And it is pessimistic in another way: most requests are shorter than
# `max_model_len`.
#
# The same model with the hybrid manager off: windowed layers are allocated like full
# ones, in one group. That is the naive design.

# %%
off = config_of(disable_hybrid_kv_cache_manager=True)
flat_config = get_kv_cache_config(off, model, memory)
for name, settings, planned in [
    ("hybrid on ", config_of(), kv_cache_config),
    ("hybrid off", off, flat_config),
]:
    tokens, concurrency = get_kv_cache_capacity(settings, planned)
    print(
        f"{name}: {len(planned.kv_cache_groups)} groups, {planned.num_blocks} blocks,"
        f" {tokens} tokens, concurrency {concurrency:.2f}"
    )
assert flat_config.num_blocks == num_blocks == 32

# %% [markdown]
# ## One allocation, overlapping groups
#
# 128 blocks of 512 bytes are 64 KiB: the whole memory, *for each of the four groups*.
# That is no mistake. There is one allocation, and all groups lie over it. In the
# picture a row is a region of the memory and a column a group; layers in one row are
# views of the *same bytes*.

# %%
from minivllm.viz.structures import GroupLayoutView

GroupLayoutView.of(kv_cache_config)

# %% [markdown]
# Each layer has its region, a page for each of the 128 blocks: page `b` of the layer
# begins at `first byte + 256 * b`. Block 5 of group 0 and block 5 of group 1 are the
# same bytes. This is safe, since **a block belongs to one group at a time**: all groups
# take their blocks from one pool, and the pool hands out a block once.
#
# Let us make the tensors.
# [`allocate_kv_cache`](src:minivllm/worker/memory.py) asks each layer's backend for the
# shape of its pages; a stand-in for the layers is enough here.

# %%
from types import SimpleNamespace

from minivllm.attention.backends.torch_paged import TorchPagedBackend
from minivllm.worker.memory import allocate_kv_cache

stand_in = SimpleNamespace(get_attn_backend=lambda: TorchPagedBackend)
views = allocate_kv_cache(
    kv_cache_config, dict.fromkeys(model, stand_in), torch.device("cpu")
)
for view in views.values():
    view.zero_()
base = min(view.data_ptr() for view in views.values())
print(tuple(views["layers.0"].shape), "a layer")
for name, view in views.items():
    print(name, "begins at byte", view.data_ptr() - base)
assert len({view.data_ptr() for view in views.values()}) == 2, "two regions for eight"

# %% [markdown]
# **Predict:** we write ones into block 5 of `layers.0` (group 0). Which of the eight
# layers see ones in *their* block 5?

# %% predict
views["layers.0"][5] = 1
seen = [name for name, view in views.items() if bool((view[5] == 1).all())]
print(seen)
views["layers.0"][5] = 0
first_of_each = [group.layer_names[0] for group in kv_cache_config.kv_cache_groups]
assert sorted(seen) == sorted(first_of_each), (
    "the first layer of every group: one place in the memory, four views of it"
)

# %% [markdown]
# A film of the rule: the same memory for models of other mixtures. F is a full and W a
# windowed layer. Watch how wide a block is and how many there are.

# %%
from minivllm.viz.stepper import Stepper

film = []
for num_sliding, num_full in [(0, 4), (4, 4), (5, 4), (6, 4), (6, 2), (3, 1)]:
    layers = specs_of(*[sliding] * num_sliding, *[full] * num_full)
    planned = get_kv_cache_config(config_of(), layers, memory)
    _, concurrency = get_kv_cache_capacity(config_of(), planned)
    label = f"{num_sliding} W + {num_full} F: concurrency {concurrency:.2f}"
    film.append((label, GroupLayoutView.of(planned)))
    print(label, "groups", len(planned.kv_cache_groups), "blocks", planned.num_blocks)
Stepper(film)

# %% [markdown]
# The more groups, the smaller the blocks and the more tables: each step then builds a
# slot mapping and attention metadata for every group. Memory is not the only cost.

# %%
widths = [len({start for start, _, _ in view.layers}) for _, view in film]
print("layers a block:", widths)
assert widths == [4, 4, 5, 4, 2, 1]

# %% [markdown]
# ## Pages of unequal size
#
# Groups can share a pool only if a block has the same bytes in each. What if a windowed
# layer has 1 KV head and a full one 2? Then the pages are 128 and 256 bytes.
# [`unify_kv_cache_spec_page_size`](src:minivllm/core/layer_grouping.py) brings all to
# the largest page:
#
# - where the largest is a multiple of the page, the block gets **more tokens**;
# - where it is not, the page is **padded**: bytes at its end stay unused;
# - a Mamba state does not grow with the block size, so it is always padded.
#
# **Predict:** the block size of the windowed layer afterwards, and the bytes of the
# Mamba layer's page that hold nothing.

# %% predict
from dataclasses import replace

from minivllm.core.layer_grouping import unify_kv_cache_spec_page_size

thin = replace(sliding, num_kv_heads=1)
mixed = {"full": full, "thin": thin, "mamba": mamba}
print("before", {name: spec.page_size_bytes for name, spec in mixed.items()})
unified = unify_kv_cache_spec_page_size(mixed)
for name, spec in unified.items():
    empty = spec.page_size_bytes - spec.real_page_size_bytes
    print(
        f"{name}: {spec.page_size_bytes} bytes, {empty} empty, block {spec.block_size}"
    )
assert unified["thin"].block_size == 8, "twice the tokens, for half the bytes each"
assert empty == 256 - 224, "the Mamba state is padded to the page of the others"

# %% [markdown]
# Now groups have different block sizes, here 4 and 8. Two rules follow, of which
# notebook 09 (prefix caching) makes use. A prefix hit must end where *all* groups have a
# block border: at multiples of the **LCM**. Hashes are made for pieces of the **GCD**,
# so that each group can put together the hashes of its own blocks.

# %%
from minivllm.core.kv_cache_groups import resolve_kv_cache_block_sizes

two_sizes = get_kv_cache_config(config_of(), {"full": full, "thin": thin}, memory)
sizes = [group.kv_cache_spec.block_size for group in two_sizes.kv_cache_groups]
scheduler_size, hash_size = resolve_kv_cache_block_sizes(two_sizes, config_of())
print(
    f"blocks of {sizes} tokens: hits end at {scheduler_size}s, hashes at {hash_size}s"
)
assert (scheduler_size, hash_size) == (8, 4)

# %% [markdown]
# ## Exercise: deal out the layers
#
# Write the group rule. Each bucket has the layers of one kind; return the groups, those
# of the first bucket first. The check has buckets of many sizes, also at the border of
# 1.5.
#
# Replace the `raise` line. `check.hint()` gives hints one by one, `check.solution()`
# shows an answer.

# %% exercise ex04

# %% [markdown]
# ## Exercise: one page size for all
#
# Write the unification. A layer is given by its block size, the bytes of its page, and
# whether it is a Mamba layer. Return the new block size of each, and how many bytes of
# its page stay empty.

# %% exercise ex04_2

# %% [markdown]
# ## Break it on purpose
#
# **Too little memory.** 16 KiB are 32 blocks, one request needs 37. The message says
# what would fit: it has tried shorter requests.

# %%
try:
    get_kv_cache_config(config_of(), model, 16 * 1024)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("37 blocks do not fit into 31")

# %% [markdown]
# **Exactly enough, but for the null block.** 37 blocks of memory look enough for 37. A
# planner that forgets block 0 would start, and then no request of full length could
# ever run to its end.

# %%
try:
    get_kv_cache_config(config_of(), model, 37 * 512)
except ValueError as error:
    print("ValueError:", str(error)[-90:])
else:
    raise AssertionError("only 36 of the 37 blocks can be handed out")
assert get_kv_cache_config(config_of(), model, 38 * 512).num_blocks == 38

# %% [markdown]
# **A page that cannot be padded.** MLA kernels read whole rows of tokens and know of no
# gap. A page of 160 bytes neither divides 256 nor may it be padded to it:

# %%
try:
    unify_kv_cache_spec_page_size({"full": full, "mla": mla})
except NotImplementedError as error:
    print("NotImplementedError:", error)
else:
    raise AssertionError("256 is no multiple of 160")

# %% [markdown]
# **Two windows, hybrid manager off.** As full attention both layers would share one
# group, whose spec can carry only one window:

# %%
other = replace(sliding, sliding_window=16)
try:
    get_kv_cache_groups(specs_of(full, sliding, other), disable_hybrid=True)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("windows of 8 and 16 are two specs")

# %% [markdown]
# **One block in two groups.** No error here, and that is the danger. Suppose a faulty
# pool gives block 5 to request `A` in group 0 and to `B` in group 1. `A` writes its
# keys, then `B` its own. This is why
# [`KVCacheManager.check_integrity`](src:minivllm/core/kv_cache_manager.py) compares what
# every request holds, in all groups together.

# %%
group_0, group_1 = (views[name] for name in first_of_each[:2])
group_0[5] = 1.0  # A's keys and values
group_1[5] = 2.0  # B's
print("A reads back", group_0[5].unique().tolist())
assert group_0[5].unique().tolist() == [2.0], "A attends to B's tokens"

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`KVCacheSpec`](src:minivllm/core/kv_cache_interface.py) and its kinds | same names in [vllm/v1/kv_cache_interface.py](vllm:vllm/v1/kv_cache_interface.py) | a dtype is a name here; no quantised pages |
# | [`UniformTypeKVCacheSpecs`](src:minivllm/core/kv_cache_interface.py) | `UniformTypeKVCacheSpecs`, same file | layers that differ in page size only: one group, no padding |
# | [`KVCacheConfig`](src:minivllm/core/kv_cache_interface.py) | `KVCacheConfig`, same file | same fields |
# | [`get_kv_cache_groups`](src:minivllm/core/layer_grouping.py) | `get_kv_cache_groups` in [vllm/v1/core/kv_cache_utils.py](vllm:vllm/v1/core/kv_cache_utils.py) | same rule, tested on vLLM's own answers; no groups made for single models |
# | [`unify_kv_cache_spec_page_size`](src:minivllm/core/layer_grouping.py) | `unify_kv_cache_spec_page_size`, same file | same rule |
# | [`get_kv_cache_configs`](src:minivllm/core/kv_cache_groups.py) | `get_kv_cache_configs`, same file | two memory layouts |
# | [`resolve_kv_cache_block_sizes`](src:minivllm/core/kv_cache_groups.py) | `resolve_kv_cache_block_sizes`, same file | no context parallelism |
# | [`allocate_kv_cache`](src:minivllm/worker/memory.py) | allocation in [vllm/v1/worker/gpu_model_runner.py](vllm:vllm/v1/worker/gpu_model_runner.py) | attention pages only |

# %% [markdown]
# ## What was left out
#
# - **Who gives window blocks back, and when**: the managers of each kind, notebook 10.
# - **Mamba pages at work**: what a state holds and how it is reused, notebook 11.
# - **Several machines.** Each worker plans for its own layers; all take the number of
#   blocks that the poorest can afford.
# - **Other layouts.** Here every layer has a region of its own (`LBNHC`). The code also
#   knows `BLHNC`, where all pages of a block lie together; unequal pages then need no
#   padding.
# - **Quantised pages** with scales beside the numbers, and layers of draft models.
