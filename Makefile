# Two commands: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
CUDA := $(shell find src/sparsetile/kernels/cuda tests -name '*.cu' -o -name '*.cuh')

# One process a core; one that has nothing left to do takes tests of the other. Bytecode is kept,
# whatever the caller's environment says: tests start tens of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
# What `make check` runs: about a minute, and where most mistakes show.
CORE := tests/test_layering.py tests/core tests/tools/test_digest.py tests/jit \
  tests/contracts/test_formats.py tests/contracts/test_balance.py tests/formats tests/balance \
  tests/systems tests/plan/test_plan.py tests/plan/test_planner.py

.PHONY: demo test cases check test-versions lint style types docs setup compile-all verify mutate clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt src/sparsetile/_version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) must be Python 3.11 or newer; set PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The main job on a generated graph: on a GPU if there is one, else on the CPU.
demo: $(STAMP)
	$(BIN)/sparsetile run 'gen:power_law?rows=20000&nnz=400000&seed=1' -n 128 --weighted

# Everything that a machine without a GPU can check, in about 13 minutes on two cores (the first time).
test: $(STAMP) style
	$(MAKE) --no-print-directory --jobs=2 types cases

cases: $(STAMP)
	$(PYTEST)

# The inner loop: lint and about a minute of tests.
check: $(STAMP) lint
	$(PYTEST) $(CORE)

# The core tests on each pair of Python and torch that this machine and the package index have.
test-versions: $(STAMP)
	$(BIN)/python -m tools.versions

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CUDA) tests/emulator/*.h

# One process for more than a minute if there is no cache: `make test` runs it beside the tests.
types: $(STAMP)
	$(BIN)/mypy

# The documentation site, in build/docs. Warnings are errors: a link or an anchor that leads nowhere, a
# page that no other one lists, a docstring that cannot be rendered. Then Chromium, if there is one,
# shows the pages on a desktop and on a phone: width, contrast, descriptions, headings.
docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
	SITE=build/docs $(BIN)/python -m pytest -rs tests/docs/test_site.py
	@echo "make: the site is build/docs/index.html"

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

# Every configuration of every kernel; no GPU needed. Commit results/compile after device code or
# configurations changed.
compile-all: $(STAMP)
	$(BIN)/python -m tools.compile_all

# On a machine with a GPU, for a release: every proof. A change between plan() and the launch needs the
# GPU tests of its parts alone: `python -m tools.verify`. Commit results/<gpu> after either.
verify: $(STAMP)
	$(BIN)/python -m tools.prove

# On a machine with a GPU: breaks kernels one token at a time; the GPU tests must notice each.
mutate: $(STAMP)
	$(BIN)/python -m tools.mutate

clean:
	rm -rf $(VENV) build/docs .pytest_cache .ruff_cache .mypy_cache .hypothesis
