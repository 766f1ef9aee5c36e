PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 3
# Comes with PyTorch for GPUs. Tests of kernels find it here without it being installed.
TRITON := triton==3.6.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test durations test-slow test-gpu check format docs site dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make the virtual environment .venv, everything pinned

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	case "$$(uname -sm)" in "Linux x86_64") $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/kernels --upgrade $(TRITON);; esac
	touch $(STAMP)

demo: setup  ## train a small model on real text, on this machine
	$(BIN)/hexad demo

test: setup  ## the default tests (8 to 12 minutes on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

durations: setup  ## record how long the default tests take: the longest files begin
	$(MAKE) test TESTS=--record-durations

test-slow: setup  ## the long sweeps (an hour), or one of them: make test-slow SLICE=0/12
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'slow and not gpu' $(SLICE:%=--slice %)

test-gpu: setup  ## tests and speed on this machine's GPUs, in one report
	$(BIN)/python benchmarks/gpu_report.py

check: setup  ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## rewrite the generated pages: settings, presets, keys and flags of other systems
	$(BIN)/python -m docs.generate

site: setup  ## build the documentation's site into site/, without a network
	$(BIN)/python -m zensical build --clean --strict

dist: setup  ## build wheel, sdist and SBOM into dist/, and try them in an empty environment
	.ci/package dist

clean:  ## remove the environment and what runs wrote
	rm -rf $(VENV) runs build dist site .cache
