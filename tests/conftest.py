"""Options and environment shared by every test."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir", default=None, help="folder of golden JSON files to run instead of tests/golden/data"
    )
