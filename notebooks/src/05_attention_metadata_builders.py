# %% [markdown]
# # Attention metadata builders
#
# After this notebook you can:
#
# - **describe** a step by the fields of `CommonAttentionMetadata`
# - **write** a metadata builder, and say when it runs and for which layers
# - **split** a batch into decodes and prefills, and order it so that the split works
# - **point** finished metadata at another group's block table
# - **explain** an override that breaks its base class, and how it is refused
#
# **Prerequisites:** notebooks 01 (forward context) and 03 (block table); 04 helps
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
# A step is decided by the scheduler: *these requests compute so many tokens*. An
# attention kernel wants something else. One wants lists of pages, another a plan of
# tiles, a third decodes and prefills apart. A model has dozens of attention layers and
# perhaps two or three kinds of kernels.
#
# **How does one batch become what each kernel wants to read, without doing the work
# again in every layer?**
#
# The answer has two stages:
#
# - one [`CommonAttentionMetadata`](src:minivllm/attention/metadata.py) for each KV-cache
#   group: the batch, in a form that suits nobody in particular;
# - a **builder** for each *attention group*: it turns that into one backend's own
#   metadata, once a step, for all layers of the group.

# %% [markdown]
# ## A toy by hand
#
# Blocks hold 4 tokens. Three requests share a step:
#
# | request | computed before | new tokens | blocks | what it does |
# |---|---|---|---|---|
# | `A` | 6 | 1 | 7, 2 | decode |
# | `B` | 0 | 3 | 5 | prefill |
# | `C` | 4 | 1 | 3, 6 | decode |
#
# From these numbers all others follow.

# %%
num_computed, num_scheduled = torch.tensor([6, 0, 4]), torch.tensor([1, 3, 1])

query_start_loc = torch.cat(
    [torch.zeros(1, dtype=torch.int64), num_scheduled.cumsum(0)]
)
seq_lens = num_computed + num_scheduled
print("query_start_loc", query_start_loc.tolist(), "  [num_reqs + 1]")
print("seq_lens       ", seq_lens.tolist(), "     [num_reqs]")
print(
    "max_query_len", num_scheduled.max().item(), " max_seq_len", seq_lens.max().item()
)
assert query_start_loc.tolist() == [0, 1, 4, 5]
assert seq_lens.tolist() == [7, 3, 5], "after the step: attention reads new tokens too"

# %% [markdown]
# ## Naive code
#
# Each layer could derive what it needs from these numbers, whenever it runs. Here a
# layer wants to know, for every request, in which slots its keys lie: a *gather* through
# the block table.

# %%
blocks_of, calls = {"A": [7, 2], "B": [5], "C": [3, 6]}, []


def slots_of_keys(blocks, seq_len, block_size=4):
    """Where the keys of one request lie."""
    calls.append(1)
    return [
        blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)
    ]


for _layer in range(8):
    gathered = [
        slots_of_keys(blocks, length)
        for blocks, length in zip(blocks_of.values(), seq_lens.tolist())
    ]
for name, slots in zip(blocks_of, gathered):
    print(name, slots)
print("calls in this step:", len(calls))
assert gathered[0] == [28, 29, 30, 31, 8, 9, 10], "block 7, then block 2"

# %% [markdown]
# The answer is the same in all 8 layers, and was computed 8 times. It is plain Python on
# the host, and a GPU would have to wait for it in every layer. So: **once a step, before
# the model runs.**

# %%
assert len(calls) == 8 * 3, "layers times requests; 3 calls would have been enough"

# %% [markdown]
# ## The common description
#
# The runner makes one such object for each KV-cache group. We make it from the toy's
# table. `_cpu` twins hold the same values on the host, so that a builder never waits for
# the device. (With `query_start_loc` vLLM does the same; of the lengths its host knows
# an upper bound only, see the table at the end.)

# %%
from minivllm.attention.metadata import CommonAttentionMetadata


