# Two commands do everything on a fresh Debian-like machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export UV_PYTHON_DOWNLOADS := never

# PyTorch, JAX and the like for the tests of airflow_gpu.frameworks: 3 GB to fetch, 6 GB on disk, so one for all checkouts.
FRAMEWORKS ?= $(HOME)/.cache/airflow-gpu/frameworks
FRAMEWORKS_ROOM := 12

.PHONY: demo test test-all lint bench frameworks clean

demo: $(STAMP) ## train a model through two preemptions, inside a real Airflow
	@$(BIN)/python -m tests.beds.demo $(if $(KEEP),--keep)

test: $(STAMP) ## everything that CI runs
	@CI_PYTHON=$(BIN)/python bash tests/run.sh

test-all: $(STAMP) ## every scenario on every target, with the dated table in docs/
	@CI_PYTHON=$(BIN)/python bash tests/run.sh --all

lint: $(STAMP)
	@CI_PYTHON=$(BIN)/python bash tests/run.sh --lint

bench: $(STAMP) ## figures against peers, side by side
	@$(BIN)/python benchmarks/parse.py
	@$(BIN)/python -m benchmarks.triggerer $(if $(QUICK),--quick)

# uv makes the environment in seconds where pip takes minutes; pip is the way without it.
$(STAMP): pyproject.toml constraints.txt
	@set -euo pipefail; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: make PYTHON=python3.12 ..."; exit 1; }; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	command -v uv >/dev/null || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv || true; \
	UV=$$(command -v uv || echo $(BIN)/uv); \
	if test -x "$$UV"; then \
	  "$$UV" pip install --quiet --python $(BIN)/python --require-hashes -r constraints.txt; \
	  "$$UV" pip install --quiet --python $(BIN)/python --no-deps -e .; \
	else \
	  $(BIN)/python -m pip install --quiet --require-hashes -r constraints.txt; \
	  $(BIN)/python -m pip install --quiet --no-deps -e .; \
	fi; \
	touch $(STAMP)

# Compiled at once: otherwise every rank of a test compiles a thousand modules.
frameworks: $(STAMP) ## the libraries that tests/frameworks runs with
	@set -euo pipefail; \
	python=$$(realpath $(BIN)/python); pins=$$(cat constraints-frameworks.txt <(echo "$$python") | sha256sum); \
	if test "$$(cat $(FRAMEWORKS)/.pins 2>/dev/null)" = "$$pins"; then exit 0; fi; \
	UV=$$(command -v uv || echo $(BIN)/uv); \
	test -x "$$UV" || { echo "uv is needed for this one"; exit 1; }; \
	mkdir -p "$$(dirname $(FRAMEWORKS))"; \
	free=$$(df --output=avail -BG "$$(dirname $(FRAMEWORKS))" | tail -1 | tr -dc 0-9); \
	test "$$free" -ge $(FRAMEWORKS_ROOM) || { echo "$${free} GB are free, $(FRAMEWORKS_ROOM) are needed"; exit 1; }; \
	"$$UV" venv --quiet --clear --python "$$python" $(FRAMEWORKS); \
	"$$UV" pip install --quiet --python $(FRAMEWORKS)/bin/python --require-hashes --compile-bytecode -r constraints-frameworks.txt; \
	echo "$$pins" > $(FRAMEWORKS)/.pins

clean:
	rm -rf $(VENV) .demo
