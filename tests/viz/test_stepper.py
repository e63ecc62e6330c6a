"""The stepper: a slider whose picture follows it, and the same without a widget."""

from __future__ import annotations

import sys

import pytest

from minivllm.viz.stepper import Stepper
from minivllm.viz.structures import BlockTableView

TRACE = [
    ("empty", BlockTableView(4, (("A", ()),))),
    ("one block", BlockTableView(4, (("A", (7,)),))),
    ("two <blocks>", BlockTableView(4, (("A", (7, 2)),))),
]


def test_the_picture_follows_the_slider() -> None:
    slider, picture = Stepper(TRACE).widget().children
    assert (slider.min, slider.max, slider.value) == (0, 2, 0)
    assert 'data-step="0"' in picture.value
    slider.value = 2
    assert 'data-step="2"' in picture.value
    assert "step 2 of 2: two &lt;blocks&gt;" in picture.value
    slider.value = 1
    assert picture.value == Stepper(TRACE).html(1)


def test_the_bundle_has_the_widget_and_all_steps_without_it() -> None:
    bundle = Stepper(TRACE)._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert [f'data-step="{i}"' in bundle["text/html"] for i in range(4)] == [True, True, True, False]
    assert bundle["text/plain"] == "Stepper of 3 steps; print it to read them all"


def test_without_ipywidgets_the_pictures_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(Stepper(TRACE)._repr_mimebundle_()) == {"text/html", "text/plain"}


def test_print_shows_all_steps_with_what_changed() -> None:
    text = repr(Stepper(TRACE))
    assert "step 1 of 2: one block" in text
    assert "7*" in text.split("step 1")[1].split("step 2")[0]
    assert "7*" not in text.split("step 2")[1]
    assert "2*" in text.split("step 2")[1]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Stepper([])
