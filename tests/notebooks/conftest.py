"""One execution of all notebooks, shared by the tests that need one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def remade(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of the notebooks made anew, every cell run twice, from another working directory; and the report."""
    folder = tmp_path_factory.mktemp("remade")
    report = folder / "report.json"
    command = [sys.executable, str(ROOT / "notebooks" / "build.py"), "--out", str(folder), "--report", str(report)]
    done = subprocess.run([*command, "--twice"], cwd=folder, capture_output=True, text=True, timeout=600)
    assert report.exists(), done.stdout + done.stderr
    return folder, json.loads(report.read_text())
