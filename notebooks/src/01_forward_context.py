# %% [markdown]
# # Forward context
#
# After this notebook you can:
#
# - **explain** how a layer finds its cache and its metadata, though no argument has them
# - **run** a model in the three situations it meets: profile run, prefill, decode
# - **give** each layer of a hybrid model its own metadata, by name
# - **look** inside a running forward pass and print what is hidden there
# - **read** the errors of a context that is missing, incomplete or doubled
#
# **Prerequisites:** PyTorch modules; what attention computes; notebook 00 helps
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
# A language model computes `hidden = model(input_ids, positions)`. But its attention
# layers need more than that to serve many requests from a cache:
#
# - their **KV cache**: the memory with the keys and values of earlier tokens;
# - the **slot mapping**: into which places of that memory the new tokens go;
# - the **attention metadata**: which tokens of the batch belong to which request, how
#   long each request is, where its memory lies.
#
# **How do these reach the attention layer, when the model's arguments do not have them?**

# %% [markdown]
# ## A toy by hand
#
# First the obvious way: pass everything down. Three functions stand for a model, one of
# its layers and the attention in it. A token is a number. The "cache" of a layer has 8
# blocks of 4 slots; our request owns blocks 7 and 2, so its tokens go to the slots 28,
# 29, 30, 31 and then 8, 9, ... "Attention" writes its numbers into the slots and returns
# the sum of all that the request has there so far.


# %%
def attention(x, pages, slots, seq_slots):
    pages[slots] = x
    return x + pages[seq_slots].sum()


def decoder_layer(x, pages, slots, seq_slots):  # needs none of them itself
    return attention(2 * x, pages, slots, seq_slots)


def model(x, all_pages, slots, seq_slots):  # neither does this one
    for pages in all_pages:
        x = decoder_layer(x, pages, slots, seq_slots)
    return x


all_pages = [torch.zeros(32), torch.zeros(32)]  # one a layer, [num_slots]
tokens, slots = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([28, 29, 30])
out = model(tokens, all_pages, slots, seq_slots=slots)
print(out)
assert all_pages[0][28:31].tolist() == [2, 4, 6], "the first layer wrote 2 * x"

# %% [markdown]
# It works, and it has three faults:
#
# 1. **Everyone carries it.** Each of a hundred model definitions must hand down
#    arguments that only the innermost function reads.
# 2. **Which page list belongs to which layer?** Here it is the order of a list. In a
#    hybrid model layers differ in kind, some share a cache and some have none.
# 3. **A compiler sees it all.** `torch.compile` would make caches and tables part of the
#    graph, and specialise on shapes that change with every step.
#
# vLLM worked like this once, and moved away from it (#13555).

# %% [markdown]
# ## Naive code
#
# The remedy in ten lines: put the step's data where the innermost function can look,
# for as long as the forward pass runs. Each layer has a *name* and asks by that name.

# %%
from contextlib import contextmanager

holder = {"current": None}


@contextmanager
def naive_context(context):
    former = holder["current"]
    holder["current"] = context
    try:
        yield
    finally:  # also when the forward pass fails
        holder["current"] = former


# %%
def attention_by_name(x, name):
    pages, slots, seq_slots = holder["current"][name]
    pages[slots] = x
    return x + pages[seq_slots].sum()


def slim_model(x):  # the model's own business, nothing else
    for i in range(2):
        x = attention_by_name(2 * x, name=f"layers.{i}")
    return x


pages = {f"layers.{i}": torch.zeros(32) for i in range(2)}
with naive_context({name: (pages[name], slots, slots) for name in pages}):
    print(slim_model(tokens))
assert torch.equal(pages["layers.0"], all_pages[0]), (
    "the same numbers, written as before"
)
assert holder["current"] is None, "after the pass nothing is left behind"

# %% [markdown]
# ## A model with real attention layers
#
# Now with the real classes. [`Attention`](src:minivllm/attention/layer.py) is the layer
# that every model here uses. It is made with a `prefix`, its dotted path in the model,
# and that is its name from then on. Its `forward(query, key, value)` knows nothing of
# caches. Around it a toy model of two layers, with 2 heads of 8 numbers each.

