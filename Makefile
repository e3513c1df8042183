# Everything a newcomer needs. Each target makes .venv itself (once); it needs Python 3.11+, make and pip only.
# `make` alone lists the targets.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo up test test-full check format bench chaos clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(INSTALLED)  ## make .venv, or bring it up to date

# A second run finds the stamp newer than both files and does nothing. torch stands in the same pip call as the
# constraints (through the extra `train`), so that pip cannot pick another build of it.
$(INSTALLED): pyproject.toml constraints-ci.txt
	@python=$$(for candidate in python3.11 python3.12 python3.13 python3; do \
	    if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$candidate"; break; fi; \
	done); \
	test -n "$$python" || { echo "Gangline needs Python 3.11 or newer on PATH; found: $$(python3 -V 2>&1)" >&2; exit 1; }; \
	printf 'Installing Gangline and its tools into $(VENV) (once; one to three minutes, 1.5 GB) ... '; \
	started=$$(date +%s); \
	test -x $(PYTHON) || "$$python" -m venv $(VENV); \
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints-ci.txt -e '.[server,worker,embedded,train,recipes,dev]' \
	    || { echo "failed: see pip's message above; 'make clean' starts afresh" >&2; exit 1; }; \
	touch $@; \
	echo "done in $$(( $$(date +%s) - started )) s"

demo: $(INSTALLED)  ## start a cluster here, train a model on 4 ranks, show the loss curve, stop everything
	@$(PYTHON) -P examples/demo.py

up: $(INSTALLED)  ## run Gangline on this machine until Ctrl-C (data in .data; ARGS="--nodes 4" and so on)
	@$(VENV)/bin/gang up --data .data $(ARGS)

test: $(INSTALLED)  ## the tests that CI runs
	@$(PYTHON) -m pytest -m "not full" $(PYTEST_ARGS)

test-full: $(INSTALLED)  ## all tests, with the counts that the issues give
	@$(PYTHON) -m pytest $(PYTEST_ARGS)

check: $(INSTALLED)  ## format, lint, types, import directions
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/mypy tests examples
	@$(VENV)/bin/lint-imports --no-logo

format: $(INSTALLED)  ## let ruff format the code and mend what it can
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(INSTALLED)  ## one benchmark: make bench NAME=submit_rate
	@test -n "$(NAME)" || { echo "which one? make bench NAME=<name>, a file of tests/bench:" >&2; \
	    ls tests/bench 2>/dev/null | sed -n 's/^\([a-z].*\)\.py$$/  \1/p' >&2; exit 2; }
	@$(PYTHON) -m tests.bench.$(NAME) $(ARGS)

chaos: $(INSTALLED)  ## faults on purpose: kill -9, partitions, lost servers
	@$(PYTHON) -m pytest tests/chaos $(PYTEST_ARGS)

clean:  ## remove .venv, caches and builds; the data of `make up` (.data) stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
