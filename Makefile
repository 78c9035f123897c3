# `make demo` and `make test` work in a fresh clone; the first call sets up .venv, later ones reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# One thread for each worker: more only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 2

.PHONY: demo test pytest test-slow test-all docs lint types browser wheel constraints bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/bespoke run --out demo --resume

test: lint types pytest

pytest: $(VENV)/.installed-dev
	$(PYTEST)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

test-all: lint types $(VENV)/.installed-dev
	$(PYTEST) -m "slow or not slow"

# Their Python runs, their excerpts are the code, their commands and links exist, and generated pages are current.
docs: $(VENV)/.installed-dev
	$(PYTEST) tests/test_docs.py tests/test_methods_page.py tests/test_reproduction_page.py tests/test_reliability_page.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# A browser for the tests of the report's page, where there is none. `make test` does not call this: it skips them.
browser: | $(BIN)/python
	@sh tests/install_browser.sh $(VENV)

# The wheel in dist/, installed without the sources in a fresh environment and tried.
wheel: | $(BIN)/python
	@sh tests/try_wheel.sh $(PYTHON)

# constraints.txt anew, with the PyTorch that is in .venv: install the one to go to there, run the tests, then this.
constraints: $(VENV)/.installed
	@$(BIN)/python -c 'import torch; print("torch==" + torch.__version__.partition("+")[0])' > constraints.new
	@{ grep '^#' constraints.txt; cat constraints.new; } > constraints.made && mv constraints.made constraints.txt
	@rm constraints.new

bench: $(VENV)/.installed
	$(BIN)/bespoke bench

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Bespoke needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Bespoke and what it needs (PyTorch is large: the first time takes a minute or more) ..."
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools for development ..."
	@$(INSTALL) --editable '.[dev,tune,onnx,track,privacy,flower]'
	@touch $@
