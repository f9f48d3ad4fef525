# Two commands do everything on a fresh Debian-like machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export UV_PYTHON_DOWNLOADS := never

.PHONY: demo test test-all lint bench clean

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

clean:
	rm -rf $(VENV) .demo
