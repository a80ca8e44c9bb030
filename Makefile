# Each target makes the environment that it needs, in .venv.
PYTHON ?= python3
BIN := .venv/bin

# Workers of pytest keep compiled tests. Otherwise each run compiles them, for a minute.
unexport PYTHONDONTWRITEBYTECODE

# What `make gpu` runs with; nothing is installed for it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: test test-all test-exhaustive demo docs reliability gpu matrix clients format clean

# Quick tests often wait for ranks, so `make test` has four processes on two cores: 3:36 minutes in a fresh environment.
PROCESSES = 3
PYTEST = $(BIN)/pytest -q -n $(PROCESSES) --dist loadgroup

# Lint, types, and every promise once. Tests often wait, so mypy runs beside them.
test: PROCESSES = 4
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy > .venv/types.txt & types=$$!; $(PYTEST) -m "not full and not exhaustive and not later"; tests=$$?; \
	wait $$types; types=$$?; cat .venv/types.txt; exit $$((tests + types))

# All of that, and then a part of what is left: some cases of each test.
test-all: test
	$(PYTEST) -m "(full or later) and not exhaustive"

# All cases of all tests: about an hour.
test-exhaustive: .venv/installed
	$(PYTEST)

# With .venv or your Python, if one of them has PyTorch and Lightning. Otherwise in an environment with them and nothing else.
# The C loops are built first, if there are a compiler and setuptools.
demo:
	@for python in $(BIN)/python $(PYTHON); do \
		if $$python -c "import lightning_sparse, pytorch_lightning, tensorboard" 2> /dev/null; then \
			$$python setup.py -q build_ext --inplace > /dev/null 2>&1; \
			exec $$python examples/demo.py; \
		fi; \
	done; \
	$(MAKE) --no-print-directory .venv-demo/installed && exec .venv-demo/bin/python examples/demo.py

.venv-demo/installed: setup.cfg setup.py
	@echo "$(PYTHON) lacks PyTorch or Lightning, so both are installed into .venv-demo, and nothing else."
	@echo "On Linux, pip downloads PyTorch with CUDA's libraries: gigabytes, and minutes. To avoid it: make demo PYTHON=a Python that has both."
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/pip install --disable-pip-version-check --constraint requirements/ci.txt --editable .
	touch $@

docs: .venv/installed
	$(BIN)/python docs/render.py && $(BIN)/python -m mkdocs build --strict

reliability: .venv/installed
	$(PYTEST) -m reliability --reliability=docs/reliability.md

# All that needs a GPU, without a network: tests, sanitizers and benchmarks, and at the end which promises hold. Some parts,
# written elsewhere: make gpu PARTS="kernels gpt" OUT=~/results. In five minutes: python3 -m tests.gpu quick
gpu:
	$(GPU_PYTHON) -m tests.gpu full $(PARTS) $(if $(OUT),--out $(OUT))

# The quick tests with the oldest, the newest and other versions of torch and Lightning, each in an environment of its
# own: downloads about 3 GB for each row, and takes 10 GB of disk while it runs. One row: make matrix ROWS=oldest
matrix:
	$(PYTHON) -m tests.matrix $(ROWS)

# Small trainings with packages of other people, two processes, beside stock ddp: downloads 1.5 GB, takes ten minutes.
clients: .venv-clients/installed
	.venv-clients/bin/python -m tests.clients $(CLIENTS)

.venv-clients/installed: setup.cfg setup.py requirements/clients.txt requirements/ci.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check --constraint requirements/ci.txt --editable . -r requirements/clients.txt pandas matplotlib hypothesis pytest
	touch $@

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: setup.cfg setup.py pyproject.toml requirements/ci.txt $(wildcard lightning_sparse/kernels/cpu/* lightning_sparse/contrib/kernels/cpu/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'  # the first with --group
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/ci.txt --editable '.[cli,cuda,examples]' --group dev
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-demo
