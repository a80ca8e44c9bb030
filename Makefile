# Each target makes the environment that it needs, in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test demo reliability format clean

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

demo: .venv/installed
	$(BIN)/python examples/demo.py

reliability: .venv/installed
	$(BIN)/pytest -q -m reliability --reliability=README.md

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
