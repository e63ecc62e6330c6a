"""Makes every notebook from its readable source in notebooks/src: parse, run, normalise, write.

    python notebooks/build.py              # all of them, outputs included
    python notebooks/build.py 03 --out DIR # one, elsewhere
    python notebooks/build.py --twice      # run every cell twice: the second outputs must equal the first
    python notebooks/build.py --text       # run nothing: renew text and links only, keep the outputs

A source is a Python file in percent format. Its cell markers:

    # %% [markdown]        the lines below, without their leading "# "
    # %%                   code
    # %% predict           code that answers the question before it and ends in an assert; tagged "predict"
    # %% exercise ex03     the student's stub, made from the solution in minivllm.check; tagged "exercise"

In markdown, `[Name.method](src:path/of/file.py)` becomes a link to the line where that symbol is defined, and
`[text](vllm:vllm/v1/x.py)` one to the file of the pinned vLLM release. Running the same source gives the same bytes:
no times, no random ids, no absolute paths.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "notebooks" / "src"
VLLM = "https://github.com/vllm-project/vllm/blob/v0.32.0/"
MARKER = re.compile(r"^# %%(?: (\[markdown\]|predict|exercise (ex\d\d(?:_\d)?)))?$")
WIDGET = "application/vnd.jupyter.widget-view+json"


def parse(source: Path) -> NotebookNode:
    """The notebook of one source, not yet run."""
    cells: list[NotebookNode] = []
    kind, body = None, []

    def close() -> None:
        text = "\n".join(body).strip("\n")
        if kind is None:
            if text:
                raise ValueError(
                    f"{source.name}: text before the first cell marker: {text.splitlines()[0]!r}"
                )
        elif kind[1] == "[markdown]":
            cells.append(
                new_markdown_cell(links(re.sub(r"^# ?", "", text, flags=re.M)))
            )
        elif kind[2]:
            cells.append(
                new_code_cell(
                    stub(kind[2]), metadata={"tags": ["exercise", "raises-exception"]}
                )
            )
        else:
            cells.append(
                new_code_cell(text, metadata={"tags": ["predict"]} if kind[1] else {})
            )

    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("# %%"):
            close()
            kind, body = MARKER.match(line), []
            if kind is None:
                raise ValueError(
                    f"{source.name}: unknown cell marker {line!r}; the docstring of build.py lists them"
                )
        else:
            body.append(line)
    close()
    seen: dict[str, int] = {}
    for cell in (
        cells
    ):  # an id depends on the cell's text alone, so that a new cell changes no other's
        digest = hashlib.sha256(
            f"{cell.cell_type}\n{cell.source}".encode()
        ).hexdigest()[:12]
        seen[digest] = seen.get(digest, -1) + 1
        cell.id = f"{digest}-{seen[digest]}" if seen[digest] else digest
    kernelspec = {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    }
    return new_notebook(
        cells=cells,
        metadata={"kernelspec": kernelspec, "language_info": {"name": "python"}},
    )


def stub(name: str) -> str:
    """What the student gets: the solution's head and docstring, and the call of the check."""
    sys.path[:0] = [
        path for path in (str(ROOT), str(ROOT / "kernels")) if path not in sys.path
    ]
    from minivllm import check

    lines = inspect.getsource(getattr(check, name).solution).splitlines()
    (function,) = ast.parse("\n".join(lines)).body
    assert isinstance(function, ast.FunctionDef)
    head = "\n".join(lines[: function.body[0].end_lineno])
    return f'{head}\n    raise NotImplementedError("write {function.name}")\n\n\ncheck.{name}({function.name})'


