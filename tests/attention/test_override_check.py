"""Overrides that a call through the base class would break are refused when the class is defined."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from minivllm.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadata, AttentionMetadataBuilder
from minivllm.attention.backends.torch_paged import TorchPagedMetadataBuilder
from minivllm.attention.override_check import ChecksOverrides


class Base(ChecksOverrides):
    def __init__(self, size: int) -> None: ...
    def method(self, a: int, b: int = 0, *, c: int = 0) -> None: ...
    def _helper(self, seq_lens: int) -> None: ...
    def positional(self, a: int, /) -> None: ...
    def many(self, *args: int, **kwargs: int) -> None: ...
    @staticmethod
    def static(a: int) -> None: ...
    @classmethod
    def of_class(cls, a: int) -> None: ...
    @property
    def prop(self) -> int:
        return 1

    def __private(self, a: int) -> None: ...


def define(bases: tuple[type, ...] = (Base,), **members: Any) -> type:
    return type("Sub", bases, members)


GOOD = {
    "same": {"method": lambda self, a, b=1, *, c=2: None},
    "optional added": {"method": lambda self, a, b=0, more=None, *, c=0, d=1: None},
    "keyword also by position": {"method": lambda self, a, b=0, c=0: None},
    "takes anything": {"method": lambda self, *args, **kwargs: None},
    "required made optional": {"method": lambda self, a=0, b=0, *, c=0: None},
    "static for a method": {"method": staticmethod(lambda a, b=0, *, c=0: None)},
    "class for static": {"static": classmethod(lambda cls, a: None)},
    "positional only by another name": {"positional": lambda self, x, /: None},
    "special and private": {"__call__": lambda self: None, "_Sub__private": lambda self: None},
    "own method": {"other": lambda self, x: None},
    "own __init__ with more options": {"__init__": lambda self, size, more=1: None},
    "property": {"prop": 3},
}
BAD = {
    "renamed": ({"_helper": lambda self, seq_lens_cpu: None}, "_helper", "by keyword fails"),
    "renamed optional": ({"method": lambda self, a, bb=0, *, c=0: None}, "method", "by keyword fails"),
    "dropped": ({"method": lambda self, a, *, c=0: None}, "method", "by keyword fails: got an unexpected"),
    "required added": ({"method": lambda self, a, b, d, *, c=0: None}, "method", "fails: missing"),
    "made required": ({"method": lambda self, a, b, *, c=0: None}, "method", "required parameters only"),
    "moved": ({"method": lambda self, b=0, a=0, *, c=0: None}, "method", "puts 'a' into 'b'"),
    "put in front": ({"_helper": lambda self, x=0, seq_lens=0: None}, "_helper", "puts 'seq_lens' into 'x'"),
    "keyword only": ({"_helper": lambda self, *, seq_lens: None}, "_helper", "by position fails"),
    "positional only": ({"_helper": lambda self, seq_lens, /: None}, "_helper", "by keyword fails"),
    "keyword renamed": ({"method": lambda self, a, b=0, *, d=0: None}, "method", "fails"),
    "no *args": ({"many": lambda self, **kwargs: None}, "many", r"\*args is missing"),
    "no **kwargs": ({"many": lambda self, *args: None}, "many", r"\*\*kwargs is missing"),
    "static renamed": ({"static": staticmethod(lambda x: None)}, "static", "by keyword fails"),
    "class renamed": ({"of_class": classmethod(lambda cls, x: None)}, "of_class", "by keyword fails"),
    "method for static": ({"static": lambda self, a: None}, "static", "must be a staticmethod or classmethod"),
    "no method": ({"method": None}, "method", "not callable"),
    "property for method": ({"method": property(lambda self: None)}, "method", "not callable"),
    "__init__": ({"__init__": lambda self, length: None}, "__init__", "by keyword fails"),
}


@pytest.mark.parametrize("members", GOOD.values(), ids=GOOD)
def test_allowed(members: dict[str, Any]) -> None:
    define(**members)


@pytest.mark.parametrize(("members", "name", "why"), BAD.values(), ids=BAD)
def test_refused(members: dict[str, Any], name: str, why: str) -> None:
    with pytest.raises(TypeError, match=rf"Sub\.{name}[\s\S]*{why}"):
        define(**members)


@pytest.mark.parametrize(("members", "name", "why"), BAD.values(), ids=BAD)
def test_refused_over_levels_and_through_mixins(members: dict[str, Any], name: str, why: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}[\s\S]*{why}"):
        define((define(),), **members)
    mixin = type("Mixin", (), dict(members))  # not checked by itself
    with pytest.raises(TypeError, match=rf"Sub\.{name}[\s\S]*{why}"):
        define((mixin, Base))
    define((Base, mixin))  # here Base's own methods win


def test_an_option_that_an_intermediate_class_added_must_stay() -> None:
    middle = define(_helper=lambda self, seq_lens, extra=0: None)
    with pytest.raises(TypeError, match="extra"):
        define((middle,), _helper=lambda self, seq_lens: None)


def test_both_signatures_are_shown() -> None:
    with pytest.raises(TypeError) as caught:

        class Wrong(Base):
            def _helper(self, seq_lens_cpu: int) -> None: ...

    text = str(caught.value)
    assert "base:     Base._helper(seq_lens: 'int')" in text
    assert "Wrong._helper(seq_lens_cpu: 'int')" in text


def test_a_decorated_override_is_judged_by_what_it_wraps() -> None:
    def decorate(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return function(*args, **kwargs)

        return inner

    define(_helper=decorate(lambda self, seq_lens: None))
    with pytest.raises(TypeError, match="_helper"):
        define(_helper=decorate(lambda self, lens: None))


def test_the_upstream_case_a_decode_builder_called_by_keyword() -> None:
    """vLLM #17483: build() of the base calls _build_decode by keyword; a subclass had renamed the parameter."""

    class LatentBuilder(AttentionMetadataBuilder[AttentionMetadata]):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return self._build_decode(block_table=1, seq_lens=common_attn_metadata)

        def _build_decode(self, block_table, seq_lens):
            return (block_table, seq_lens)

    class Right(LatentBuilder):
        def _build_decode(self, block_table, seq_lens, splits=1):
            return (seq_lens, splits)

    assert Right(None, [], None, None).build(0, 7) == (7, 1)
    with pytest.raises(TypeError, match=r"(?s)_build_decode.*base: .*seq_lens\).*override: .*seq_lens_device\)"):

        class Renamed(LatentBuilder):
            def _build_decode(self, block_table, seq_lens_device):
                return seq_lens_device


def test_builders_impls_and_backends_are_checked() -> None:
    with pytest.raises(TypeError, match="build cannot stand in"):
        type("B", (TorchPagedMetadataBuilder,), {"build": lambda self, prefix_len, common_attn_metadata: None})
    with pytest.raises(TypeError, match="do_kv_cache_update cannot stand in"):
        type("I", (AttentionImpl,), {"do_kv_cache_update": lambda self, layer, key, value, kv_cache, slots: None})
    with pytest.raises(TypeError, match="get_kv_cache_shape cannot stand in"):
        type("A", (AttentionBackend,), {"get_kv_cache_shape": staticmethod(lambda n, block_size, heads, size: ())})
