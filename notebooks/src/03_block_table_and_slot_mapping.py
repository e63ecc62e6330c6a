# %% [markdown]
# # Block table and slot mapping
#
# After this notebook you can:
#
# - **compute** the slot of any token by hand, from a block table and a position
# - **fill** a real `BlockTable` and read its `slot_mapping`
# - **explain** why rows move, why entries go stale and why padding is -1
# - **find** which token lies in a slot, as one does when a cache holds wrong bytes
# - **recognise** four errors of this place by their messages
#
# **Prerequisites:** PyTorch tensors; notebook 02 (blocks and the pool)
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
# In each step the model computes one key and one value vector for every token of the
# step, in every attention layer. They must be kept: all later tokens of the same
# request will read them. The memory for them, the *KV cache*, is cut into *blocks* of
# `block_size` tokens, and a request gets blocks one at a time, from wherever there are
# free ones (notebook 02). So two tokens that are neighbours in a text may lie far apart
# in memory.
#
# **Into which place does the key and value of each token go, and how does attention
# find it again?**
#
# Two small structures answer it:
#
# - the **block table**: one row a request, one column a block, an entry is a block id;
# - the **slot mapping**: one number for each token of the step, its *slot*.

# %% [markdown]
# ## A toy by hand
#
# Let blocks hold 4 tokens. The cache has 8 blocks, so 32 *slots*: slot 0 to 3 lie in
# block 0, slot 4 to 7 in block 1, and so on. Block 0 is never handed out: it is the
# *null block*, which may be read but belongs to nobody.
#
# Request `A` has 6 tokens and owns blocks 7 and 2, in that order. Request `B` has 3
# tokens and owns block 5. The order is not sorted, and that is normal: after some
# minutes of serving, free blocks are well shuffled.

# %%
from minivllm.viz.structures import CacheView

block_size = 4
blocks_of = {"A": [7, 2], "B": [5]}
num_tokens = {"A": 6, "B": 3}
CacheView.of(
    8, block_size, {name: (blocks_of[name], num_tokens[name]) for name in "AB"}
)

# %% [markdown]
# Every picture of this course says the same as a text, for eyes, screen readers and
# terminals alike. `print` shows it:

# %%
print(CacheView.of(8, block_size, {"A": ([7, 2], 6), "B": ([5], 3)}))

# %% [markdown]
# Now by hand. Token 5 of `A` (the sixth, we count from 0):
#
# 1. `5 // 4 = 1`: it falls into the request's block number 1, the second one;
# 2. `blocks_of["A"][1] = 2`: that block has id 2;
# 3. `5 % 4 = 1`: it is at offset 1 in the block;
# 4. its slot is `2 * 4 + 1 = 9`.
#
# **Predict:** in which slot does token 2 of `B` lie? Write down a number, then run.

# %% predict
column, offset = divmod(2, block_size)
slot = blocks_of["B"][column] * block_size + offset
print(f"column {column}, block {blocks_of['B'][column]}, offset {offset}: slot {slot}")
assert slot == 22, "block 5 begins at slot 5 * 4 = 20, and token 2 is at offset 2"

# %% [markdown]
# ## Naive code
#
# The rule as a function. Nothing else in this notebook is deeper than these two lines;
# the rest is about doing it for a whole batch, fast, without writing to a wrong place.


# %%
def slot_of(blocks, position, block_size):
    """The slot of one token. blocks: the request's block ids, in order."""
    column, offset = divmod(position, block_size)
    return blocks[column] * block_size + offset


for name, length in num_tokens.items():
    slots = [slot_of(blocks_of[name], p, block_size) for p in range(length)]
    print(f"{name}: positions 0..{length - 1} -> slots {slots}")
assert slots == [20, 21, 22], "B's three tokens lie side by side in block 5"

# %% [markdown]
# What is a slot good for? Seen as one flat list of places, the cache of a layer can be
# written with one indexing operation, and read back with another. Here each token's
# "key" is a single number, 100 for token 0 of `A` and so on:

# %%
flat_cache = torch.full((8 * block_size,), -1)  # [num_slots]
slots_of_a = torch.tensor([slot_of([7, 2], p, block_size) for p in range(6)])
flat_cache[slots_of_a] = 100 + torch.arange(6)
print("as blocks, shape [num_blocks, block_size]:")
print(flat_cache.view(8, block_size))
assert flat_cache[slots_of_a].tolist() == [100, 101, 102, 103, 104, 105], (
    "reading at the slots gives the tokens back in the order of the text"
)

