# wholebatch: what you can do with a clone. `make` alone lists it.
#
# Three stamps inside .venv make the second time instant: .setup (the package and its command line),
# .dev (what the tests of the core need) and .dev-all (the trainers and all other tools too). They go
# stale when pyproject.toml or constraints.txt change.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast coverage browser-test compat dist check format docs bench compare kills programs gpu-test gpu-bench clean

VENV := .venv
BIN := $(VENV)/bin
# Where `make dist` puts the packages.
DIST ?= dist
# Test processes, for two cores: one waits now and then for processes that it started.
JOBS ?= 3
# `make setup PYTHON=...` and `make gpu-test PYTHON=...` choose the interpreter. Else the first of
# these that starts makes .venv, and python3 runs the GPU targets.
FIND_PYTHON = $(firstword $(PYTHON) $(shell for p in python3.11 python3 python; do \
	if $$p -c '' 2>/dev/null; then echo $$p; break; fi; done))
GPU_PYTHON = $(or $(PYTHON),python3)
# What `make test-fast` runs.
CORE_TESTS = tests/window tests/batch tests/losses tests/entry_points
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

help: ## list the targets (default)
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | \
		while IFS=$$'\t' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

$(VENV)/.setup: pyproject.toml constraints.txt
	@python="$(FIND_PYTHON)"; \
	if [ -z "$$python" ]; then echo "make: no Python found; install Python 3.10 or newer" >&2; exit 1; fi; \
	"$$python" -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"make: {sys.executable} is Python {v}; wholebatch needs 3.10 or newer: make setup PYTHON=/path/to/python3")'; \
	echo "Installing wholebatch and its command line into $(VENV) (once; about a minute) ..."; \
	"$$python" -m venv $(VENV)
	@$(PIP_INSTALL) --editable '.[cli,recipes]'
	@touch $@

$(VENV)/.dev: $(VENV)/.setup
	@echo "Installing what the tests of the core need into $(VENV) (once) ..."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.dev-all: $(VENV)/.setup
	@echo "Installing the trainers and all that tests and checks need into $(VENV) (once) ..."
	@$(PIP_INSTALL) --editable '.[dev-all]'
	@touch $@

setup: $(VENV)/.setup ## create .venv with the package and its command line

run: setup ## train the embedded default recipe (about two minutes on two cores)
	$(BIN)/wholebatch train

# With bytecode, even where the environment forbids it: tests start a hundred processes.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# EVERY_TEST: a test that is skipped because a package is missing is a failure.
test: $(VENV)/.dev-all ## run all tests (JOBS=3 processes; installs the trainers)
	EVERY_TEST=1 $(PYTEST) --ignore tests/browser --ignore tests/packages

coverage: $(VENV)/.dev-all ## run all tests and print the branch coverage of src (takes longer)
	rm -rf build/coverage && mkdir -p build/coverage
	$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) -q --timeout 900 --ignore tests/browser --ignore tests/packages
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --sort=cover --skip-covered

test-fast: $(VENV)/.dev ## run the tests of the core promise (under a minute; no trainer needed)
	$(PYTEST) -q -m "not slow and not distributed" $(CORE_TESTS)

browser-test: $(VENV)/.dev-all ## test the HTML pages in Debian's Chromium; installs it if it is missing
	@scripts/chromium
	BROWSER_REQUIRED=1 $(BIN)/python -m pytest tests/browser

check: $(VENV)/.dev-all ## ruff, ruff format, mypy --strict, the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev ## let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compat: $(VENV)/.dev-all ## run the exactness tests with torch 2.6, 2.11, 2.13 and the newest, Python 3.10 to 3.13; writes docs/benchmarks/compat.md
	$(BIN)/python scripts/compat.py

dist: $(VENV)/.dev-all ## build the package into DIST=dist, install it into an empty environment, run it
	DIST=$(DIST) $(BIN)/python -m pytest -q tests/packages

docs: $(VENV)/.dev-all ## build the documentation's site in build/site, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site
	@echo "build/site/index.html"

bench: $(VENV)/.dev-all ## measure on this machine; writes docs/benchmarks/
	$(BIN)/python benchmarks/overhead.py

compare: $(VENV)/.dev-all ## measure if public trainers' updates depend on the split; writes docs/split-dependence.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/split_dependence.py

kills: $(VENV)/.dev ## kill `train` 20 times at random moments, on one process and on two ranks: the same bits
	OMP_NUM_THREADS=1 $(BIN)/python scripts/kills.py

# How long `make programs` runs, and where its random numbers start. WAY=plain: loops without
# wholebatch, for lint and verify.
SECONDS ?= 600
WAY ?= wholebatch
programs: $(VENV)/.dev-all ## write training programs, run them, hold them against plain torch (SECONDS=600 SEED=n WAY=plain)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs --way $(WAY) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# The GPU targets install nothing: they run with the torch and the pytest that the machine has.
gpu-test: ## run the tests that need CUDA (PYTHON=python3; GPU_JOBS=8 with pytest-xdist)
	PYTHONPATH=src:.:$${PYTHONPATH:-} $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini $(if $(GPU_JOBS),-n $(GPU_JOBS)) tests/gpu

gpu-bench: ## run the benchmarks that need CUDA, with the machine's own torch
	for script in benchmarks/gpu_*.py; do echo "== $$script"; PYTHONPATH=src $(GPU_PYTHON) $$script; done

clean: ## remove .venv, caches and builds (runs/ stays: it is yours)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