# %%
from torch import nn

from minivllm.attention.layer import Attention
from minivllm.config import CacheConfig, ModelConfig, VllmConfig

HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 2, 8, 4, 8
WIDTH = HEADS * HEAD_SIZE
config = VllmConfig(
    model_config=ModelConfig(
        model="toy", hf_config=None, dtype="float32", max_model_len=32
    ),
    cache_config=CacheConfig(block_size=BLOCK_SIZE),
)


# %%
class ToyLayer(nn.Module):
    def __init__(self, prefix, **options):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn = Attention(
            HEADS,
            HEAD_SIZE,
            scale=HEAD_SIZE**-0.5,
            vllm_config=config,
            prefix=f"{prefix}.attn",
            **options,
        )

    def forward(self, hidden):  # [num_tokens, WIDTH]
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return hidden + self.attn(query, key, value)


# %%
class ToyModel(nn.Module):
    def __init__(self, *options):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(
            ToyLayer(f"layers.{i}", **each) for i, each in enumerate(options)
        )

    def forward(self, input_ids, positions):  # both [num_tokens]
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden  # [num_tokens, WIDTH]


def make_model(*options):
    torch.manual_seed(0)
    return ToyModel(*options).eval().requires_grad_(False)


toy = make_model({}, {})
toy.layers[0].attn

# %% [markdown]
# The runner needs to know all layers that keep a cache. It asks the model once, after
# loading, with [`collect_layers`](src:minivllm/forward_context.py).

# %%
from minivllm.forward_context import collect_layers

layers = collect_layers(toy)
for name, layer in layers.items():
    print(name, type(layer).__name__, "kv_cache", tuple(layer.kv_cache.shape))
assert list(layers) == ["layers.0.attn", "layers.1.attn"]

# %% [markdown]
# ## First situation: the profile run
#
# How much memory is left for the cache? To find out, the runner runs the largest step
# once and measures, *before* there is a cache. So there are no pages, no slots and no
# metadata yet. [`set_forward_context`](src:minivllm/forward_context.py) takes
# `attn_metadata=None` for this, and attention then returns zeros of the right shape.
#
# **Predict:** our toy layer returns `hidden + attention(...)`. What does the whole toy
# model return in a profile run?

# %% predict
from minivllm.forward_context import set_forward_context

input_ids, positions = torch.tensor([3, 1, 4, 1, 5, 9]), torch.arange(6)
with set_forward_context(None, layers=layers, is_profile_run=True):
    profiled = toy(input_ids, positions)
print("hidden", tuple(profiled.shape))
assert torch.equal(profiled, toy.embed(input_ids)), (
    "attention gave zeros in both layers, so only the embedding is left"
)

# %% [markdown]
# ## Second situation: a prefill
#
# Now the memory is known: 8 blocks of 4 tokens. The runner allocates the pages and
# *binds* them to the layers: `layer.kv_cache` is the only place that holds them.

# %%
for layer in layers.values():
    shape = layer.get_attn_backend().get_kv_cache_shape(
        NUM_BLOCKS, BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE
    )
    layer.kv_cache = torch.zeros(shape)
print(shape, "= (num_blocks, K and V, block_size, num_kv_heads, head_size)")
assert shape == (8, 2, 4, 2, 8)

# %% [markdown]
# One request with a prompt of 6 tokens and blocks 7 and 2. The facts of the step are
# described once, in a [`CommonAttentionMetadata`](src:minivllm/attention/metadata.py):
# the same names as in vLLM. Notebooks 02, 03 and 05 explain where each comes from.

# %%
from minivllm.attention.metadata import CommonAttentionMetadata


def describe_step(query_len, seq_len, blocks, slots):
    """A step of one request: its last query_len of seq_len tokens are new."""
    starts = torch.tensor([0, query_len], dtype=torch.int32)
    lengths = torch.tensor([seq_len], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,  # [num_reqs + 1]
        query_start_loc_cpu=starts,
        seq_lens=lengths,  # [num_reqs]
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=lengths - query_len,
        num_reqs=1,
        num_actual_tokens=query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        block_table_tensor=torch.tensor([blocks], dtype=torch.int32),  # [1, blocks]
        slot_mapping=torch.tensor(slots),  # [num_tokens] int64
    )


