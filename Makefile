# Everything runs from .venv, which is made on first use and again when the dependencies change.
# Whichever supported Python is there; 3.11 first, which constraints.txt was made with. Older ones cannot take its pins.
PYTHON ?= $(shell for v in 3.11 3.12 3.13 3.10; do python$$v -c '' 2>/dev/null && echo python$$v && break; done)
PINS = $(if $(findstring 3.10,$(PYTHON)),,-c constraints.txt)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

VERSIONS ?= 2.6@3.10 2.7@3.11 2.8@3.12 2.9@3.12 2.10@3.13 2.11@3.11 2.12@3.10 2.13@3.11 2.14@3.12 2.15@3.13  # torch@Python

.PHONY: demo test test-slow test-versions lint bench docs format clean
demo: $(READY)  ## five nodes train on scikit-learn's digits, four methods, both settings
	$(BIN)/rtopk demo

test: lint  ## the whole default suite
	$(BIN)/python -m pytest -n 3  # one more than cores: some wait for processes they started

test-slow: $(READY)  ## what is longer, or needs the real data
	$(BIN)/python -m pytest -m slow -o addopts="--strict-markers --strict-config -ra"

test-versions:  ## the library's tests with other versions, one environment of some GB at a time
	$(PYTHON) tests/versions.py $(VERSIONS)

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the benchmarks, each against its floor and its rivals
	$(BIN)/rtopk bench compress
	$(BIN)/rtopk bench codec

docs: $(READY)  ## the site, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "rtopk needs Python 3.10 to 3.13; none was found (PYTHON=... names one)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PINS) -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) runs site
