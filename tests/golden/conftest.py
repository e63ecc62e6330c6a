"""Golden tests run on `tests/golden/data`, or on a folder of such files: `pytest tests/golden --golden-dir DIR`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import golden_cases


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--golden-dir", default=None)
    if chosen is not None:
        golden_cases.use(Path(chosen))