# %% [markdown]
# ## A step is a batch
#
# A step mixes requests at different points of their life. Say `A` has 6 tokens in the
# cache and computes its next one (a *decode*: 1 token, position 6), while `B` computes
# its whole prompt of 3 tokens (a *prefill*: positions 0, 1, 2). The 4 tokens are laid
# end to end in one flat batch. vLLM describes such a batch by two arrays:
#
# | name | shape | here | meaning |
# |---|---|---|---|
# | `query_start_loc` | `[num_reqs + 1]` int32 | `[0, 1, 4]` | request `i` owns batch rows `query_start_loc[i]` up to, not including, `query_start_loc[i + 1]` |
# | `positions` | `[num_tokens]` int64 | `[6, 0, 1, 2]` | place of each token in its own text |
#
# There is no padding between requests, and no `[batch, length]` rectangle anywhere.
#
# **Predict:** request `C` joins with 2 tokens in this step. What is `query_start_loc`
# then? It is the running sum of the requests' token counts, with a 0 in front.

# %% predict
counts = torch.tensor([1, 3, 2])
query_start_loc = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
print(query_start_loc)
assert query_start_loc.tolist() == [0, 1, 4, 6], "0, 0 + 1, 1 + 3, 4 + 2"

# %% [markdown]
# ## The real class
#
# [`BlockTable`](src:minivllm/worker/block_table.py) keeps the rows of up to
# `max_num_reqs` requests. Its buffers are made once and written in place, for a CUDA
# graph replays the addresses that it was captured with. Rows are edited on the host;
# `commit_block_table` copies them to the device that attention reads (on a CPU the two
# are the same memory).

# %%
from minivllm.worker.block_table import BlockTable


def two_requests():
    """Row 0 is A with blocks 7 and 2, row 1 is B with block 5."""
    table = BlockTable(
        block_size=4,
        max_num_reqs=3,
        max_num_blocks_per_req=4,
        max_num_batched_tokens=8,
        device="cpu",
    )
    table.append_row([7, 2], row_idx=0)
    table.append_row([5], row_idx=1)
    return table


table = two_requests()
table.commit_block_table(num_reqs=2)
print("block_table_tensor", tuple(table.get_device_tensor(2).shape), "int32")
print(table.get_device_tensor(2))
print("num_blocks_per_row", table.num_blocks_per_row.tolist())
assert table.get_row(0) == [7, 2]

# %% [markdown]
# Entries past a row's last block are 0 here, but nobody may rely on that: they are
# *unused*, and later they are *stale*. `num_blocks_per_row` says how many count.

# %%
from minivllm.viz.structures import BlockTableView

BlockTableView.of(table, ["A", "B"])

# %% [markdown]
# [`BlockTable.compute_slot_mapping`](src:minivllm/worker/block_table.py) computes all
# slots of a step at once. It does what `slot_of` does, with arrays:
#
# 1. `rows`: the request of each token, from `query_start_loc`, `[0, 1, 1, 1]`;
# 2. `columns = positions // block_size`;
# 3. `block_table[rows, columns]`, looked up in the flattened table;
# 4. times `block_size`, plus the offset, in int64.
#
# **Predict:** the four slots for `positions = [6, 0, 1, 2]`.

# %% predict
query_start_loc = torch.tensor([0, 1, 4], dtype=torch.int32)  # [num_reqs + 1]
positions = torch.tensor([6, 0, 1, 2])  # [num_tokens] int64
table.compute_slot_mapping(2, query_start_loc, positions)
print("slot_mapping", tuple(table.slot_mapping.shape), table.slot_mapping.dtype)
print(table.slot_mapping)
wanted = [slot_of([7, 2], 6, 4)] + [slot_of([5], p, 4) for p in range(3)]
assert table.slot_mapping[:4].tolist() == wanted == [10, 20, 21, 22], (
    "A's position 6 is offset 2 of its second block, 2: slot 10; B fills block 5"
)

# %%
from minivllm.viz.structures import SlotMappingView

SlotMappingView.of(table, ["A", "B"], query_start_loc, positions, padded_to=8)

# %% [markdown]
# The last four entries are -1, *no slot*. The buffer always has
# `max_num_batched_tokens` entries, and all that no token of the step owns are -1. Below
# we shall see what would happen otherwise.

# %% [markdown]
# ## A request grows
#
# Each decode adds one token. Before the step the scheduler asks: does the new token
# still fit into the last block? Only when it does not, one more block is appended to
# the row. Let us watch request `A` go from 6 tokens to 10; the pool hands out block 3,
# then whatever is free.
#
# **Predict:** the steps compute the positions 6, 7, 8 and 9. In which of them does the row
# grow?

# %% predict
trace, appended_at, free = [], [], [3, 6]
table = two_requests()
for position in range(6, 10):
    if position % 4 == 0:  # the blocks so far are full
        table.append_row([free.pop(0)], row_idx=0)
        appended_at.append(position)
    start, where = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([position])
    table.compute_slot_mapping(1, start, where)
    slot = table.slot_mapping[0].item()
    trace.append(
        (f"position {position} -> slot {slot}", BlockTableView.of(table, ["A"]))
    )
    print(trace[-1][0], table.get_row(0))