def symbol_line(path: Path, symbol: str) -> int:
    """The line where a class, function, method or module variable is defined."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 0
    for name in symbol.split("."):
        for node in body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [getattr(node, "target", None)]
            )
            names = [
                getattr(node, "name", None),
                *(getattr(target, "id", None) for target in targets),
            ]
            if name in names:
                line, body = node.lineno, getattr(node, "body", [])
                break
        else:
            raise ValueError(f"{path.relative_to(ROOT)} defines no {symbol}")
    return line


def links(markdown: str) -> str:
    """Resolve `src:` and `vllm:` links."""

    def ours(found: re.Match[str]) -> str:
        label, path = found[1], found[2]
        return f"[{label}](../{path}#L{symbol_line(ROOT / path, label.strip('`'))})"

    markdown = re.sub(r"\[([^\]]+)\]\(src:([^)]+)\)", ours, markdown)
    return re.sub(r"\]\(vllm:([^)]+)\)", rf"]({VLLM}\1)", markdown)


def run(notebook: NotebookNode, twice: bool = False) -> dict[str, Any]:
    """Run the cells in a fresh kernel in an empty folder, offline and without a GPU. Returns what it took.

    twice: run each cell a second time at once and list those whose outputs differ.
    """
    report: dict[str, Any] = {
        "seconds": [],
        "cpu_seconds": [],
        "changed_on_second_run": [],
        "peak_rss_bytes": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # several notebooks run at a time
            "IPYTHONDIR": folder,
        }
        env["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")]
        )
        client = NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        with client.setup_kernel(env=env):
            pid = getattr(client.km.provisioner, "pid", None)
            for index, cell in enumerate(notebook.cells):
                if cell.cell_type != "code":
                    continue
                start, cpu = time.perf_counter(), cpu_seconds(pid)
                client.execute_cell(cell, index)
                report["seconds"].append(round(time.perf_counter() - start, 3))
                report["cpu_seconds"].append(round(cpu_seconds(pid) - cpu, 3))
                tidy(cell)
                if twice:
                    again = copy.deepcopy(cell)
                    client.execute_cell(again, index)
                    tidy(again)
                    notebook.cells[index] = cell  # nbclient puts in what it ran last
                    if again.outputs != cell.outputs:
                        report["changed_on_second_run"].append(
                            f"cell {index}: {cell.source.splitlines()[0]}"
                        )
            report["peak_rss_bytes"] = peak_memory(pid)
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
    return report


def tidy(cell: NotebookNode) -> None:
    """Take out of a cell's outputs what differs from run to run."""
    cell.metadata.pop("execution", None)
    for place, output in enumerate(cell.outputs):
        output.pop("transient", None)
        if output.output_type == "execute_result":
            output.execution_count = None
        view = output.get("data", {}).get(WIDGET)
        if view:
            view["model_id"] = hashlib.md5(f"{cell.id}/{place}".encode()).hexdigest()


def peak_memory(pid: int | None) -> int:
    """Most bytes that the kernel held at once; 0 where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    found = (
        re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    )
    return int(found[1]) * 1024 if found else 0


def cpu_seconds(pid: int | None) -> float:
    """Processor time that the kernel has used; 0 where the system does not say."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def build(source: Path, out: Path, twice: bool = False) -> dict[str, Any]:
    """Write `out`/NAME.ipynb from one source."""
    notebook = parse(source)
    report = run(notebook, twice)
    write(notebook, out / f"{source.stem}.ipynb")
    return report


def renew_text(source: Path, out: Path) -> None:
    """Put the markdown of a source, its links resolved anew, into the notebook that is there."""
    path, notebook = out / f"{source.stem}.ipynb", parse(source)
    old = nbformat.read(path, as_version=4)
    new_code, old_code = (
        [cell for cell in nb.cells if cell.cell_type == "code"]
        for nb in (notebook, old)
    )
    if [cell.source for cell in new_code] != [cell.source for cell in old_code]:
        sys.exit(
            f"{source.name} has other code than {path.name}: run it, without --text"
        )
    for new, done in zip(new_code, old_code):
        new.outputs, new.execution_count = done.outputs, done.execution_count
    write(notebook, path)


def write(notebook: NotebookNode, path: Path) -> None:
    """The one form in which notebooks are stored."""
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description="Make the notebooks from notebooks/src."
    )
    parser.add_argument(
        "numbers", nargs="*", help="two digits each, such as 03; none: all"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "notebooks")
    parser.add_argument(
        "--twice",
        action="store_true",
        help="run every cell twice and report outputs that differ",
    )
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time")
    parser.add_argument(
        "--report",
        type=Path,
        help="a JSON file for seconds a cell and peak memory a notebook",
    )
    parser.add_argument(
        "--text", action="store_true", help="renew text and links, run nothing"
    )
    args = parser.parse_args()
    sources = [
        path
        for path in sorted(SOURCES.glob("*.py"))
        if not args.numbers or path.stem[:2] in args.numbers
    ]
    if not sources:
        parser.error(f"no source in {SOURCES} has a number of {args.numbers}")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.text:
        for path in sources:
            renew_text(path, args.out)
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = list(
            pool.map(lambda path: build(path, args.out, args.twice), sources)
        )
    for path, report in zip(sources, reports, strict=True):
        cells, peak = report["seconds"], report["peak_rss_bytes"] / 2**20
        print(
            f"{path.stem}: {len(cells)} code cells, {sum(cells):.1f} s, slowest {max(cells):.1f} s, {peak:.0f} MiB"
        )
    if args.report:
        args.report.write_text(
            json.dumps(
                {path.stem: report for path, report in zip(sources, reports)}, indent=1
            )
        )
    changed = [line for report in reports for line in report["changed_on_second_run"]]
    if changed:
        sys.exit(
            "these cells give other outputs on a second run:\n" + "\n".join(changed)
        )


if __name__ == "__main__":
    main()