# %%
from minivllm.viz.structures import AttentionMetadataView

prefill = describe_step(6, 6, [7, 2], [28, 29, 30, 31, 8, 9])
AttentionMetadataView.of(prefill, ["A"], BLOCK_SIZE)

# %% [markdown]
# A backend's *builder* turns this into what its kernels like to read; then each layer
# gets an entry, by name. This is the whole of what a runner does in a step:


# %%
from minivllm.forward_context import BatchDescriptor


def run_step(model, layers, input_ids, positions, common):
    """Build metadata, set the context, run the model."""
    metadata, slot_mapping = {}, {}
    for name, layer in layers.items():
        builder = layer.get_attn_backend().get_builder_cls()(
            layer.get_kv_cache_spec(config), [name], config, torch.device("cpu")
        )
        metadata[name] = builder.build(0, common)
        slot_mapping[name] = common.slot_mapping
    with set_forward_context(
        metadata,
        layers=layers,
        slot_mapping=slot_mapping,
        batch_descriptor=BatchDescriptor(num_tokens=len(input_ids)),
    ):
        return model(input_ids, positions)


# %% [markdown]
# **Predict:** the prompt has 6 tokens and the request owns blocks 7 and 2. Which rows of
# which blocks hold keys after the step?

# %% predict
prefilled = run_step(toy, layers, input_ids, positions, prefill)
key_cache = layers["layers.0.attn"].kv_cache[:, 0]  # [num_blocks, block_size, heads, 8]
written = key_cache.abs().sum((2, 3)) > 0
print(written.int())
assert written[7].all(), "slots 28 to 31 are block 7: tokens 0 to 3"
assert written[2].tolist() == [True, True, False, False], "slots 8, 9: tokens 4, 5"

# %% [markdown]
# Are the numbers right? The same model without any paging, attention in one line of
# PyTorch:


# %%
def reference(model, input_ids):
    """Every token attends to itself and all before it; nothing is kept."""
    hidden = model.embed(input_ids)
    for layer in model.layers:
        query, key, value = (
            part.view(-1, HEADS, HEAD_SIZE).transpose(0, 1)
            for part in layer.qkv(hidden).chunk(3, dim=-1)
        )
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        hidden = hidden + out.transpose(0, 1).reshape(-1, WIDTH)
    return hidden


print("equal:", torch.allclose(prefilled, reference(toy, input_ids), atol=1e-5))
assert torch.allclose(prefilled, reference(toy, input_ids), atol=1e-5)

# %% [markdown]
# ## Third situation: a decode
#
# One more token, number 2, at position 6. It lies in block 2 at offset 2: slot 10. The
# call of the model is the same; only the context differs.
#
# **Predict:** the model gets one token, `[1]` in shape. With which row of a full
# recompute of all 7 tokens does its output agree?

# %% predict
decode = describe_step(1, 7, [7, 2], [10])
decoded = run_step(toy, layers, torch.tensor([2]), torch.tensor([6]), decode)
full = reference(toy, torch.cat([input_ids, torch.tensor([2])]))
print("decoded", tuple(decoded.shape), " full", tuple(full.shape))
assert torch.allclose(decoded[0], full[6], atol=1e-5), (
    "with the last: K and V of the six earlier tokens came from the cache"
)

# %% [markdown]
# ## Look inside
#
# What left the arguments can no longer be seen in a debugger's list of arguments; vLLM
# soon had to write down where it went (#13887). It can be asked for. Here a hook on the
# second layer prints the context in the middle of the forward pass:

# %%
from minivllm.debug.printers import describe_forward_context

seen = []
hook = layers["layers.1.attn"].register_forward_pre_hook(
    lambda module, args: seen.append(describe_forward_context())
)
run_step(toy, layers, torch.tensor([2]), torch.tensor([6]), decode)
hook.remove()
for line in seen[0].splitlines():
    if not line.startswith("  ") or "cache" in line:  # leave out a backend's details
        print(line)