assert appended_at == [8], "positions 6, 7 fit into block 2; 8 is the first of a third"

# %% [markdown]
# The same as a film. Move the slider; an asterisk marks what changed. (Without a
# running kernel you see all steps below each other.)

# %%
from minivllm.viz.stepper import Stepper

Stepper(trace)

# %% [markdown]
# Off-by-one errors live exactly here. A request of 8 tokens has two *full* blocks: the
# token at position 7 is in the second one, and position 8 needs a third. Code that
# takes `length // block_size` where it means `(length - 1) // block_size` works for
# three lengths in four.

# %%
for length in range(5, 10):
    needed = -(-length // block_size)  # cdiv: rounded up
    print(f"{length} tokens need {needed} blocks; the last is at offset", end=" ")
    print((length - 1) % block_size)
assert -(-8 // block_size) == 2, "8 tokens fill two blocks of 4 exactly"

# %% [markdown]
# ## Rows move
#
# Rows `0 .. num_reqs - 1` must be the live requests, without holes, because kernels
# take the first `num_reqs` rows. When the request in row 0 finishes, the last row is
# moved into the hole: [`BlockTable.move_row`](src:minivllm/worker/block_table.py). The
# input batch calls this *condense*.

# %%
table = two_requests()
table.clear_row(0)  # A has finished
table.move_row(src=1, tgt=0)  # B takes its row
print(table.get_numpy_array())
print("num_blocks_per_row", table.num_blocks_per_row.tolist())
assert table.get_row(0) == [5]
assert table.get_row(1) == []

# %% [markdown]
# A row that is *replaced* may leave old ids behind. `add_row` sets the length to 0 and
# appends; it does not wipe what lies past the new length.
#
# **Predict:** row 0 held `[7, 2]` and gets `add_row([6])`. What are its first two
# entries in memory?

# %% predict
table = two_requests()
table.add_row([6], row_idx=0)
print("in memory:", table.get_numpy_array()[0, :2].tolist())
print("live:     ", table.get_row(0))
assert table.get_numpy_array()[0, :2].tolist() == [6, 2], (
    "block 2 is stale: it may belong to another request by now, and only the row's "
    "length (for attention: seq_lens) keeps it from being read"
)

# %% [markdown]
# A preempted request shows the same. It lost its blocks, comes back later with new
# ones, and these *replace* its row. Appending them to the old row is a bug that vLLM
# has had (#46595): the request then reads other requests' tokens.

# %% [markdown]
# ## Why padding is -1
#
# A step of 4 tokens is often run as a step of 8: a CUDA graph has fixed shapes. The
# four extra rows of K and V are garbage and must go nowhere. In vLLM the sign for
# nowhere is -1 (`PAD_SLOT_ID`), and the kernel that writes the cache skips it.
#
# But -1 is also a legal index in PyTorch: the last element. A write that forgets to skip
# it destroys the last slot of the cache, which belongs to some request (vLLM #43810).
#
# **Predict:** what does the last slot hold after this write?

# %% predict
cache = torch.zeros(32)  # one number a slot
slot_mapping = torch.tensor([10, 20, 21, 22, -1, -1])
keys = torch.tensor([1.0, 2.0, 3.0, 4.0, 666.0, 666.0])
naive = cache.clone()
naive[slot_mapping] = keys
careful = cache.clone()
live = slot_mapping >= 0
careful[slot_mapping[live]] = keys[live]
print(
    "naive:   slot 31 =", naive[31].item(), "  careful: slot 31 =", careful[31].item()
)
assert naive[31] == 666, "index -1 is slot 31: padding overwrote a real slot"
assert careful[31] == 0, "with the -1 entries left out, nothing was written there"

# %% [markdown]
# ## Why slots are int64
#
# Block ids fit int32 with ease. Slots may not: a block id is multiplied by the block
# size, and later by the bytes of a token. In int32 the product wraps around, without an
# error (vLLM #1486, #47671). `slot_mapping` is int64, and the class multiplies in int64.

# %%
block_id = torch.tensor([150_000_000], dtype=torch.int32)
print("int32:", (block_id * 16).item(), " int64:", (block_id.long() * 16).item())
big = BlockTable(16, 1, 1, 1, "cpu")
big.append_row([150_000_000], 0)
big.compute_slot_mapping(1, torch.tensor([0, 1]), torch.tensor([15]))
print("BlockTable:", big.slot_mapping.item())
assert (block_id * 16).item() < 0, "2.4e9 does not fit int32 and wraps to a negative"
assert big.slot_mapping.item() == 150_000_000 * 16 + 15

# %% [markdown]
# ## One table a group
#
# Some models mix layer kinds, say full attention and a sliding window. Layers of one
# kind form a *KV-cache group*; each group has blocks of its own, so the same token has
# one slot in each group. [`MultiGroupBlockTable`](src:minivllm/worker/block_table.py)
# holds one `BlockTable` a group and edits them together; block ids come as a tuple with
# one list a group. A model of one kind simply has one group.

# %%
from minivllm.worker.block_table import MultiGroupBlockTable

tables = MultiGroupBlockTable(
    max_num_reqs=2,
    max_model_len=64,
    max_num_batched_tokens=4,
    device="cpu",
    block_sizes=[4, 8],
)
tables.add_row(([7, 2], [3]), row_idx=0)
tables.compute_slot_mapping(1, torch.tensor([0, 2]), torch.tensor([4, 5]))
for i, group in enumerate(tables.block_tables):
    print(
        f"group {i}: block_size {group.block_size}, slots", group.slot_mapping.tolist()
    )
assert tables[0].slot_mapping[:2].tolist() == [8, 9], "column 1, block 2 of group 0"
assert tables[1].slot_mapping[:2].tolist() == [28, 29], "column 0, block 3 of group 1"

# %% [markdown]
# ## Exercise: the slots of a batch
#
# Write the slots of a whole step with plain loops. Use `query_start_loc` to know whose
# token a batch row is. The check runs your function on 40 batches, mixed of prefills,
# chunks and decodes, with several block sizes.
#
# Replace the `raise` line. `check.hint()` gives hints one by one, `check.solution()`
# shows an answer.

# %% exercise ex03

# %% [markdown]
# ## Exercise: whose slot is this?
#
# The other way round. A debugger shows that slot 1234 holds nonsense: which request and
# which position is that? Beware of stale entries: a block counts for a row only below
# the row's `seq_lens`.

# %% exercise ex03_2

# %% [markdown]
# ## Break it on purpose
#
# **A position without a block.** Row 1 (`B`) owns one block, positions 0 to 3. In a flat
# table the cell after a full row is the *next request's* first block: without a check,
# a position past the row reads the neighbour (vLLM #54296). Here it is refused.

# %%
table = two_requests()
try:
    table.compute_slot_mapping(2, torch.tensor([0, 1, 2]), torch.tensor([6, 4]))
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("position 4 of row 1 has no block")

# %% [markdown]
# **More blocks than the row holds.** The row has `max_num_blocks_per_req = 4` cells. In
# C-like code the fifth block lands in the next row (vLLM #50287).

# %%
try:
    table.append_row([1, 3, 4], row_idx=0)
except ValueError as error:
    print("ValueError:", error)
assert table.get_row(0) == [7, 2], "a refused append changes nothing"

# %% [markdown]
# **Batch and `query_start_loc` disagree, and a batch that is too big:**

# %%
for starts, where in [([0, 1, 3], [6, 0]), ([0, 3, 9], [0] * 9)]:
    try:
        table.compute_slot_mapping(2, torch.tensor(starts), torch.tensor(where))
    except ValueError as error:
        print("ValueError:", error)
    else:
        raise AssertionError("both batches are wrong")

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`BlockTable`](src:minivllm/worker/block_table.py) | `BlockTable` in [vllm/v1/worker/block_table.py](vllm:vllm/v1/worker/block_table.py) | checks that rows and positions fit; vLLM trusts its scheduler |
# | [`MultiGroupBlockTable`](src:minivllm/worker/block_table.py) | `MultiGroupBlockTable`, same file | same methods |
# | [`BlockTable.compute_slot_mapping`](src:minivllm/worker/block_table.py) | `compute_slot_mapping` and a Triton kernel, one program a request | numpy on the host; same numbers, tested on vLLM's own |
# | [`BlockTable.move_row`](src:minivllm/worker/block_table.py) | `move_row` | same rule: the source row is cleared |
# | [`CpuGpuBuffer`](src:minivllm/worker/block_table.py) | `CpuGpuBuffer` in [vllm/v1/utils.py](vllm:vllm/v1/utils.py) | host buffer and device buffer in one |
# | [`PAD_SLOT_ID`](src:minivllm/worker/block_table.py) | `PAD_SLOT_ID` in [vllm/v1/attention/backends/utils.py](vllm:vllm/v1/attention/backends/utils.py) | -1 in both |

# %% [markdown]
# ## What was left out
#
# - **Kernel blocks.** An attention kernel may want blocks smaller than the manager's;
#   `kernel_block_size` cuts each id into several. The class can do it; notebook 05
#   shows it.
# - **Context parallelism.** Tokens of one request dealt out over several GPUs: most
#   slots are then -1 on each of them.
# - **The write itself.** Which kernel puts K and V into the slots is the subject of
#   notebooks 02 (in plain PyTorch) and 06 (in Triton).
# - **Who chooses the blocks.** That is the scheduler with its KV-cache manager,
#   notebooks 02 and 08.
