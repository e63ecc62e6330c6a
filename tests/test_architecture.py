"""The house rules: imports run downwards, files stay small, heavy packages load only where they are needed."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PACKAGE, KERNELS = ROOT / "minivllm", ROOT / "kernels"

# What each room may import, by prefix within minivllm. A name ending in "." stands for the folder.
BASE = ("config",)
CORE = (*BASE, "core.", "request", "outputs", "sampling.params")
MODEL_SIDE = (*BASE, "core.kv_cache_interface", "forward_context", "attention.", "layers.", "models.")
WORKER = (*CORE, *MODEL_SIDE, "sampling.", "worker.")
ENGINE = (*WORKER, "engine", "llm", "output_processor")
ROOMS: dict[str, tuple[str, ...]] = {
    "config": (),
    "outputs": BASE,
    "request": (*BASE, "sampling.params"),
    "core.": CORE,
    "sampling.": (*BASE, "outputs", "sampling."),
    "forward_context": (*BASE, "attention.layer_base", "attention.backend", "attention.metadata"),
    "attention.": (*BASE, "core.kv_cache_interface", "forward_context", "attention."),
    "layers.": (*BASE, "core.kv_cache_interface", "forward_context", "attention.", "layers."),
    "models.": MODEL_SIDE,
    "worker.": WORKER,
    "output_processor": ENGINE,
    "engine": ENGINE,
    "llm": ENGINE,
    "__main__": ENGINE,
    "__init__": ENGINE,
    "debug.": (*ENGINE, "debug."),
    "viz.": (*ENGINE, "debug.", "viz."),
    "check.": (*ENGINE, "debug.", "viz.", "check."),
}
FILES = sorted(path for folder in (PACKAGE, KERNELS) for path in folder.rglob("*.py"))


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return f"{inside.parts[0]}." if len(inside.parts) > 1 else inside.stem


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module or module.name) of every import that runs, also inside functions; not those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        yield from imports(node)


def allowed(target: str, may: tuple[str, ...]) -> bool:
    return any(f"{target}.".startswith(prefix if prefix.endswith(".") else f"{prefix}.") for prefix in may)


def wrong_imports(path: Path, source: str) -> list[str]:
    """Imports of `source` that its room may not make."""
    wrong = []
    may = ROOMS[room_of(path)] if path.is_relative_to(PACKAGE) else ()
    for line, name in imports(ast.parse(source)):
        top, _, target = name.partition(".")
        if (top == "minivllm" and target and not allowed(target, may)) or (top == "minivllm" and not target):
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        if top == "torch" and path.is_relative_to(PACKAGE / "core"):
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports torch")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_run_downwards(path: Path) -> None:
    assert wrong_imports(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "fine"),
    [
        (PACKAGE / "core/x.py", "from minivllm.core.y import z", True),
        (PACKAGE / "core/x.py", "from minivllm.sampling.params import SamplingParams", True),
        (PACKAGE / "core/x.py", "from minivllm.sampling.sampler import Sampler", False),
        (PACKAGE / "core/x.py", "def f():\n    import torch.nn", False),
        (PACKAGE / "core/x.py", "if TYPE_CHECKING:\n    from minivllm.worker.memory import f", True),
        (PACKAGE / "models/x.py", "from minivllm.worker.memory import f", False),
        (PACKAGE / "attention/x.py", "from minivllm.core.scheduler import Scheduler", False),
        (PACKAGE / "attention/x.py", "from minivllm_kernels.attention import f", True),
        (PACKAGE / "worker/x.py", "from minivllm.viz.svg import draw", False),
        (PACKAGE / "config.py", "from minivllm.configuration import f", False),
        (KERNELS / "minivllm_kernels/x.py", "from minivllm.config import VllmConfig", False),
        (KERNELS / "minivllm_kernels/x.py", "from minivllm_kernels.y import f", True),
        (PACKAGE / "viz/x.py", "import minivllm", False),
    ],
)
def test_the_import_check_tells_right_from_wrong(path: Path, source: str, fine: bool) -> None:
    assert (wrong_imports(path, source) == []) is fine


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1) if token.string else ())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None and first.end_lineno is not None:
                lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def total(folder: Path) -> int:
    return sum(code_lines(path.read_text()) for path in folder.rglob("*.py"))


SAMPLE = '''"""Doc
of two lines."""

# why
x = 1  # here

def f():
    """Doc."""
    return (
        1
    )
'''


def test_code_lines_leave_out_blanks_comments_and_docstrings() -> None:
    assert code_lines(SAMPLE) == 5
    assert code_lines('x = """a\n\nb"""\n') == 3


def test_line_budgets() -> None:
    package, models = total(PACKAGE), total(PACKAGE / "models")
    assert package < 8000, f"minivllm has {package} code lines"
    assert package - models < 5500, f"minivllm without models has {package - models} code lines"
    assert total(KERNELS) < 4000, f"kernels have {total(KERNELS)} code lines"
    long = {path.relative_to(ROOT).as_posix(): n for path in FILES if (n := len(path.read_text().splitlines())) > 400}
    assert not long, f"files of more than 400 lines (aim at 350): {long}"


def test_no_drawer_for_odds_and_ends() -> None:
    assert [path.name for path in FILES if path.stem in ("util", "utils", "helpers", "common", "misc")] == []


def run_python(code: str) -> str:
    """What `code` prints in a fresh interpreter whose sys.path begins with the repository."""
    prefix = f"import sys; sys.path[:0] = {[str(ROOT), str(KERNELS)]!r}\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(statement: str, names: list[str]) -> list[str]:
    return run_python(f"{statement}\nprint(*[n for n in {names!r} if n in sys.modules])").split()


HEAVY = ["torch", "transformers", "triton", "ipywidgets", "IPython", "minivllm_kernels"]


def test_importing_minivllm_loads_nothing_heavy() -> None:
    assert loaded_after("import minivllm", HEAVY) == []


def test_core_never_loads_torch() -> None:
    names = sorted(f"minivllm.core.{path.stem}" for path in (PACKAGE / "core").glob("[!_]*.py"))
    assert loaded_after(f"import {', '.join(names)}", HEAVY) == []


def test_the_engine_loads_nothing_of_jupyter() -> None:
    assert loaded_after("import minivllm.llm", ["ipywidgets", "IPython", "matplotlib", "playwright"]) == []


def test_transformers_does_not_take_our_folders_for_packages() -> None:
    """Transformers looks for a package named `kernels`; ours is a plain folder that must not pass for it."""
    assert not (KERNELS / "__init__.py").exists()
    code = "from transformers.models.llama.modeling_llama import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"
    assert run_python(code).split() == ["LlamaForCausalLM"]


def test_environment_and_constraints_agree_with_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    (python,) = [entry for entry in conda if re.match(r"python\b", entry)]
    assert re.sub(r"python\s*=+\s*", "", python) in SpecifierSet(project["requires-python"])
    assert "pip" in conda
    editable = [re.fullmatch(r"-e \.(?:\[(.*)\])?", entry) for entry in pip]
    wanted = [extra for match in editable if match and match[1] for extra in match[1].split(",")]
    assert any(editable), "environment.yml must install this repository"
    assert set(wanted) <= set(extras)
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    ranges = {requirement.name: requirement for requirement in map(Requirement, lines)}
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalpha()]
    assert pins
    for pin in pins:
        (exact,) = pin.specifier
        assert pin.name in ranges, f"constraints.txt pins {pin.name}, which pyproject.toml does not name"
        assert exact.version in ranges[pin.name].specifier, f"{pin} is outside {ranges[pin.name]}"
