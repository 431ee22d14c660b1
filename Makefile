# Every target does its own set-up: Python 3.11 or newer, pip and make are all that a machine needs.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin

# the first Python on this machine that is new enough; choose another with: make setup PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# what the project imports comes from its own environment, whatever the caller's shell holds
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.NOTPARALLEL:
.PHONY: help setup setup-vllm tour test test-gpu docs docs-serve bench lint format pins clean

help:
	@echo "make setup       the environment in $(VENV), once"
	@echo "make setup-vllm  vLLM's environment, for the tests of its plugin"
	@echo "make tour        every stage on this machine, in about a minute"
	@echo "make test        the whole suite"
	@echo "make test-gpu    what needs a GPU"
	@echo "make bench       measure on this machine's GPU"
	@echo "make docs        build the site, strictly, into site/"
	@echo "make docs-serve  the site, rebuilt as you write"
	@echo "make lint        format, lint, types, spelling"

setup: $(VENV)/.ready-dev

define need-python
@if [ -z "$(PYTHON)" ]; then echo "no Python >= 3.11 found: install one, or name it with PYTHON=..." >&2; exit 1; fi
endef

# a stamp per extra: setting up again happens only when the requirements change
$(VENV)/.ready-%: pyproject.toml constraints.txt tools/setup_env.py
	$(need-python)
	@"$(PYTHON)" tools/setup_env.py $(or $(EXTRAS),$*)

# vLLM's environment, in which the tests of its plugin run
setup-vllm:
	$(need-python)
	@"$(PYTHON)" tools/setup_vllm_env.py

tour: setup
	$(BIN)/epmoe tour

# whole files go to two workers, each with ranks of its own: most tests wait more than they compute
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -rs --device cuda --pyargs epmoe.core.conformance $(ARGS)
	$(BIN)/python -m pytest -rs -m "gpu or multi_gpu" stages tests

bench: setup
	$(BIN)/epmoe bench $(ARGS)

# never with -q: warnings would not be counted, and broken links would pass
docs: $(VENV)/.ready-docs setup
	bash tools/vendor_assets.sh
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m tools.check_site site

docs-serve: $(VENV)/.ready-docs setup
	bash tools/vendor_assets.sh
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell .
	$(BIN)/python -m tools.check_layout

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# after changing versions in the environment and testing them
pins: setup $(VENV)/.ready-docs
	$(BIN)/python -m pip list --format=freeze | $(BIN)/python tools/pin.py

clean:
	rm -rf $(VENV) site .cache .pytest_cache .ruff_cache
