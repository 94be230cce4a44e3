# Every target sets up what it needs; `make help` lists them.
VENV ?= .venv
PY := $(VENV)/bin/python
MODEL ?= smollm2-135m

.PHONY: help setup demo test check bench format sanitize clean

help:
	@echo "make demo      set up, fetch the real model, and run the main job on it (build/demo.json)"
	@echo "make test      set up and run the tests"
	@echo "make check     set up and run ruff, mypy and import-linter"
	@echo "make bench     set up and run the engine benchmark"
	@echo "make format    let ruff format the code"
	@echo "make sanitize  build the C code with sanitizers and run its driver"

setup:
	@scripts/setup.sh

demo: setup
	@$(PY) -m mzd.demo --output build/demo.json

test:
	@scripts/setup.sh --dev
	@$(PY) -m mzd.cli.main pull $(MODEL)
	@$(PY) -m pytest $(PYTEST_ARGS)

check:
	@scripts/setup.sh --dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: setup
	@$(PY) -m mzd.cli.main bench engine

format:
	@scripts/setup.sh --dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

sanitize:
	@scripts/sanitize.sh

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
