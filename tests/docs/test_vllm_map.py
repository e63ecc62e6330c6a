"""docs/vllm_map.md is what docs/make_map.py makes of the docstrings, and every public class has its line."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_map", ROOT / "docs" / "make_map.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_map"] = module
    spec.loader.exec_module(module)
    return module


make_map = load()


def test_every_public_class_says_what_it_mirrors() -> None:
    problems = []
    for file, node in make_map.public_classes():
        try:
            make_map.read(file, node)
        except ValueError as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


def test_the_committed_map_is_up_to_date() -> None:
    assert (ROOT / "docs" / "vllm_map.md").read_text() == make_map.render(), "run python docs/make_map.py"


def parse(docstring: str) -> object:
    (node,) = ast.parse(f"class Thing:\n    {docstring!r}").body
    assert isinstance(node, ast.ClassDef)
    return make_map.read("minivllm/x.py", node)


def test_parts_run_over_lines_and_stop_at_blank_ones() -> None:
    entry = parse("Does it.\n\nMirrors: vllm/v1/a.py\n    Thing.\nLeaves out: this,\n    and that.\n\nMore text.")
    assert entry == make_map.Entry("minivllm/x.py", "Thing", "vllm/v1/a.py Thing", "", "this, and that.")
    for docstring in ("Mirrors: none; ours alone.", "Does it.\n\nMirrors none: ours alone."):
        assert parse(docstring) == make_map.Entry("minivllm/x.py", "Thing", "", "ours alone.", "")


@pytest.mark.parametrize("docstring", ["Does it.", "Mirrors: none", "Mirrors: Thing.", "Mirrors vLLM's Thing.", ""])
def test_other_forms_are_refused(docstring: str) -> None:
    with pytest.raises(ValueError, match=r"minivllm/x.py:1 class Thing: its docstring needs a line of its own"):
        parse(docstring)
