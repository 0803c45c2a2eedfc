# Everything runs from .venv, which is made on first use and again when the dependencies change.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint bench docs format clean
demo: $(READY)  ## five nodes train on scikit-learn's digits, four methods, both settings
	$(BIN)/rtopk demo

test: lint  ## the whole default suite
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)  ## what is longer, or needs the real data
	$(BIN)/python -m pytest -m slow -o addopts="--strict-markers --strict-config -ra"

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
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) runs site
