# `make demo`, `make test` and `make check` need only Python 3.11+ and make: the first call builds .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
WORKERS ?= 2

.PHONY: help install demo test test-all check docs format clean

help:
	@echo "make demo      train, certify and attack a small model in about a minute; no network needed"
	@echo "make test      run the tests"
	@echo "make test-all  run the slow tests too"
	@echo "make check     lint, formatting, types, import order"
	@echo "make docs      build the documentation into site/; no network needed once installed"
	@echo "make format    mend what lint and formatting can mend"

install: $(STAMP)

# torch comes first and pinned, so that no later step resolves it to another build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/patchcert demo --out demo-run

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

# What the site is built with is installed on first use, so that tests do without it.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $(DOCS_STAMP)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist site
