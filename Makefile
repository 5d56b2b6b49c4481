# Every target that needs an installation makes it first, in .venv, and again only when what it depends on changes.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
AT_LEAST_3_11 := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help install train test check test-full test-gpu bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(INSTALLED) ## .venv with megalite and what its tests need; PYTHON=python3.12 chooses the Python

train: $(INSTALLED) ## pretrain a small GPT on four local ranks
	@$(BIN)/megalite train configs/quickstart.toml

test: $(INSTALLED) ## the tests that every change runs
	@$(BIN)/python -m pytest

check: $(INSTALLED) ## lint, format, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

test-full: $(INSTALLED) ## all tests that need no GPU: every mesh, every page of the docs
	@$(BIN)/python -m pytest -m 'not gpu'

test-gpu: ## the tests that need GPUs, with the Python and PyTorch that are there: installs nothing
	@PYTHONPATH=. $(PYTHON) -m pytest -m gpu

bench: $(INSTALLED) ## the benchmarks
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do $(BIN)/python $$file; done

$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -c 'import pip; $(AT_LEAST_3_11)' 2>/dev/null || { \
		$(PYTHON) -c '$(AT_LEAST_3_11)' 2>/dev/null || { \
			echo "make: $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there); Python 3.11 or newer would do, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear .venv; }
	@echo "installing into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
