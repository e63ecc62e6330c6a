"""The notebooks are what their sources give, on any day, in any folder, offline, without a GPU, twice over."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from minivllm import check

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# The course's own budgets are 10 s a cell and 60 s a notebook on two free cores; a shared machine may be slower.
CELL_SECONDS, NOTEBOOK_SECONDS, KERNEL_BYTES = 3 * 10, 3 * 60, 3 << 30


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", ROOT / "notebooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load("build")
Remade = tuple[Path, dict[str, Any]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_made_anew_it_is_the_same(path: Path, remade: Remade) -> None:
    new, old = (remade[0] / path.name).read_text().splitlines(), path.read_text().splitlines()
    differing = [
        f"line {i}: {a.strip()[:150]} / now {b.strip()[:150]}" for i, (a, b) in enumerate(zip(old, new)) if a != b
    ]
    assert new == old, "run `make notebooks`, or mend what changes from run to run:\n" + "\n".join(differing[:10])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_every_cell_gives_the_same_on_a_second_run(path: Path, remade: Remade) -> None:
    assert remade[1][path.stem]["changed_on_second_run"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_budgets_of_time_and_memory(path: Path, remade: Remade) -> None:
    """On a busy machine a cell waits, and only its processor time tells its cost; on a free one the clock does."""
    report = remade[1][path.stem]
    seconds = [min(wall, cpu or wall) for wall, cpu in zip(report["seconds"], report["cpu_seconds"])]
    assert max(seconds) < CELL_SECONDS
    assert sum(seconds) < NOTEBOOK_SECONDS
    if sys.platform == "linux":
        assert 0 < report["peak_rss_bytes"] < KERNEL_BYTES


SOURCE = """\
# %% [markdown]
# # A title
#
# See [`BlockTable.add_row`](src:minivllm/worker/block_table.py), [x](vllm:vllm/v1/x.py).

# %%
import ipywidgets

from minivllm import check

counter = []

# %% predict
counter.append(1)
print(len(counter))
assert counter, "there is one"

# %%
ipywidgets.IntSlider()

# %% exercise ex03
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], dict[str, Any]]:
    """A small source, built twice: the two files, and a report of cells run twice."""
    folder = tmp_path_factory.mktemp("toy")
    source = folder / "05_a_title.py"
    source.write_text(SOURCE)
    files = []
    for twice in (False, True):
        report = build.build(source, folder, twice=twice)
        files.append((folder / "05_a_title.ipynb").read_bytes())
    return files, report


def test_two_builds_give_the_same_bytes(toy: tuple[list[bytes], dict[str, Any]]) -> None:
    assert toy[0][0] == toy[0][1]


def test_a_cell_that_changes_on_its_second_run_is_reported(toy: tuple[list[bytes], dict[str, Any]]) -> None:
    (changed,) = toy[1]["changed_on_second_run"]
    assert changed == "cell 2: counter.append(1)"


def test_what_a_source_becomes(toy: tuple[list[bytes], dict[str, Any]]) -> None:
    nb = nbformat.reads(toy[0][0].decode(), as_version=4)
    text, plain, predict, slider, exercise = nb.cells
    line = build.symbol_line(ROOT / "minivllm/worker/block_table.py", "BlockTable.add_row")
    assert f"[`BlockTable.add_row`](../minivllm/worker/block_table.py#L{line})" in text.source
    assert f"[x]({build.VLLM}vllm/v1/x.py)" in text.source
    assert plain.metadata == {}
    assert predict.metadata.tags == ["predict"]
    assert exercise.metadata.tags == ["exercise", "raises-exception"]
    assert exercise.source.endswith("check.ex03(slots_of_batch)")
    assert [cell.execution_count for cell in (plain, predict, slider, exercise)] == [1, 2, 3, 4]
    assert set(slider.outputs[0].data) == {"text/plain", build.WIDGET}
    assert nb.metadata == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def test_the_stub_is_the_solution_without_its_body() -> None:
    source = build.stub("ex03")
    space: dict[str, Any] = {"check": check}
    with pytest.raises(NotImplementedError, match="ex03: write slots_of_batch"):
        exec(source, space)
    assert space["slots_of_batch"].__doc__ == check.ex03.solution.__doc__
    assert "divmod" not in source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "text before the first cell marker"),
        ("# %% magic\nx = 1\n", "unknown cell marker '# %% magic'"),
        ("# %% [markdown]\n# [`Nope`](src:minivllm/worker/block_table.py)\n", "defines no Nope"),
    ],
)
def test_a_wrong_source_is_refused(source: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "05_wrong.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        build.parse(path)
