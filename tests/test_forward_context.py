"""The forward context: who sees it, when it ends, and what its errors say."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

from minivllm.attention.backend import AttentionMetadata
from minivllm.forward_context import (
    BatchDescriptor,
    collect_layers,
    get_attention_context,
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from tests.attention.paged_case import make_config, make_layer


class Two(nn.Module):
    def __init__(self, first: str = "a", second: str = "b") -> None:
        super().__init__()
        config = make_config()
        self.one, self.two = make_layer(config, first), make_layer(config, second)


def test_outside_of_a_forward_the_error_names_the_remedy() -> None:
    assert not is_forward_context_available()
    with pytest.raises(RuntimeError, match=r"no forward context .*set_forward_context\(attn_metadata, layers="):
        get_forward_context()


def test_it_nests_and_comes_back() -> None:
    with set_forward_context(None, layers={}, batch_descriptor=BatchDescriptor(1)) as outer:
        with set_forward_context(None, layers={}, is_profile_run=True) as inner:
            assert get_forward_context() is inner
            assert inner.is_profile_run
        assert get_forward_context() is outer
        with pytest.raises(ZeroDivisionError), set_forward_context(None, layers={}):
            _ = 1 // 0
        assert get_forward_context() is outer
        assert outer.batch_descriptor == BatchDescriptor(num_tokens=1, num_reqs=None, uniform=False)
    assert not is_forward_context_available()


def test_threads_do_not_see_each_other() -> None:
    seen = []
    with set_forward_context(None, layers={}):
        thread = threading.Thread(target=lambda: seen.append(is_forward_context_available()))
        thread.start()
        thread.join()
        assert is_forward_context_available()
    assert seen == [False]


def test_tasks_do_not_see_each_other() -> None:
    async def forward(name: str, others: list[set[str]]) -> None:
        with set_forward_context({name: AttentionMetadata()}, layers={}):
            await asyncio.sleep(0)
            others.append(set(get_forward_context().attn_metadata or {}))

    async def both() -> list[set[str]]:
        found: list[set[str]] = []
        await asyncio.gather(forward("a", found), forward("b", found))
        return found

    assert asyncio.run(both()) == [{"a"}, {"b"}]


def test_a_generator_closed_late_does_not_leave_its_context_behind() -> None:
    def steps():
        with set_forward_context(None, layers={}):
            yield 1

    running = steps()
    next(running)
    running.close()
    assert not is_forward_context_available()


def test_layers_are_collected_by_name() -> None:
    model = Two()
    assert collect_layers(model) == {"a": model.one, "b": model.two}


def test_a_layer_in_two_places_is_one_layer() -> None:
    model = Two()
    model.again = model.one
    assert list(collect_layers(model)) == ["a", "b"]


def test_a_duplicate_name_is_refused_with_both_places() -> None:
    with pytest.raises(ValueError, match=r"duplicate layer name 'same': the modules 'one' and 'two'"):
        collect_layers(Two("same", "same"))


def test_a_layer_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        make_layer(make_config(), prefix="")


def test_metadata_slots_and_pages_of_one_layer() -> None:
    model, metadata, slots = Two(), AttentionMetadata(), torch.tensor([3])
    layers = collect_layers(model)
    model.one.kv_cache = model.two.kv_cache = torch.zeros(2, 2, 4, 2, 8)
    with set_forward_context({"a": metadata, "b": AttentionMetadata()}, layers=layers, slot_mapping={"a": slots}):
        assert get_attention_context("a") == (metadata, model.one, model.one.kv_cache, slots)
        assert get_attention_context("b")[3] is None


def test_metadata_before_the_pages_are_bound_is_refused() -> None:
    with (
        set_forward_context({"a": AttentionMetadata()}, layers=collect_layers(Two())),
        pytest.raises(RuntimeError, match="'a' has metadata but no KV cache yet: bind its pages"),
    ):
        get_attention_context("a")


def test_a_layer_without_metadata_is_named_with_those_that_have_it() -> None:
    with (
        set_forward_context({"b": AttentionMetadata(), "c": AttentionMetadata()}, layers=collect_layers(Two())),
        pytest.raises(RuntimeError, match=r"layer 'a' has no attention metadata .* have it: b, c\."),
    ):
        get_attention_context("a")


def test_an_unknown_layer_is_named_with_the_known() -> None:
    layers = {f"layer{i}": make_layer(make_config(), f"layer{i}") for i in range(10)}
    with (
        set_forward_context(None, layers=layers),
        pytest.raises(RuntimeError, match=r"layer 'z' is not in .* layer7 and 2 more: .*collect_layers\(model\)"),
    ):
        get_attention_context("z")


def test_without_metadata_every_layer_gets_none() -> None:
    with set_forward_context(None, layers=collect_layers(Two()), is_profile_run=True):
        metadata, layer, kv_cache, slots = get_attention_context("b")
    assert (metadata, layer.layer_name, kv_cache.numel(), slots) == (None, "b", 0, None)
