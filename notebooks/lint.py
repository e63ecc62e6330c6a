"""The rules that every notebook of the course keeps, as far as its JSON alone can tell.

    python notebooks/lint.py      # prints what is wrong, in all notebooks

What needs a kernel (same outputs when made anew, every cell twice, seconds, memory) is in tests/notebooks. nbval alone
would miss much of this: a cell that was never run has no outputs to compare, and an ignore tag silences any cell.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VLLM_VERSION = "0.32.0"
VLLM_BLOB = f"https://github.com/vllm-project/vllm/blob/v{VLLM_VERSION}/"
CELLS, CODE_LINES, BYTES = range(20, 61), 25, 300_000
SETUP = "f953db72"  # sha256 of the first code cell, its first 8 digits
# Tags and how many cells of one notebook may bear them. Any nbval tag is an exception to strictness: to allow one,
# write (notebook, tag): count, with the reason beside it. Today there is none.
TAGS = {"predict": 15, "exercise": 4, "raises-exception": 4}
EXCEPTIONS: dict[tuple[str, str], int] = {}
LAST_NUMBER = 17
MUTATORS = {
    "append",
    "extend",
    "insert",
    "pop",
    "remove",
    "clear",
    "add",
    "update",
    "setdefault",
    "popleft",
}


@dataclass
class Book:
    """One notebook."""

    path: Path
    nb: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Book:
        """From a file."""
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """All cells, with their sources as one string each."""
        return [cell | {"source": "".join(cell["source"])} for cell in self.nb["cells"]]

    @cached_property
    def code(self) -> list[tuple[int, dict[str, Any]]]:
        """(place, cell) of the code cells."""
        return [
            (i, cell)
            for i, cell in enumerate(self.cells)
            if cell["cell_type"] == "code"
        ]

    @cached_property
    def trees(self) -> dict[int, ast.Module]:
        """The syntax trees of the code cells that parse."""
        trees = {}
        for i, cell in self.code:
            try:
                trees[i] = ast.parse(cell["source"])
            except SyntaxError:
                continue
        return trees

    @cached_property
    def sections(self) -> list[tuple[str, list[int]]]:
        """(heading, places of its code cells) of every second-level heading."""
        sections: list[tuple[str, list[int]]] = []
        for i, cell in enumerate(self.cells):
            if cell["cell_type"] == "code":
                if sections:
                    sections[-1][1].append(i)
            else:
                sections += [
                    (title, [])
                    for title in re.findall(r"^## (.+)$", cell["source"], re.M)
                ]
        return sections

    def outputs(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(place of the cell, output)."""
        for i, cell in self.code:
            for output in cell["outputs"]:
                yield i, output

    def texts(self) -> Iterator[tuple[int, str]]:
        """(place of the cell, text) of every output that is text."""
        for i, output in self.outputs():
            yield (
                i,
                "".join(output.get("text", []))
                + "\n".join(output.get("traceback", [])),
            )
            yield i, "".join(output.get("data", {}).get("text/plain", []))


def tags(cell: dict[str, Any]) -> list[str]:
    """The tags of a cell."""
    return list(cell["metadata"].get("tags", []))


