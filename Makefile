# `make demo` and `make test` do all the set-up themselves; both can be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo test lint types tests clean

demo: .venv/.installed
	$(BIN)/python recipes/compare.py

test: lint types tests

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.installed
	$(BIN)/mypy

# One thread a process: two processes that both want all cores spend their time waiting for each other.
tests: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# torch comes first and pinned, so that no other package pulls a build of its own. timm and curvlinops' backpack ask for
# torchvision, which they only need for images, so they and what else curvlinops imports come without what they ask for.
.venv/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps timm \
		curvlinops-for-pytorch backpack-for-pytorch linear_operator einconv einops unfoldNd
	touch $@

clean:
	rm -rf .venv results