assert "slot mapping of layers.0.attn, layers.1.attn: [1] int64 10" in seen[0]

# %% [markdown]
# ## Different layers, different metadata
#
# The context holds a *dictionary*, layer name to metadata, not one object. That is what
# makes hybrid models possible. Let layer 1 see only a *sliding window* of the last 4
# tokens: it forms a KV-cache group of its own, with its own blocks, its own slots and
# its own metadata. With one global metadata, one of the two layers would use the
# other's table (#17394).
#
# Group 0 (layer 0) owns blocks 7 and 2, group 1 (layer 1) blocks 5 and 3.

# %%
hybrid = make_model({}, {"per_layer_sliding_window": 4})
hybrid_layers = collect_layers(hybrid)
common_of = {
    "layers.0.attn": describe_step(6, 6, [7, 2], [28, 29, 30, 31, 8, 9]),
    "layers.1.attn": describe_step(6, 6, [5, 3], [20, 21, 22, 23, 12, 13]),
}
metadata, slot_mapping = {}, {}
for name, layer in hybrid_layers.items():
    spec = layer.get_kv_cache_spec(config)
    layer.kv_cache = torch.zeros(8, 2, 4, 2, 8)
    builder_cls = layer.get_attn_backend().get_builder_cls()
    builder = builder_cls(spec, [name], config, torch.device("cpu"))
    metadata[name] = builder.build(0, common_of[name])
    slot_mapping[name] = common_of[name].slot_mapping
    print(name, type(spec).__name__, "slots", slot_mapping[name].tolist())
with set_forward_context(metadata, layers=hybrid_layers, slot_mapping=slot_mapping):
    hidden = hybrid(input_ids, positions)
assert len(set(map(id, metadata.values()))) == 2, "two groups, two metadata objects"

# %% [markdown]
# **Predict:** which blocks of layer 1 hold keys now?

# %% predict
used = {
    name: layer.kv_cache[:, 0].abs().sum((1, 2, 3)).nonzero().flatten().tolist()
    for name, layer in hybrid_layers.items()
}
print(used)
assert used["layers.1.attn"] == [3, 5], "its own group's blocks, not 2 and 7"

# %% [markdown]
# ## Nesting, failing, threads
#
# Contexts nest: a step may run a second model (a drafter, say) inside its own. And when
# a forward pass fails, the former context must come back, or the next request would
# compute with a dead one.
#
# **Predict:** the three printed numbers of tokens.

# %% predict
from minivllm.forward_context import get_forward_context, is_forward_context_available


def num_tokens():
    return get_forward_context().batch_descriptor.num_tokens


outer, inner = BatchDescriptor(num_tokens=6), BatchDescriptor(num_tokens=1)
with set_forward_context(None, layers=layers, batch_descriptor=outer):
    before = num_tokens()
    try:
        with set_forward_context(None, layers=layers, batch_descriptor=inner):
            inside = num_tokens()
            raise RuntimeError("the inner pass fails")
    except RuntimeError:
        after = num_tokens()
print(before, inside, after)
assert (before, inside, after) == (6, 1, 6), "the inner one ends with its with-block"
assert not is_forward_context_available(), "and nothing is left outside"

# %% [markdown]
# The context lives in a Python `ContextVar`, so each thread has its own: two engines in
# two threads of one process do not see each other's steps. The other side of it: a
# thread that you start *inside* a forward pass starts without one.

# %%
from threading import Thread

found = []
with set_forward_context(None, layers=layers):
    thread = Thread(target=lambda: found.append(is_forward_context_available()))
    thread.start()
    thread.join()
    found.append(is_forward_context_available())
print("in the new thread:", found[0], " in this one:", found[1])
assert found == [False, True]

# %% [markdown]
# ## What a compiler sees
#
# `Attention.forward` calls two *custom ops*: one writes keys and values, one attends.
# For `torch.compile` they are sealed boxes, and the context is read inside of them. So
# the whole model is one graph (`fullgraph=True` would raise otherwise), and neither
# pages nor tables are among its inputs.

# %%
ops, inputs = [], []


