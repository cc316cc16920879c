# `make run`: a whole small cluster on this machine. `make test`: every test. Both set up what they need.

VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=

# The first Python that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help run down test soak lint fmt clean setup-run setup-test

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: setup-run ## start a cluster on this machine (MODEL=DIR_OR_GGUF, ARGS="--nodes 2 ...")
	@$(BIN)/mooncakectl up $(if $(MODEL),--model '$(MODEL)') $(ARGS)

down: ## stop that cluster
	@$(BIN)/mooncakectl down $(ARGS)

test: setup-test ## run all tests (PYTEST_ARGS="-k name ...")
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

SECONDS ?= 60
soak: setup-test ## run everything at once for a minute (SECONDS=3600: for an hour)
	@SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/node/test_soak.py

lint: setup-test ## check style, types, import rules and systemd units
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit/test_systemd.py

fmt: setup-test ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find mooncaked mooncakectl tests -name __pycache__ -type d -prune -exec rm -rf {} +

setup-run setup-test: setup-%: python
	@$(PYTHON) -m mooncakectl.local.setup --venv $(VENV) --purpose $*

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed. On Debian: apt-get install python3 python3-venv" >&2; exit 3; }
