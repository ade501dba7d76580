# nibble. `make quickstart` sets up and runs the main job; `make test` sets up and passes the tests.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# One thread per process, so that sums do not depend on the machine's core count.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help .venv quickstart test test-slow test-gpu checks clean

help:  ## what there is to make
	@grep -hE '^[a-z.-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z.-]+):.*## /  make \1 -- /'

.venv: $(STAMP)  ## the virtual environment, with everything the tests need

# The stamp is written last: an interrupted installation is taken up again.
$(STAMP): requirements.txt requirements-dev.txt
	@python=$$(PYTHON="$(PYTHON)" sh tools/find_python.sh) || exit 2; \
	echo "setting up $(VENV) with $$python (torch is large: this takes a few minutes)"; \
	[ -x $(PY) ] && $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || "$$python" -m venv --clear $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	@touch $(STAMP)

quickstart: $(STAMP)  ## train a small hybrid model in NVFP4 on real text, from nothing, in minutes
	@$(PY) -m tools.quickstart

# Three parts: a process holds what one area of the code imports and caches.
PARTS := "--ignore=tests/pretrain --ignore=tests/tools --ignore=tests/integration tests" \
	"tests/tools tests/integration" "tests/pretrain"
test: $(STAMP)  ## every CPU test that takes seconds
	@status=0; for part in $(PARTS); do \
	  $(PYTEST) -m "not slow and not gpu" -n 2 --dist loadfile $$part || status=1; \
	done; exit $$status

test-slow: $(STAMP)  ## the CPU tests that take minutes
	$(PYTEST) -m "slow and not gpu" tests

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(PYTEST) -m gpu tests

checks: $(STAMP)  ## style, lint, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:  ## remove what tests and runs of tools leave, but no data and no runs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
