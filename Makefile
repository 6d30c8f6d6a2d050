# `make demo` and `make test` do all the set-up themselves; both can be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2

.PHONY: demo test lint types tests test-distributed wheel clean

demo: .venv/.installed
	$(BIN)/python recipes/compare.py

test: lint types tests

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.installed
	$(BIN)/mypy

# One thread per process: two processes that both want all cores spend their time waiting.
tests: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

# Many processes, kills and resumes: these start two or four processes each, so they run one by one.
test-distributed: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m distributed tests

wheel: .venv/.installed
	$(PIP) build
	$(BIN)/python -m build

# torch comes first and pinned, so that no other package pulls a build of its own. timm and
# curvlinops' backpack ask for torchvision, which they only need for images, so they and what else
# curvlinops imports come without what they ask for; so do Lightning and TRL, of which the tests
# need little. DeepSpeed lies apart, where only its own tests look: accelerate, transformers and
# Lightning import it wherever they find it.
.venv/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps timm curvlinops-for-pytorch backpack-for-pytorch linear_operator einconv \
		einops unfoldNd lightning lightning-utilities torchmetrics trl
	$(PIP) --no-deps --upgrade --target .venv/deepspeed deepspeed hjson msgpack
	touch $@

# Results of runs that took hours stay: delete results/ by hand.
clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
