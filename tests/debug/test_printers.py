"""The printers show context and cache inside a forward, outside of one, and in a profile run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.attention.layer_base import AttentionLayerBase
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from minivllm.debug.printers import describe_forward_context, describe_kv_cache
from minivllm.forward_context import BatchDescriptor, set_forward_context

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")


@dataclass
class Metadata:
    query_start_loc: Tensor
    max_query_len: int
    note: str = "x" * 300


class Layer(AttentionLayerBase):
    """A layer with a cache of 3 blocks of 4 tokens, K and V, 1 head of 2."""

    def __init__(self, name: str, bound: bool = True) -> None:
        super().__init__(name)
        if bound:
            self.kv_cache = torch.zeros(3, 2, 4, 1, 2)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return SPEC

    def get_attn_backend(self) -> Any:
        raise NotImplementedError


def metadata(*starts: int) -> Any:
    return Metadata(query_start_loc=torch.tensor(starts, dtype=torch.int32), max_query_len=5)


def test_outside_a_forward() -> None:
    assert describe_forward_context().startswith("no forward context")
    text = describe_kv_cache(Layer("a"))
    assert "a: cache [3, 2, 4, 1, 2] float32" in text
    assert "name some with blocks=[...]" in text
    with pytest.raises((RuntimeError, ValueError, AssertionError), match="forward context"):
        describe_kv_cache("a")


def test_inside_a_forward_each_group_is_shown_once() -> None:
    layers = {name: Layer(name) for name in ("a", "b", "c", "d", "e")}
    first, second = metadata(0, 3, 5), metadata(0, 5)
    slots, others = torch.tensor([4, 5, -1]), torch.arange(20)
    with set_forward_context(
        {"a": first, "b": first, "c": first, "d": first, "e": second},
        layers=layers,
        slot_mapping={"a": slots, "b": slots, "c": slots, "d": slots, "e": others},
        batch_descriptor=BatchDescriptor(num_tokens=3),
    ):
        text = describe_forward_context()
        drawn = describe_kv_cache("a")
        with pytest.raises(ValueError, match=r"layer 'z' is not in the forward context; it has a ... e \(5 layers\)"):
            describe_kv_cache("z")
    lines = text.splitlines()
    assert "num_tokens=3" in lines[0]
    assert "profile run" not in lines[0]
    assert [line for line in lines if line.startswith("  a:")] == [
        "  a: cache [3, 2, 4, 1, 2] float32, 0.0 MiB, stride (16, 8, 2, 2, 1)"
    ]
    assert lines.count("Metadata of a ... d (4 layers)") == lines.count("Metadata of e") == 1
    assert "  query_start_loc: [3] int32 0 3 5" in lines
    assert "slot mapping of a ... d (4 layers): [3] int64 4 5 -1" in lines
    assert "slot mapping of e: [20] int64 0 1 2 3 4 5 6 7 8 9 10 11 ..." in lines
    assert max(map(len, lines)) < 260
    # By default the blocks that this forward writes: slots 4 and 5 are in block 1; -1 is no slot.
    assert "block    1" in drawn
    assert "block    0" not in drawn


def test_in_a_profile_run_there_is_neither_cache_nor_metadata() -> None:
    layers = {"a": Layer("a", bound=False)}
    with set_forward_context(None, layers=layers, batch_descriptor=BatchDescriptor(num_tokens=8), is_profile_run=True):
        text, drawn = describe_forward_context(), describe_kv_cache("a")
    assert "profile run" in text.splitlines()[0]
    assert "a: no cache is bound yet" in text
    assert "attention metadata: None" in text
    assert drawn.startswith("a: no cache is bound yet")
    runner: Any = SimpleNamespace(layers=layers, requests={})
    assert "no cache is bound yet" in describe_kv_cache(runner)


def test_a_layer_without_metadata_is_marked() -> None:
    with set_forward_context({"a": metadata(0, 1)}, layers={"a": Layer("a"), "b": Layer("b")}):
        text = describe_forward_context()
    assert [line.endswith("; no metadata") for line in text.splitlines() if line.startswith(("  a:", "  b:"))] == [
        False,
        True,
    ]


def test_pages_are_drawn_token_by_token() -> None:
    layer = Layer("a")
    layer.kv_cache[1, 0, 0] = torch.tensor([1.5, -2.0])
    layer.kv_cache[1, 1, 2, 0, 1] = float("nan")
    layer.kv_cache[1, 1, 3, 0, 0] = float("inf")
    text = describe_kv_cache(layer, blocks=[1, 2], slots=[4, 7])
    assert "block    1  K #...  V ..!!" in text
    assert "block    2  K ....  V ...." in text
    assert "slot 4 = block 1, offset 0: K head 0 [2] float32 1.5 -2" in text
    assert "slot 7 = block 1, offset 3: V head 0 [2] float32 inf 0" in text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"blocks": [3]}, "a: block 3 is outside the cache, which has 3"),
        ({"blocks": [-1]}, "a: block -1 is outside"),
        ({"slots": [12]}, "a: slot 12 is outside the cache, which has 12"),
        ({"slots": [-1]}, "a: slot -1 is outside"),
    ],
)
def test_what_is_outside_the_cache_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_kv_cache(Layer("a"), **kwargs)


def test_a_runner_shows_its_requests_tables_and_their_blocks() -> None:
    layers = {"a": Layer("a"), "b": Layer("b")}
    layers["a"].kv_cache[2, 0, 0] = 1.0
    groups = tuple(KVCacheGroupSpec(layer_names=(name,), kv_cache_spec=SPEC) for name in layers)
    runner: Any = SimpleNamespace(
        layers=layers,
        requests={"r0": SimpleNamespace(block_ids=([2], [0, 1]), num_tokens=6)},
        kv_cache_config=KVCacheConfig(num_blocks=3, kv_cache_tensors=(), kv_cache_groups=groups),
    )
    lines = describe_kv_cache(runner).splitlines()
    assert lines[0] == "request r0, 6 tokens, blocks: group 0 [2]; group 1 [0, 1]"
    assert lines[1] == "group 0 (full_attention): a. The first of them:"
    assert lines[3] == "  block    2  K #...  V ...."
    # Block 0 is the null block: it is never drawn unless asked for.
    assert [line.split()[1] for line in lines if line.startswith("  block")] == ["2", "1"]
