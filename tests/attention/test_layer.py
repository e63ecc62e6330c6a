"""The attention layer: its ops under torch.compile, what it keeps, the profile run, sharing, and its errors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from minivllm.attention.backends import torch_paged
from minivllm.attention.layer import Attention
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from minivllm.forward_context import collect_layers, set_forward_context
from tests.attention.paged_case import PagedBatch, make_config, make_layer

PAGE = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}


class Block(nn.Module):
    """A model in small: projections around one attention layer."""

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.attn = layer
        self.out = nn.Linear(layer.num_heads * layer.head_size, layer.num_heads * layer.head_size, bias=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(self.attn(query * 2, key * 2, value * 2))


def graph_of(model: nn.Module, batch: PagedBatch) -> list[torch.fx.Node]:
    """Nodes of the functional graph that a compiler gets."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    nodes: list[torch.fx.Node] = []

    def keep(module: torch.fx.GraphModule, _: object) -> object:
        nodes.extend(module.graph.nodes)
        return make_boxed_func(module.forward)

    with torch.inference_mode():
        batch.run(model=torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep)))
    return nodes


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_in_one_graph_with_any_number_of_tokens_and_no_recompilation() -> None:
    config = make_config()
    layer = make_layer(config)
    model = Block(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for requests in ([(0, 9), (5, 1)], [(3, 1), (7, 1)], [(0, 5), (2, 4), (9, 1)], [(11, 2)]):
        batch = PagedBatch(layer, config, requests, padding=1)
        again = PagedBatch(layer, config, requests, padding=1)
        with torch.inference_mode():
            torch.testing.assert_close(batch.run(model=compiled), again.run(model=model), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_the_graph_holds_no_cache_and_keeps_the_order_of_the_ops() -> None:
    config = make_config()
    layer = make_layer(config)
    batch = PagedBatch(layer, config, [(0, 9), (5, 1)])
    nodes = graph_of(Block(layer), batch)
    (write,) = [n for n in nodes if "unified_kv_cache_update" in str(n.target)]
    (attend,) = [n for n in nodes if "unified_attention_with_output" in str(n.args) + str(n.target)]
    assert write in attend.all_input_nodes, "attention must depend on the write"
    shapes = [n.meta["val"].shape for n in nodes if n.op == "placeholder" and hasattr(n.meta.get("val"), "shape")]
    assert batch.cache.shape not in shapes
    assert batch.table.shape not in shapes


def test_ops_are_registered_as_torch_wants_them() -> None:
    config = make_config()
    layer = make_layer(config)
    key = torch.randn(3, 2, 8)
    with set_forward_context(None, layers=collect_layers(layer)):
        torch.library.opcheck(torch.ops.minivllm.unified_kv_cache_update, (key, key.clone(), layer.layer_name))
        query = torch.randn(3, 4, 8)
        arguments = (query, key, key.clone(), torch.empty_like(query), layer.layer_name, key.new_empty(0))
        torch.library.opcheck(torch.ops.minivllm.unified_attention_with_output, arguments)


def test_outside_of_inference_mode_the_pages_join_no_autograd_graph() -> None:
    config = make_config()
    layer = make_layer(config)
    model = Block(layer)
    out = PagedBatch(layer, config, [(0, 9), (5, 1)]).run(model=model)
    assert out.requires_grad  # from the projection after attention
    assert not layer.kv_cache.requires_grad


def test_profile_run_gives_zeros_and_takes_the_workspace_that_steps_use(monkeypatch) -> None:
    monkeypatch.setattr(torch_paged, "_workspace", torch_paged._Workspace())
    monkeypatch.setattr(torch_paged, "MAX_GATHERED_KEYS", 64)
    config = make_config(max_model_len=128)
    layer = make_layer(config)
    with torch.inference_mode(), set_forward_context(None, layers=collect_layers(layer), is_profile_run=True):
        out = layer(torch.randn(64, 32), torch.randn(64, 16), torch.randn(64, 16))
    assert layer.kv_cache.numel() == 0
    assert out.shape == (64, 32)
    assert not out.any()
    (taken,) = torch_paged._workspace.buffers.values()
    assert taken.numel() == 2 * 128 * 2 * 8  # K and V of the longest sequence, 2 heads of 8
    for requests in ([(100, 28)], [(15, 1)] * 4, [(0, 64)]):
        PagedBatch(layer, config, requests).run()
        assert next(iter(torch_paged._workspace.buffers.values())) is taken


def test_specs_say_what_a_layer_keeps() -> None:
    config, no_hybrid = make_config(), make_config(disable_hybrid_kv_cache_manager=True)
    full, sliding, chunked = (
        make_layer(config, **options) for options in ({}, {"per_layer_sliding_window": 5}, {"attention_chunk_size": 8})
    )
    assert full.get_kv_cache_spec(config) == FullAttentionSpec(**PAGE)
    assert sliding.get_kv_cache_spec(config) == SlidingWindowSpec(**PAGE, sliding_window=5)
    assert chunked.get_kv_cache_spec(config) == ChunkedLocalAttentionSpec(**PAGE, attention_chunk_size=8)
    assert sliding.get_kv_cache_spec(no_hybrid) == FullAttentionSpec(**PAGE, sliding_window=5)
    assert chunked.get_kv_cache_spec(no_hybrid) == FullAttentionSpec(**PAGE, attention_chunk_size=8)
    assert make_layer(config, "b", kv_sharing_target_layer_name="a").get_kv_cache_spec(config) is None


def test_a_sharing_layer_reads_its_target_and_writes_nothing() -> None:
    config = make_config()
    target, sharing = make_layer(config, "a"), make_layer(config, "b", kv_sharing_target_layer_name="a")
    batch = PagedBatch(target, config, [(0, 6), (5, 1), (3, 4)])
    own = batch.run()
    before = batch.cache.clone()
    sharing.kv_cache = batch.cache
    metadata = batch.builder().build(0, batch.common)
    query = batch.new_tokens(batch.queries).flatten(1)
    for key in (None, torch.full((batch.num_tokens, 16), torch.nan)):
        with set_forward_context({"b": metadata}, layers={"b": sharing}, slot_mapping={"b": batch.slot_mapping}):
            shared = sharing(query, key, key)
        torch.testing.assert_close(shared.view_as(own), own, rtol=0, atol=0)
    torch.testing.assert_close(batch.cache, before, rtol=0, atol=0, equal_nan=True)


def test_a_layer_that_owns_its_cache_needs_key_and_value() -> None:
    layer = make_layer(make_config())
    with pytest.raises(ValueError, match=r"layers\.0\.attn writes its own KV cache"):
        layer(torch.zeros(1, 32), None, None)


def test_metadata_without_pages_or_slots_is_a_clear_error() -> None:
    config = make_config()
    layer = make_layer(config)
    batch = PagedBatch(layer, config, [(0, 3)])
    metadata = {layer.layer_name: batch.builder().build(0, batch.common)}
    tokens = [batch.new_tokens(x).flatten(1) for x in (batch.queries, batch.keys, batch.values)]
    with (
        set_forward_context(metadata, layers=collect_layers(layer), slot_mapping={}),
        pytest.raises(RuntimeError, match=r"'layers\.0\.attn' has metadata but no KV cache yet: bind its pages"),
    ):
        layer(*tokens)
    layer.kv_cache = batch.cache
    with (
        set_forward_context(metadata, layers=collect_layers(layer), slot_mapping={}),
        pytest.raises(RuntimeError, match=r"'layers\.0\.attn' has metadata but no slot mapping"),
    ):
        layer(*tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be above 0, got 0"),
        ({"head_size": -1}, "head_size must be above 0, got -1"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"per_layer_sliding_window": 0}, "sliding_window must be above 0, got 0"),
        ({"attention_chunk_size": -4}, "attention_chunk_size must be above 0, got -4"),
        ({"logits_soft_cap": 0.0}, r"logits_soft_cap must be above 0, got 0\.0"),
        ({"per_layer_sliding_window": 4, "attention_chunk_size": 4}, "not both"),
        ({"alibi_slopes": [0.5]}, r"alibi_slopes must have one value a head, 4, got \[1\]"),
        ({"sinks": torch.zeros(5)}, r"sinks must have one value a head, 4, got \[5\]"),
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, "cannot share its own KV cache"),
    ],
)
def test_bad_settings_name_the_layer_and_the_value(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"layers\.0\.attn.*{message}"):
        make_layer(make_config(), **options)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="sliding_windw"):
        make_layer(make_config(), sliding_windw=4)


