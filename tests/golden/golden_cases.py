"""Reads the golden files: what vLLM 0.32.0 did on seeded inputs (each file's `schema` explains its fields)."""

import json
from pathlib import Path
from typing import Any

import pytest

_folder = Path(__file__).parent / "data"


def use(folder: Path) -> None:
    """Read the files of `folder` from now on."""
    global _folder
    if not folder.is_dir():
        raise pytest.UsageError(f"--golden-dir {folder} is not a folder")
    _folder = folder


def cases(name: str) -> list[Any]:
    """Every case of `name`.json as pytest params; a file that the folder lacks gives one skipped param."""
    path = _folder / f"{name}.json"
    if not path.exists():
        return [
            pytest.param(None, id=f"{name}-absent", marks=pytest.mark.skip(reason=f"{path.name} is not in {_folder}"))
        ]
    found = json.loads(path.read_text())["cases"]
    labels = [case.get("name") or case.get("kind") or case.get("family") or case.get("fn") or "case" for case in found]
    return [pytest.param(case, id=f"{case['id']}-{label}") for case, label in zip(found, labels, strict=True)]
