# Three commands, each complete by itself: `make demo`, `make test` and `make matrix`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test matrix lint install clean

demo: $(STAMP)
	$(BIN)/holdfast demo --output_dir out/demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Every sharding into every other, with each optimizer: the table. The tests run some of its pairs.
matrix: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/matrix.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(STAMP)

# Pinned versions first, then the project without its (open) ranges: nothing is resolved twice.
$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf $(VENV) out