def test_sinks_loaded_after_the_layer_was_made_are_used() -> None:
    config = make_config()
    sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
    layer = make_layer(config, sinks=sinks)
    sinks.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batch = PagedBatch(layer, config, [(3, 2)])
    torch.testing.assert_close(batch.run().double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_a_layer_made_on_the_meta_device_still_runs() -> None:
    """Models are built on the meta device; the layer's own constants must be real."""
    config: VllmConfig = make_config()
    with torch.device("meta"):
        layer = make_layer(config, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
    batch = PagedBatch(layer, config, [(3, 2), (4, 1)])
    torch.testing.assert_close(batch.run().double(), batch.expected(), rtol=1e-5, atol=1e-5)


def test_a_step_leaves_nothing_behind() -> None:
    """A step's plan is freed with its metadata; a builder holds no tensors, however many steps it has built."""
    config = make_config()
    layer = make_layer(config)
    batch = PagedBatch(layer, config, [(0, 9), (5, 1)])
    builder = batch.builder()
    for _ in range(3):
        metadata = builder.build(0, batch.common)
        batch.run(metadata)
        plan = weakref.ref(metadata.plan)
        del metadata
        assert plan() is None
    assert not any(isinstance(value, torch.Tensor | dict | list) and len(value) > 1 for value in vars(builder).values())
