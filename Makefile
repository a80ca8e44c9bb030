# Each target makes the environment that it needs, in .venv.
PYTHON ?= python3
BIN := .venv/bin

# What `make gpu` runs with; another one needs what the extra `dev` lists: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python

.PHONY: test test-all demo docs reliability gpu matrix format clean

# Each test is a process of one thread, and of a few ranks now and then.
PROCESSES ?= 2
PYTEST := $(BIN)/pytest -q -n $(PROCESSES) --dist loadgroup

# Lint, types, and every promise once.
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not full"

# All of that, and then what is left.
test-all: test
	$(PYTEST) -m full

demo: .venv/installed
	$(BIN)/python examples/demo.py

docs: .venv/installed
	$(BIN)/python docs/render.py && $(BIN)/python -m mkdocs build --strict

reliability: .venv/installed
	$(PYTEST) -m reliability --reliability=docs/reliability.md

# All that needs a GPU, in about ten minutes: tests, sanitizers, and the benchmarks that write benchmarks/results/*_cuda.*
gpu: $(if $(filter $(BIN)/%,$(GPU_PYTHON)),.venv/installed)
	@$(GPU_PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available() and 'torch finds no GPU here')"
	@status=0; \
	$(GPU_PYTHON) -m pytest -q tests/test_kernels.py tests/integration/test_cuda.py || status=1; \
	if command -v compute-sanitizer >/dev/null; then \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		timeout 90 compute-sanitizer --tool memcheck --error-exitcode 1 $(GPU_PYTHON) -m tests.run_kernels || status=1; \
		timeout 90 compute-sanitizer --tool racecheck --error-exitcode 1 $(GPU_PYTHON) -m tests.run_kernels || status=1; \
	else echo "compute-sanitizer is not installed: memcheck and racecheck were not run"; fi; \
	$(GPU_PYTHON) -m benchmarks.selection --parts cuda || status=1; \
	$(GPU_PYTHON) -m benchmarks.gpt || status=1; \
	exit $$status

# The quick tests with the oldest, the newest and other versions of torch and Lightning, each in an environment of its
# own: downloads about 3 GB for each row, and takes 10 GB of disk while it runs. One row: make matrix ROWS=oldest
matrix:
	$(PYTHON) -m tests.matrix $(ROWS)

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/installed: setup.cfg pyproject.toml requirements/ci.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/ci.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
