# `make demo` and `make test` work in a fresh clone; the first call sets up .venv, later ones reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# One thread for each worker: more only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 2

.PHONY: demo test test-slow lint types browser bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/bespoke run --out demo --resume

test: lint types browser
	$(PYTEST)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

browser:
	@sh tests/install_browser.sh

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
