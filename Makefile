# Verbs of the repository. `make help` prints them. Everything is installed into .venv/ and .tools/.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup tools run test check bench docs clean

help: ## Show these verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv/ with everything installed

$(STAMP): pyproject.toml constraints.txt plugins/lab/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "RezusCloud needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> installing into $(VENV)/ (once, about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c constraints.txt -e '.[dev]' -e plugins/lab
	@touch $@

tools: setup ## Get the real OpenTofu into .tools/ (found, else fetched, else built)
	@$(BIN)/python tools/get_engine.py

run: setup ## Start a server with the lab provider and a sample tenant
	@$(BIN)/python tools/run_demo.py

check: setup ## Format, lint, types, layers, docs freshness
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/make_docs.py --check

test: setup tools check ## Run every check and every test, as CI does
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

bench: setup tools ## Measure against bare alternatives and write docs/reference/benchmarks.md
	@$(BIN)/python -m tests.bench

docs: setup ## Write the generated pages of docs/reference/
	@$(BIN)/python tools/make_docs.py

clean: ## Remove what the other verbs made
	rm -rf $(VENV) .tools data build dist
