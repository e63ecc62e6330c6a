"""Every notebook keeps every rule, and every rule finds the fault that it is there for."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", ROOT / "notebooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


lint = load("lint")
Cell = dict[str, Any]


def test_every_source_has_its_notebook() -> None:
    sources = [path.stem for path in sorted((ROOT / "notebooks" / "src").glob("*.py"))]
    assert [path.stem for path in NOTEBOOKS] == sources
    assert sources


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
@pytest.mark.parametrize("rule", lint.RULES)
def test_rule(rule: str, path: Path) -> None:
    assert list(lint.RULES[rule](lint.Book.read(path))) == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command: list[str]) -> None:
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "notebooks"]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The planted faults: each takes a good notebook and spoils one thing.


def good() -> dict[str, Any]:
    path = ROOT / "notebooks" / "03_block_table_and_slot_mapping.ipynb"
    nb: dict[str, Any] = json.loads(path.read_text())
    for cell in nb["cells"]:
        cell["source"] = "".join(cell["source"])
    return nb


def code(nb: dict[str, Any], tag: str = "") -> list[Cell]:
    cells = [cell for cell in nb["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if tag in cell["metadata"].get("tags", [])] if tag else cells


def replaced(cell: Cell, old: str, new: str) -> None:
    assert old in cell["source"], f"the plant needs {old!r} in the notebook"
    cell["source"] = cell["source"].replace(old, new)


def with_text(nb: dict[str, Any], text: str) -> None:
    code(nb)[2]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [text]}]


def html_of(nb: dict[str, Any]) -> dict[str, Any]:
    found = [output["data"] for cell in code(nb) for output in cell["outputs"] if "text/html" in output.get("data", {})]
    first: dict[str, Any] = found[0]
    return first


def markdown(nb: dict[str, Any], text: str) -> Cell:
    return next(cell for cell in nb["cells"] if cell["cell_type"] == "markdown" and text in cell["source"])


def drop_asserts(nb: dict[str, Any]) -> None:
    for cell in code(nb):
        if "flat_cache" in cell["source"] or "slot_of" in cell["source"]:
            cell["source"] = cell["source"].replace("assert ", "None, ")


PLANTS: dict[str, list[Callable[[dict[str, Any]], object]]] = {
    "size": [
        lambda nb: nb.update(cells=nb["cells"][:19]),
        lambda nb: nb["cells"].extend([nb["cells"][0]] * 50),
        lambda nb: code(nb)[1].update(source="x = 1\n" * 26),
        lambda nb: code(nb)[1].update(source=""),
        lambda nb: with_text(nb, "x" * 300_000),
    ],
    "name": [lambda nb: replaced(nb["cells"][0], "# Block table", "# Slot table")],
    "first_cell": [
        lambda nb: replaced(nb["cells"][0], "# Block", "## Block"),
        lambda nb: replaced(nb["cells"][0], "- **", "- "),
        lambda nb: replaced(nb["cells"][0], "- **fill** a", "- **do** a\n- **do** a"),
        lambda nb: replaced(nb["cells"][0], "**Minutes:** 40", "**Minutes:** some"),
        lambda nb: replaced(nb["cells"][0], "0.32.0", "0.31.0"),
        lambda nb: replaced(nb["cells"][0], "**Prerequisites:**", "Needs"),
        lambda nb: replaced(markdown(nb, "## The question"), "## The", "# The"),
    ],
    "setup_cell": [lambda nb: replaced(code(nb)[0], "manual_seed(0)", "manual_seed(1)")],
    "executed": [
        lambda nb: code(nb)[3].update(execution_count=None, outputs=[]),
        lambda nb: code(nb)[3].update(execution_count=7),
    ],
    "outputs": [
        lambda nb: code(nb)[2].update(outputs=[{"output_type": "stream", "name": "stderr", "text": ["careful"]}]),
        lambda nb: code(nb)[2].update(
            outputs=[{"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}]
        ),
    ],
    "metadata": [
        lambda nb: nb["metadata"].update(widgets={}),
        lambda nb: nb["metadata"]["kernelspec"].update(name="conda-env"),
        lambda nb: nb["metadata"]["language_info"].update(version="3.11.7"),
        lambda nb: code(nb)[2]["metadata"].update(execution={"iopub.status.busy": "now"}),
        lambda nb: with_text(nb, "run at 2026-01-01"),
        lambda nb: with_text(nb, "run at 12:30:00"),
    ],
    "tag_list": [
        lambda nb: code(nb)[2]["metadata"].update(tags=["nbval-ignore-output"]),
        lambda nb: code(nb)[2]["metadata"].update(tags=["nbval-skip"]),
        lambda nb: code(nb)[2]["metadata"].update(tags=["raises-exception"]),
        lambda nb: replaced(code(nb)[2], "print", "# NBVAL_IGNORE_OUTPUT\nprint"),
        lambda nb: code(nb, "exercise")[0]["metadata"].update(tags=["exercise"]),
        lambda nb: [cell["metadata"].update(tags=["predict"]) for cell in code(nb)],
    ],
    "python": [
        lambda nb: code(nb)[2].update(source="%timeit 1 + 1"),
        lambda nb: code(nb)[2].update(source="!pip install torch"),
        lambda nb: code(nb)[2].update(source="%unknown_magic"),
    ],
    "predict": [
        lambda nb: code(nb, "predict")[0].update(source="assert 1 == 1"),
        lambda nb: code(nb, "predict")[0].update(source="assert 1 == 1, 'so'\nprint(1)"),
        lambda nb: replaced(markdown(nb, "**Predict:** in which slot"), "**Predict:**", "Guess:"),
        lambda nb: [cell["metadata"].update(tags=[]) for cell in code(nb, "predict")],
    ],
    "section_asserts": [drop_asserts],
    "exercises": [
        lambda nb: code(nb, "exercise")[0].update(source="def f():\n    '''Doc.'''\n    return 1\n\n\ncheck.ex03(f)"),
        lambda nb: replaced(code(nb, "exercise")[0], "check.ex03", "check.ex02"),
        lambda nb: code(nb, "exercise")[0].update(outputs=[]),
        lambda nb: [cell["metadata"].update(tags=[]) for cell in code(nb, "exercise")],
        lambda nb: nb.update(cells=[cell for cell in nb["cells"] if cell not in code(nb, "exercise")]),
    ],
    "idempotent": [
        lambda nb: code(nb)[5].update(source="block_size += 1"),
        lambda nb: code(nb)[5].update(source="blocks_of['A'].append(3)"),
        lambda nb: code(nb)[5].update(source="blocks_of['A'] += [3]"),
        lambda nb: [cell.update(source="table = BlockTable(1)") for cell in code(nb)[14:16]],
    ],
    "independent": [
        lambda nb: code(nb)[5].update(source="open('data.txt').read()"),
        lambda nb: code(nb)[5].update(source="fetch('https://example.org')"),
        lambda nb: code(nb)[5].update(source="path = '/home/me/model'"),
        lambda nb: code(nb)[5].update(source="x = torch.ones(2, device='cuda')"),
    ],
    "deterministic": [
        lambda nb: with_text(nb, "<Thing object at 0x7f3a2c1b>"),
        lambda nb: with_text(nb, "sum 6.8088799"),
        lambda nb: with_text(nb, "took 31 ms"),
        lambda nb: with_text(nb, "read /home/me/model"),
        lambda nb: with_text(nb, "id 0f0e7a2b-1f2e-4c3d"),
    ],
    "pictures": [
        lambda nb: html_of(nb).update({"text/html": "<svg></svg>"}),
        lambda nb: html_of(nb).update({"text/html": '<img src="data:image/svg+xml;base64,AAAA" alt="">'}),
        lambda nb: html_of(nb).update({"text/html": '<img src="https://example.org/a.svg" alt="a long enough text">'}),
        lambda nb: html_of(nb).update({"image/png": "AAAA"}),
        lambda nb: html_of(nb).pop("text/plain"),
    ],
    "links": [
        lambda nb: replaced(markdown(nb, "[`BlockTable`](../"), "#L", "#L1"),
        lambda nb: replaced(markdown(nb, "[`BlockTable`](../"), "[`BlockTable`]", "[`BlockTab`]"),
        lambda nb: replaced(markdown(nb, "[`BlockTable`](../"), "block_table.py#", "no_table.py#"),
        lambda nb: replaced(markdown(nb, "## Here and in vLLM"), "/blob/v0.32.0/", "/blob/main/"),
        lambda nb: nb["cells"][2].update(source="[`BlockTable`](src:minivllm/worker/block_table.py)"),
    ],
    "closing": [
        lambda nb: nb["cells"].pop(),
        lambda nb: replaced(markdown(nb, "## Break it on purpose"), "## Break it", "## Bend it"),
        lambda nb: replaced(markdown(nb, "## Here and in vLLM"), "| here |", "| ours |"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "plant"),
    [pytest.param(rule, plant, id=f"{rule}-{i}") for rule in PLANTS for i, plant in enumerate(PLANTS[rule])],
)
def test_a_planted_fault_is_found(rule: str, plant: Callable[[dict[str, Any]], object]) -> None:
    path, nb = ROOT / "notebooks" / "03_block_table_and_slot_mapping.ipynb", good()
    assert list(lint.RULES[rule](lint.Book(path, copy.deepcopy(nb)))) == []
    plant(nb)
    assert list(lint.RULES[rule](lint.Book(path, nb))), f"{rule} finds nothing"


def test_every_rule_has_a_planted_fault() -> None:
    assert sorted(PLANTS) == sorted(lint.RULES)