def spy(graph_module, example_inputs):
    """A compiler backend that only looks."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and "minivllm" in str(node.target):
            ops.append(str(node.target).split(".")[1])
    inputs.extend(tuple(each.shape) for each in example_inputs)
    return graph_module.forward


torch.compiler.reset()
compiled = torch.compile(toy, fullgraph=True, backend=spy)
same = run_step(compiled, layers, input_ids, positions, prefill)
for op in ops:
    print(op)
assert torch.allclose(same, prefilled, atol=1e-5)
assert (8, 2, 4, 2, 8) not in inputs, "no pages among the inputs of the graph"

# %% [markdown]
# The order of the two ops matters: attention must read what was just written, and the
# compiler sees no data that the two share. So the first returns an empty tensor, and the
# second takes it: an artificial dependency.

# %% [markdown]
# ## Exercise: a context of your own
#
# Write the heart of `set_forward_context` as a plain function. The check nests your
# function, and lets the innermost body fail now and then.
#
# `check.hint()` gives hints one by one, `check.solution()` shows an answer.

# %% exercise ex01

# %% [markdown]
# ## Exercise: metadata for every layer
#
# The runner builds one metadata object for each KV-cache group. Layers ask by name. Make
# the dictionary, and refuse a layer that is in two groups.

# %% exercise ex01_2

# %% [markdown]
# ## Break it on purpose
#
# **No context.** The most common mistake: calling the model by hand.

# %%
try:
    toy(input_ids, positions)
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("there was no context")

# %% [markdown]
# **A layer without metadata**, as when a runner forgets a KV-cache group:

# %%
only_first = {"layers.0.attn": metadata["layers.0.attn"]}
try:
    with set_forward_context(
        only_first, layers=hybrid_layers, slot_mapping=slot_mapping
    ):
        hybrid(input_ids, positions)
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("layers.1.attn had no metadata")

# %% [markdown]
# **Two layers of one name** would share a cache and overwrite each other's keys:

# %%
doubled = nn.ModuleList([ToyLayer("layers.0"), ToyLayer("layers.0")])
try:
    collect_layers(doubled)
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("the name is there twice")

# %% [markdown]
# **Metadata before the pages are bound**, the order of initialisation gone wrong:

# %%
unbound = make_model({}, {})
try:
    run_step(unbound, collect_layers(unbound), input_ids, positions, prefill)
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("the layers had no pages")

# %% [markdown]
# ## Here and in vLLM
#
# | here | in vLLM 0.32.0 | difference |
# |---|---|---|
# | [`ForwardContext`](src:minivllm/forward_context.py) | `ForwardContext` in [vllm/forward_context.py](vllm:vllm/forward_context.py) | `layers` is called `no_compile_layers` there |
# | [`set_forward_context`](src:minivllm/forward_context.py) | `set_forward_context`, same file | takes the layers; vLLM finds them in its config |
# | [`get_forward_context`](src:minivllm/forward_context.py) | `get_forward_context`, same file | a ContextVar here, a module variable there |
# | [`collect_layers`](src:minivllm/forward_context.py) | `static_forward_context` in `CompilationConfig` | found in the model; in vLLM each layer enters itself |
# | [`BatchDescriptor`](src:minivllm/forward_context.py) | `BatchDescriptor`, same file | no LoRA |
# | [`Attention`](src:minivllm/attention/layer.py) | `Attention` in [vllm/model_executor/layers/attention/attention.py](vllm:vllm/model_executor/layers/attention/attention.py) | no quantised caches |
# | [`unified_kv_cache_update`](src:minivllm/attention/layer.py) | `unified_kv_cache_update`, same file | the same custom op |

# %% [markdown]
# ## What was left out
#
# - **CUDA graphs.** A captured graph replays memory addresses; `BatchDescriptor` is the
#   key under which it is kept. Notebook 13.
# - **Builders.** Why metadata is built once a group and not once a layer: notebook 05.
# - **Data parallelism and microbatches**: vLLM's context also carries the token counts
#   of other ranks.
# - **KV sharing.** A layer may read another layer's cache: notebook 10.