def describe_step(requests, block_size=4):
    """requests: name -> (new tokens, computed before, block ids)."""
    new, computed, blocks = zip(*requests.values())
    lengths = torch.tensor(new, dtype=torch.int32)
    before = torch.tensor(computed, dtype=torch.int32)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    table = torch.zeros(len(new), max(map(len, blocks)), dtype=torch.int32)
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = torch.tensor(ids)
    slots = [
        ids[p // block_size] * block_size + p % block_size
        for n, start, ids in requests.values()
        for p in range(start, start + n)
    ]
    return common_of(starts, before + lengths, before, table, torch.tensor(slots))


# %%
def common_of(starts, seq_lens, computed, table, slots):
    """All fields from five tensors; on a CPU the twins are the same tensors."""
    return CommonAttentionMetadata(
        query_start_loc=starts,  # [num_reqs + 1] int32
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,  # [num_reqs] int32
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=computed,  # [num_reqs] int32
        num_reqs=len(seq_lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table,  # [num_reqs, max_blocks] int32
        slot_mapping=slots,  # [num_tokens] int64
    )


# %%
from minivllm.viz.structures import AttentionMetadataView

toy = {"A": (1, 6, [7, 2]), "B": (3, 0, [5]), "C": (1, 4, [3, 6])}
common = describe_step(toy)
print("slot_mapping", common.slot_mapping.tolist())
assert common.slot_mapping.tolist() == [10, 20, 21, 22, 24], "as in notebook 03"
AttentionMetadataView.of(common, list(toy), block_size=4)

# %% [markdown]
# `max_query_len` and `max_seq_len` are Python integers: kernels need them on the host, to
# choose a grid. **Predict:** `B` now has its prompt behind it and all three decode. What
# are the two numbers in the next step?

# %% predict
after = {"A": (1, 7, [7, 2]), "B": (1, 3, [5]), "C": (1, 5, [3, 6])}
decodes = describe_step(after)
print("max_query_len", decodes.max_query_len, " max_seq_len", decodes.max_seq_len)
assert (decodes.max_query_len, decodes.max_seq_len) == (1, 8), (
    "one new token each; A has the longest text, 7 tokens and the new one"
)

# %% [markdown]
# Five steps of a small engine as a film: requests come as prefills and go on as decodes.

# %%
from minivllm.viz.stepper import Stepper

steps = [
    {"A": (6, 0, [7, 2])},
    {"A": (1, 6, [7, 2]), "B": (3, 0, [5])},
    {"A": (1, 7, [7, 2]), "B": (1, 3, [5]), "C": (4, 0, [3])},
    {"A": (1, 8, [7, 2, 4]), "B": (1, 4, [5, 1]), "C": (1, 4, [3, 6])},
    {"C": (1, 5, [3, 6]), "B": (1, 5, [5, 1])},
]
film = [
    (f"step {i}", AttentionMetadataView.of(describe_step(step), list(step), 4))
    for i, step in enumerate(steps)
]
assert describe_step(steps[3]).max_query_len == 1, "a step of decodes only"
Stepper(film)

# %% [markdown]
# ## The real builder
#
# A backend is three classes: [`AttentionBackend`](src:minivllm/attention/backend.py)
# names the other two,
# [`AttentionMetadataBuilder`](src:minivllm/attention/backend.py) prepares a step, and
# [`AttentionImpl`](src:minivllm/attention/backend.py) computes a layer. A builder is
# made once, with the spec of its layers (notebook 04) and their names; then `build()`
# runs once a step.

# %%
from minivllm.attention.backends.torch_paged import TorchPagedBackend
from minivllm.config import CacheConfig, ModelConfig, VllmConfig
from minivllm.core.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

config = VllmConfig(
    model_config=ModelConfig(
        model="toy", hf_config=None, dtype="float32", max_model_len=32
    ),
    cache_config=CacheConfig(block_size=4),
)
spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
builder_cls = TorchPagedBackend.get_builder_cls()
builder = builder_cls(spec, ["layers.0", "layers.1"], config, torch.device("cpu"))
metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
print(builder_cls.__name__, "->", type(metadata).__name__)
assert builder.layer_names == ["layers.0", "layers.1"], "one builder for both layers"

# %% [markdown]
# What the TORCH backend wants: where to write, split into block and offset; and a plan of
# what to gather. Decodes are put into one *piece* with a rectangle of key positions, each
# prefill is a piece of its own.
#
# **Predict:** the blocks and offsets of the five new tokens. (Their slots are 10, 20, 21,
# 22 and 24.)

# %% predict
blocks, offsets = (part.tolist() for part in metadata.write_where)
print("blocks", blocks, " offsets", offsets)
for piece in metadata.plan.pieces(window=None, chunk=None):
    rows, keys = piece.rows.flatten().tolist(), tuple(piece.positions.shape)
    print(f"piece of batch rows {rows}: key positions {keys}")
assert (blocks, offsets) == ([2, 5, 5, 5, 6], [2, 0, 1, 2, 0]), "divmod(slot, 4)"

# %% [markdown]
# The gather through the block table is the heart of it. A key at position `p` of batch
# row `r` lies in block `block_table[r, p // block_size]` at offset `p % block_size`. For
# a whole piece that is one lookup with two index tensors:

# %%
for piece in metadata.plan.pieces(window=None, chunk=None):
    columns = piece.positions // 4  # [B, num_keys]; piece.rows is [B, 1]
    found = common.block_table_tensor[piece.rows, columns].long()
    slots = found * 4 + piece.positions % 4
    for row, line in zip(piece.rows.flatten().tolist(), slots.tolist()):
        print(list(toy)[row], line)
        length = common.seq_lens[row].item()
        assert line[:length] == gathered[row], "the slots of the naive code"

# %% [markdown]
# `C` has two entries too many: in a rectangle all rows are as long as the longest. They
# repeat its last key, and a mask hides them. What must *never* happen is that they point
# at a stale entry of the table, whose block belongs to someone else by now.

# %% [markdown]
# ## One builder for each attention group
#
# Layers share metadata only if it would be the same. The runner splits the layers of
# each KV-cache group once more, by backend, spec and number of query heads: these are
# the *attention groups*, and each gets a builder. Windows are part of the spec.
#
# **Predict:** four layers: 0 and 2 have full attention, 1 and 3 a window of 8. How many
# builders, and how many entries in the dictionary that the forward context gets?

# %% predict
windowed = SlidingWindowSpec(
    block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=8
)
specs = {f"layers.{i}": windowed if i % 2 else spec for i in range(4)}
members = {}
for name, layer_spec in specs.items():
    members.setdefault((TorchPagedBackend, layer_spec, 2), []).append(name)
attn_metadata, num_builds = {}, 0
for (backend, layer_spec, _), names in members.items():
    made = backend.get_builder_cls()(layer_spec, names, config, torch.device("cpu"))
    attn_metadata |= dict.fromkeys(names, made.build(0, common))
    num_builds += 1
    print(layer_spec.kind, names)
assert (num_builds, len(attn_metadata)) == (2, 4), "built twice, found by four names"

# %% [markdown]
# In a real step the two would get different `common` objects, since each KV-cache group
# has a table of its own.

# %% [markdown]
# ## Decodes and prefills
#
# Kernels differ for the two: a decode has one query and reads many keys, so it waits for
# memory; a prefill has many queries and waits for arithmetic. Many backends run two
# kernels a layer and need to know where to cut the batch.
# [`split_decodes_and_prefills`](src:minivllm/attention/batch_split.py) says so: decodes
# are the *leading* requests of at most `decode_threshold` tokens.
#
# **Predict:** our batch has 1, 3 and 1 new tokens. The four numbers are `num_decodes`,
# `num_prefills`, `num_decode_tokens`, `num_prefill_tokens`.

# %% predict
from minivllm.attention.batch_split import split_decodes_and_prefills

print(split_decodes_and_prefills(common))
assert split_decodes_and_prefills(common) == (1, 2, 1, 4), (
    "C decodes too, but stands behind B: from the first long request on, all count "
    "as prefills"
)

# %% [markdown]
# That is correct and slow: `C` would go through the prefill kernel. So a builder may ask
# for another order. Its `reorder_batch_threshold` says how many tokens a request may have
# to be brought to the front; before each step the runner takes the smallest threshold of
# all its builders and sorts the rows into four regions:
#
# 1. **decode**: prompt done, at most so many tokens;
# 2. **short extend**: a piece of a prompt, not its first, at most so many tokens;
# 3. **long extend**: more tokens;
# 4. **prefill**: nothing computed yet, *even with one token*. A Mamba layer would
#    otherwise go on from a state that nobody has written (vLLM #32118).

# %%
from types import SimpleNamespace

from minivllm.attention.batch_split import reorder_batch_to_split_decodes_and_prefills
from minivllm.sampling.params import SamplingParams
from minivllm.worker.input_batch import CachedRequestState, InputBatch


def reordered(requests, decode_threshold=1):
    """requests: name -> (new tokens, computed before, prompt length). The new order."""
    batch = InputBatch(8, 32, 64, "cpu", vocab_size=50, block_sizes=[4])
    for i, (name, (_, computed, prompt)) in enumerate(requests.items()):
        state = CachedRequestState(
            req_id=name,
            prompt_token_ids=[1] * prompt,
            sampling_params=SamplingParams(),
            block_ids=([i + 1],),
            num_computed_tokens=computed,
            output_token_ids=[1] * max(0, computed + 1 - prompt),
        )
        batch.add_request(state)
    step = SimpleNamespace(num_scheduled_tokens={k: v[0] for k, v in requests.items()})
    moved = reorder_batch_to_split_decodes_and_prefills(batch, step, decode_threshold)
    return moved, list(batch.req_ids)


# %%
moved, order = reordered({"A": (1, 6, 5), "B": (3, 0, 3), "C": (1, 4, 4)})
print(moved, order)
in_order = describe_step({name: toy[name] for name in order})
print("query_start_loc", in_order.query_start_loc.tolist())
print("split", split_decodes_and_prefills(in_order))
assert (moved, order) == (True, ["A", "C", "B"]), "one swap, and the decodes lead"
assert split_decodes_and_prefills(in_order) == (2, 1, 2, 3), "now both decodes count"

# %% [markdown]
# Rows move by *swaps* of the persistent batch: tokens, counts and block-table rows
# together. The fewest rows are moved, so the order within a region is not kept.
#
# **Predict:** `P` is a prompt of one token, never computed; `Q` computes one token in the
# middle of its prompt; `D` decodes. Their order afterwards?

# %% predict
moved, order = reordered({"P": (1, 0, 1), "Q": (1, 4, 9), "D": (1, 6, 5)})
print(moved, order)
assert order == ["D", "Q", "P"], "decode, short extend, prefill: each has one token"

# %% [markdown]
# ## The same step for another table
#
# Say a hybrid model has three groups of the same windowed layers (notebook 04). Their
# steps differ in two tensors only: the block table and the slot mapping. A builder with
# `supports_update_block_table` can re-point finished metadata, instead of planning anew.
#
# **Predict:** which of the two parts is the same object afterwards, the plan or the
# table?

# %% predict
other = {"A": (1, 6, [11, 9]), "B": (3, 0, [8]), "C": (1, 4, [10, 12])}
common_1 = describe_step(other)
metadata_1 = builder.update_block_table(
    metadata, common_1.block_table_tensor, common_1.slot_mapping
)
print("same plan:", metadata_1.plan is metadata.plan)
print("group 0", metadata.block_table.tolist())
print("group 1", metadata_1.block_table.tolist())
assert metadata_1.plan is metadata.plan, "lengths, buckets and masks do not change"
assert metadata.block_table.tolist() == [[7, 2], [5, 0], [3, 6]], (
    "group 0 stays as it was"
)

# %% [markdown]
# ## Kernel blocks
#
# A group may have blocks of 8 tokens, because its pages had to grow (notebook 04), while
# its kernel handles pages of 4. Then each block id is cut into two *kernel blocks*, in
# the table that the builder sees: block `b` becomes `2b` and `2b + 1`. The slots do not
# change, as it is the same memory.
#
# **Predict:** the kernel's row for blocks 3 and 1.

# %% predict
from minivllm.worker.block_table import BlockTable

table = BlockTable(8, 1, 2, 16, "cpu", kernel_block_size=4)
table.append_row([3, 1], row_idx=0)
table.commit_block_table(num_reqs=1)
kernel_row = table.get_device_tensor(1)[0].tolist()
table.compute_slot_mapping(1, torch.tensor([0, 2]), torch.tensor([4, 8]))
print("kernel blocks", kernel_row, " slots", table.slot_mapping[:2].tolist())
assert kernel_row == [6, 7, 2, 3], "3 -> 6, 7 and 1 -> 2, 3"
assert table.slot_mapping[:2].tolist() == [3 * 8 + 4, 1 * 8] == [7 * 4, 2 * 4], (
    "position 4 is the first of kernel block 7, position 8 that of kernel block 2"
)

# %% [markdown]
# ## A builder of one's own
#
# A complete one, for a backend with two kernels. Its metadata are views: cutting a tensor
# copies nothing.

# %%
from dataclasses import dataclass, replace

from torch import Tensor

from minivllm.attention.backend import AttentionMetadata, AttentionMetadataBuilder


@dataclass
class TwoKernelMetadata(AttentionMetadata):
    num_decodes: int
    num_decode_tokens: int
    seq_lens: Tensor  # [num_reqs] int32
    block_table: Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64

    @property
    def decode_table(self):  # derived, so it cannot be out of date
        return self.block_table[: self.num_decodes]


# %%
class TwoKernelBuilder(AttentionMetadataBuilder[TwoKernelMetadata]):
    reorder_batch_threshold = 1
    supports_update_block_table = True

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        num_decodes, _, num_decode_tokens, _ = split_decodes_and_prefills(common)
        return TwoKernelMetadata(
            num_decodes,
            num_decode_tokens,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
        )

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


# %%
mine = TwoKernelBuilder(spec, ["layers.0"], config, torch.device("cpu"))
built = mine.build(common_prefix_len=0, common_attn_metadata=in_order)
print("decodes", built.num_decodes, " their rows", built.decode_table.tolist())
print("prefill slots", built.slot_mapping[built.num_decode_tokens :].tolist())
assert built.decode_table.tolist() == [[7, 2], [3, 6]], "A and C"
assert built.slot_mapping[built.num_decode_tokens :].tolist() == [20, 21, 22], "B"

# %% [markdown]
# ## Exercise: page lists
#
# The kernels of FlashInfer read no table. They want the live pages of all requests end to
# end, and where each request's begin. Write this `build`. The check makes it the method
# of a real builder and calls it as the runner does; rows of its tables end in stale ids.
#
# Replace the `raise` line. `check.hint()` gives hints one by one, `check.solution()`
# shows an answer.

# %% exercise ex05

# %% [markdown]
# ## Exercise: split a batch
#
# Write the split with plain integers. Some batches of the check are out of order.

# %% exercise ex05_2

# %% [markdown]
# ## Break it on purpose
#
# **A renamed parameter.** A base builder calls a helper by keyword; a subclass overrides
# the helper with another parameter name. In plain Python nobody objects, until that
# backend is chosen and a step runs. That happened while builders were given their block
# tables (vLLM #17483), and the type checker had passed it.


# %%
class PlainBase:
    def build(self, table):
        return self._build_decode(block_table=table)

    def _build_decode(self, block_table):
        return block_table


class PlainChild(PlainBase):  # no complaint here
    def _build_decode(self, block_table_tensor):
        return block_table_tensor


try:
    PlainChild().build(common.block_table_tensor)
except TypeError as error:
    print("in the middle of a run:", error)
else:
    raise AssertionError("the base calls it by a name that the child does not know")


# %% [markdown]
# Here the *class* is refused, when it is defined, with both signatures:


# %%
class Base(TwoKernelBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return self._build_decode(block_table=common_attn_metadata.block_table_tensor)

    def _build_decode(self, block_table):
        return block_table


try:

    class Child(Base):
        def _build_decode(self, block_table_tensor):
            return block_table_tensor
except TypeError as error:
    print("TypeError:", error)
else:
    raise AssertionError("the class should not exist")

# %% [markdown]
# **Re-pointing in place.** An `update_block_table` that changes what it is given saves an
# allocation, and takes group 0's table away from group 0:


# %%
class InPlace(TwoKernelBuilder):
    def update_block_table(self, metadata, blk_table, slot_mapping):
        metadata.block_table, metadata.slot_mapping = blk_table, slot_mapping
        return metadata


hasty = InPlace(spec, ["layers.0"], config, torch.device("cpu"))
group_0 = hasty.build(0, common)
group_1 = hasty.update_block_table(
    group_0, common_1.block_table_tensor, common_1.slot_mapping
)
print("group 0 would read", group_0.block_table.tolist())
assert group_0.block_table[0].tolist() == [11, 9], "group 1's blocks; its own are 7, 2"

# %% [markdown]
# **A builder that cannot re-point, and one for the wrong spec:**

# %%
from minivllm.core.kv_cache_interface import MambaSpec


class NoUpdate(AttentionMetadataBuilder[TwoKernelMetadata]):
    build = TwoKernelBuilder.build


state = MambaSpec(block_size=4, shapes=((3, 16),), dtypes=("float32",))
plain = NoUpdate(spec, ["layers.0"], config, torch.device("cpu"))
for attempt in (
    lambda: plain.update_block_table(built, built.block_table, built.slot_mapping),
    lambda: builder_cls(state, ["layers.0"], config, torch.device("cpu")),
):
    try:
        attempt()
    except (NotImplementedError, TypeError) as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("both must be refused")

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`CommonAttentionMetadata`](src:minivllm/attention/metadata.py) | `CommonAttentionMetadata` in [vllm/v1/attention/backend.py](vllm:vllm/v1/attention/backend.py) | exact lengths on the host; vLLM gave up `seq_lens_cpu` for `seq_lens_cpu_upper_bound`, as with asynchronous speculation only the device knows them |
# | [`AttentionMetadataBuilder`](src:minivllm/attention/backend.py) | `AttentionMetadataBuilder`, same file | same methods; drafting and cascade attention left out |
# | [`ChecksOverrides`](src:minivllm/attention/override_check.py) | none | vLLM relies on its type checker |
# | [`TorchPagedMetadataBuilder`](src:minivllm/attention/backends/torch_paged.py) | `CPUAttentionMetadataBuilder` in [vllm/v1/attention/backends/cpu_attn.py](vllm:vllm/v1/attention/backends/cpu_attn.py) | a plan in Python; vLLM's splits its work in C++ |
# | [`split_decodes_and_prefills`](src:minivllm/attention/batch_split.py) | same name in [vllm/v1/attention/backends/utils.py](vllm:vllm/v1/attention/backends/utils.py) | same numbers, tested on vLLM's own |
# | [`reorder_batch_to_split_decodes_and_prefills`](src:minivllm/attention/batch_split.py) | same name, same file | the same swaps |
# | [`AttentionGroup`](src:minivllm/worker/model_runner.py) | `AttentionGroup` in [vllm/v1/worker/utils.py](vllm:vllm/v1/worker/utils.py) | one builder a group |
# | [`AttentionMetadataBuilder.update_block_table`](src:minivllm/attention/backend.py) | `update_block_table`; [vllm/v1/worker/gpu_model_runner.py](vllm:vllm/v1/worker/gpu_model_runner.py) calls it for groups of one spec and one builder class | the number of query heads must be equal, too |

# %% [markdown]
# ## What was left out
#
# - **Cascade attention.** `common_prefix_len` tells a builder how many tokens all
#   requests share at their start, so that a kernel may read them once. It is 0 here.
# - **CUDA graphs.** A captured graph goes on reading the tensors of its capture, so
#   `build_for_cudagraph_capture` must hand out persistent ones: notebook 13.
# - **Speculation.** A decode may then have several tokens, which is why the threshold is
#   a number and not simply 1.
# - **Mamba and MLA builders**: notebooks 11 and 12.
# - **The kernels** that read all this: notebooks 06 and 07.