Rule = Callable[[Book], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule under its function's name."""
    RULES[function.__name__] = function
    return function


@rule
def size(book: Book) -> Iterator[str]:
    """20-60 cells, at most 25 lines in a code cell, at most 300 kB."""
    if len(book.cells) not in CELLS:
        yield f"{len(book.cells)} cells; {CELLS.start} to {CELLS.stop - 1} are allowed"
    for i, cell in book.code:
        lines = len(cell["source"].splitlines())
        if lines > CODE_LINES:
            yield f"cell {i} has {lines} lines of code; at most {CODE_LINES}"
        if not lines:
            yield f"cell {i} is empty"
    length = len(json.dumps(book.nb, indent=1, ensure_ascii=False).encode())
    if length > BYTES:
        yield f"{length} bytes; at most {BYTES}"


@rule
def name(book: Book) -> Iterator[str]:
    """NN_snake_title.ipynb: a number of the series, and the title of cell 0."""
    found = re.fullmatch(r"(\d\d)_([a-z0-9_]+)\.ipynb", book.path.name)
    if found is None or int(found[1]) > LAST_NUMBER:
        yield f"{book.path.name} is not NN_snake_title.ipynb with a number up to {LAST_NUMBER}"
        return
    title = book.cells[0]["source"].splitlines()[0].removeprefix("# ")
    snake = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    if snake != found[2]:
        yield f"the title {title!r} would be {snake}, the file says {found[2]}"


@rule
def first_cell(book: Book) -> Iterator[str]:
    """One H1, 3-5 goals that begin with a verb, prerequisites, minutes, the vLLM version."""
    first = book.cells[0]["source"] if book.cells[0]["cell_type"] == "markdown" else ""
    if len(re.findall(r"^# \S", first, re.M)) != 1 or not first.startswith("# "):
        yield "cell 0 must begin with the only H1"
    if any(
        re.search(r"^# \S", cell["source"], re.M)
        for cell in book.cells[1:]
        if cell["cell_type"] == "markdown"
    ):
        yield "there is an H1 after cell 0"
    goals = re.findall(r"^- \*\*[a-z]+\*\* \S", first, re.M)
    if not 3 <= len(goals) <= 5:
        yield f"cell 0 has {len(goals)} goals of the form '- **verb** ...'; 3 to 5 are wanted"
    for pattern in (
        r"\*\*Prerequisites:\*\* \S",
        r"\*\*Minutes:\*\* \d+$",
        rf"\*\*vLLM version studied:\*\* {VLLM_VERSION}$",
    ):
        if not re.search(f"^{pattern}", first, re.M):
            yield f"cell 0 has no line {pattern}"


@rule
def setup_cell(book: Book) -> Iterator[str]:
    """The first code cell is the same everywhere."""
    digest = hashlib.sha256(book.code[0][1]["source"].encode()).hexdigest()[:8]
    if digest != SETUP:
        yield f"the first code cell has the digest {digest}, not {SETUP}"


@rule
def executed(book: Book) -> Iterator[str]:
    """Every code cell was run, in order, once."""
    counts = [cell["execution_count"] for _, cell in book.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}"
    for i, output in book.outputs():
        if (
            output["output_type"] == "execute_result"
            and output["execution_count"] != book.cells[i]["execution_count"]
        ):
            yield f"cell {i}: its result bears another execution count"


@rule
def outputs(book: Book) -> Iterator[str]:
    """No stderr, and no error but where an exercise waits to be written."""
    for i, output in book.outputs():
        if output.get("name") == "stderr":
            yield f"cell {i} writes to stderr"
        if output["output_type"] == "error" and "raises-exception" not in tags(
            book.cells[i]
        ):
            yield f"cell {i} ends in {output['ename']} and is not tagged raises-exception"


@rule
def metadata(book: Book) -> Iterator[str]:
    """Kernel python3, no widget state, no timestamps."""
    if book.nb["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "kernelspec is not python3"
    if unknown := set(book.nb["metadata"]) - {"kernelspec", "language_info"}:
        yield f"notebook metadata holds {sorted(unknown)}"
    if unknown := set(book.nb["metadata"].get("language_info", {})) - {"name"}:
        yield f"language_info holds {sorted(unknown)}: it differs between machines"
    for i, cell in enumerate(book.cells):
        if unknown := set(cell["metadata"]) - {"tags"}:
            yield f"cell {i}: metadata holds {sorted(unknown)}"
    for i, text in book.texts():
        if found := re.search(r"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d", text):
            yield f"cell {i} prints a date or a time: {found[0]}"


@rule
def tag_list(book: Book) -> Iterator[str]:
    """Tags come from the list, as often as it says; no other way to silence nbval."""
    counts = Counter(tag for cell in book.cells for tag in tags(cell))
    for tag, count in counts.items():
        allowed = EXCEPTIONS.get((book.path.stem, tag), TAGS.get(tag, 0))
        if count > allowed:
            yield f"tag {tag!r} on {count} cells; {allowed} are allowed"
    for i, cell in book.code:
        if re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)", cell["source"]):
            yield f"cell {i} silences nbval by a comment"
        if ("raises-exception" in tags(cell)) != ("exercise" in tags(cell)):
            yield f"cell {i}: exercises, and only they, may raise"


@rule
def python(book: Book) -> Iterator[str]:
    """Plain Python in every code cell: no magics, no shell."""
    for i, _ in book.code:
        if i not in book.trees:
            yield f"cell {i} is no plain Python"


@rule
def predict(book: Book) -> Iterator[str]:
    """A predict cell follows its question and ends in an assert that explains; there is at least one."""
    places = [i for i, cell in book.code if "predict" in tags(cell)]
    if not places:
        yield "there is no predict cell"
    for i in places:
        last = book.trees[i].body[-1] if i in book.trees else None
        if not isinstance(last, ast.Assert) or last.msg is None:
            yield f"cell {i} is tagged predict and does not end in an assert with a message"
        if "**Predict:**" not in book.cells[i - 1]["source"]:
            yield f"cell {i} is tagged predict; the cell before it asks nothing (**Predict:** ...)"


def _asserts(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            return True
        if (
            isinstance(node, ast.Raise)
            and node.exc is not None
            and "AssertionError" in ast.unparse(node.exc)
        ):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("check.ex"):
            return True
    return False


@rule
def section_asserts(book: Book) -> Iterator[str]:
    """Every section with code asserts something."""
    for title, places in book.sections:
        if places and not any(
            _asserts(book.trees[i]) for i in places if i in book.trees
        ):
            yield f"section {title!r} asserts nothing"


@rule
def exercises(book: Book) -> Iterator[str]:
    """At least one exercise; each is a stub that raises NotImplementedError, then its check."""
    number, found = book.path.stem[:2], 0
    for i, cell in book.code:
        calls = re.findall(r"^check\.(ex\d\d)", cell["source"], re.M)
        if "exercise" not in tags(cell):
            if calls:
                yield f"cell {i} calls a check and is not tagged exercise"
            continue
        found += 1
        body = book.trees[i].body if i in book.trees else []
        function = body[0] if body and isinstance(body[0], ast.FunctionDef) else None
        if (
            function is None
            or ast.get_docstring(function) is None
            or len(function.body) != 2
        ):
            yield f"cell {i}: an exercise is one function with a docstring and a raise"
        elif not (
            isinstance(function.body[1], ast.Raise)
            and "NotImplementedError" in ast.unparse(function.body[1])
        ):
            yield f"cell {i}: the stub does not raise NotImplementedError"
        if calls != [f"ex{number}"]:
            yield f"cell {i}: its check must be check.ex{number}..., once"
        if not any(output.get("ename") == "NotWritten" for output in cell["outputs"]):
            yield f"cell {i}: the check does not say that the stub is not written"
    if not found:
        yield "there is no exercise"


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement binds."""
    return {
        *(
            leaf.id
            for leaf in ast.walk(node)
            if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)
        ),
        *(leaf.arg for leaf in ast.walk(node) if isinstance(leaf, ast.arg)),
        *(
            leaf.name
            for leaf in ast.walk(node)
            if isinstance(leaf, ast.FunctionDef | ast.ClassDef)
        ),
    }


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@rule
def idempotent(book: Book) -> Iterator[str]:
    """No cell changes what another made; one constructor of a name a section."""
    for i, tree in book.trees.items():
        own: set[str] = set()
        for statement in tree.body:
            inner = (
                _bound(statement) if not isinstance(statement, ast.AugAssign) else set()
            )
            for node in ast.walk(statement):
                root = ""
                if isinstance(node, ast.AugAssign):
                    root = _root(node.target)
                elif (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in MUTATORS
                ):
                    root = _root(node.func.value)
                if root and root not in own | inner:
                    yield f"cell {i} line {node.lineno} changes {root!r}, which another cell made"
            own |= inner
    for title, places in book.sections:
        made = Counter(
            node.targets[0].id
            for i in places
            for node in book.trees.get(i, ast.Module([], [])).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            if isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).split(".")[-1][:1].isupper()
        )
        for target, count in made.items():
            if count > 1:
                yield f"section {title!r} constructs {target!r} {count} times"


@rule
def independent(book: Book) -> Iterator[str]:
    """No working directory, no network, no GPU without a branch."""
    for i, cell in book.code:
        found = re.search(
            r"os\.(getcwd|chdir)|Path\.cwd|open\(['\"]|https?://|__file__|['\"]/(home|root|tmp|work)/",
            cell["source"],
        )
        if found:
            yield f"cell {i} depends on where it runs: {found[0]}"
        if "cuda" in cell["source"] and "is_available" not in cell["source"]:
            yield f"cell {i} uses CUDA without asking torch.cuda.is_available()"


@rule
def deterministic(book: Book) -> Iterator[str]:
    """No addresses, ids, absolute paths; floats with at most three decimals."""
    patterns = (
        r"0x[0-9a-f]{6,}",
        r"\d\.\d{4,}",
        r"object at ",
        r"[0-9a-f]{8}-[0-9a-f]{4}-",
        r"(?:^|[\s'\"])/\w+/\w+/",
        r"\d+(?:\.\d+)? (?:ms|µs|s)\b",
    )
    for i, text in book.texts():
        for pattern in patterns:
            if found := re.search(pattern, text):
                yield f"cell {i} prints {found[0]!r}, which may differ from run to run"


@rule
def pictures(book: Book) -> Iterator[str]:
    """Every image carries its data and a text that says the same; no bare <svg>, no PNG."""
    for i, output in book.outputs():
        data = output.get("data", {})
        html = "".join(data.get("text/html", []))
        if bad := {"image/png", "image/jpeg", "image/svg+xml"} & set(data):
            yield f"cell {i} shows {sorted(bad)}: use an <img> with its own data"
        if "<svg" in html:
            yield f"cell {i} shows a bare <svg>, which untrusted notebooks drop"
        for image in re.findall(r"<img [^>]*>", html):
            if not re.search(
                r'src="data:image/svg\+xml;base64,[^"]+" alt="[^"]{20,}"', image
            ):
                yield f"cell {i}: an image without its own data or without a text of its own"
        if data and "text/plain" not in data:
            yield f"cell {i}: an output without text/plain"


@rule
def links(book: Book) -> Iterator[str]:
    """Links to source name a symbol defined at that line; links to vLLM are pinned; other files exist."""
    for i, cell in enumerate(book.cells):
        if cell["cell_type"] != "markdown":
            continue
        if unresolved := re.findall(r"\]\((?:src|vllm):[^)]*\)", cell["source"]):
            yield f"cell {i}: unresolved link {unresolved[0]}"
        for label, target in re.findall(
            r"\[([^\]]+)\]\(((?!src:|vllm:)[^)]+)\)", cell["source"]
        ):
            if target.startswith("http"):
                if "github.com/vllm-project" in target and not target.startswith(
                    (VLLM_BLOB, "https://github.com/vllm-project/vllm/issues/")
                ):
                    yield f"cell {i}: {target} is not pinned to {VLLM_VERSION}"
                continue
            path, _, line = target.partition("#L")
            file = (ROOT / "notebooks" / path).resolve()
            if not file.exists():
                yield f"cell {i}: {path} does not exist"
            elif file.suffix == ".py" and symbol_at(
                file, int(line or 0)
            ) != label.strip("`"):
                yield f"cell {i}: {label} is not defined at {path} line {line or '?'}"


def symbol_at(file: Path, line: int) -> str:
    """The dotted name that is defined at a line of a file, or ""."""

    def search(body: list[ast.stmt], prefix: str) -> str:
        for node in body:
            if node.lineno == line or getattr(node, "lineno", 0) <= line <= (
                node.end_lineno or 0
            ):
                target = (
                    node.targets[0]
                    if isinstance(node, ast.Assign)
                    else getattr(node, "target", None)
                )
                symbol = getattr(node, "name", None) or getattr(target, "id", "")
                if node.lineno == line:
                    return prefix + symbol
                return search(getattr(node, "body", []), f"{prefix}{symbol}.")
        return ""

    return search(ast.parse(file.read_text(encoding="utf-8")).body, "")


@rule
def closing(book: Book) -> Iterator[str]:
    """It asks one question, breaks something on purpose, ends with the table and what was left out."""
    titles = [title for title, _ in book.sections]
    for wanted in (
        "The question",
        "Break it on purpose",
        "Here and in vLLM",
        "What was left out",
    ):
        if wanted not in titles:
            yield f"there is no section {wanted!r}"
    if titles[-2:] != ["Here and in vLLM", "What was left out"]:
        yield "the last two sections must be 'Here and in vLLM' and 'What was left out'"
    if not any(
        VLLM_BLOB in cell["source"] and "| here | in vLLM" in cell["source"]
        for cell in book.cells
    ):
        yield "there is no table '| here | in vLLM ...' with pinned links"


def lint(book: Book) -> list[str]:
    """All findings of all rules."""
    return [
        f"{book.path.name}: {title}: {text}"
        for title, check in RULES.items()
        for text in check(book)
    ]


if __name__ == "__main__":
    findings = [
        text
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for text in lint(Book.read(path))
    ]
    print("\n".join(findings) or "nothing found")
    sys.exit(bool(findings))
