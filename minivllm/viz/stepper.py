"""A slider over snapshots. Needs ipywidgets only when it is shown in a notebook.

vLLM has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from minivllm.viz.grid import Grid, ascii_grid, img, mark_changes
from minivllm.viz.structures import Structure


class Stepper:
    """Steps through (caption, snapshot) pairs; what changed since the step before bears an asterisk.

    Beside the widget, each output holds all steps as images, for readers without a kernel.

    Mirrors: none; a picture.
    """

    def __init__(self, trace: Sequence[tuple[str, Structure]]) -> None:
        if not trace:
            raise ValueError("a Stepper needs at least one (caption, snapshot) pair, got none")
        grids = [state.grid() for _, state in trace]
        marked = [grids[0], *(mark_changes(before, after) for before, after in pairwise(grids))]
        self.frames: tuple[tuple[str, Grid], ...] = tuple((text, grid) for (text, _), grid in zip(trace, marked))

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        return "\n\n".join(f"{self._caption(i)}\n{ascii_grid(grid)}" for i, (_, grid) in enumerate(self.frames))

    def _caption(self, step: int) -> str:
        return f"step {step} of {len(self) - 1}: {self.frames[step][0]}"

    def html(self, step: int) -> str:
        """One step: its caption and its picture."""
        picture = img(self.frames[step][1], f' data-step="{step}"')
        return f"<figure><figcaption>{escape(self._caption(step))}</figcaption>{picture}</figure>"

    def widget(self) -> Any:
        """The slider above the picture that follows it."""
        import ipywidgets

        slider = ipywidgets.IntSlider(0, 0, len(self) - 1, description="step", continuous_update=True)
        picture = ipywidgets.HTML(self.html(0))
        slider.observe(lambda change: setattr(picture, "value", self.html(change["new"])), names="value")
        return ipywidgets.VBox([slider, picture])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget's view, and the same as plain HTML and text."""
        html = "".join(self.html(step) for step in range(len(self)))
        static = {"text/plain": f"Stepper of {len(self)} steps; print it to read them all", "text/html": html}
        try:
            view: dict[str, Any] = self.widget()._repr_mimebundle_()
        except ImportError:
            return static
        return view | static
