# Each complete by itself: `make demo`, `make test`, `make matrix`, `make faults` and `make bench`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test matrix faults bench lint install clean

demo: $(STAMP)
	$(BIN)/holdfast demo --output_dir out/demo

# Three processes for two cores: a test of ranks often waits.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

# Every sharding into every other, with each optimizer: the table. The tests run some of its pairs.
matrix: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/matrix.py

# Every operation of a save, interrupted in every way: the table. The tests run some of its cases; EVERY=5 a fifth.
faults: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/faults/table.py

# Beside the peers, in an environment that has them, too.
bench: .venv-bench/.installed
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/bench.py --out out/bench

.venv-bench/.installed: requirements.txt pyproject.toml benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --requirement requirements.txt --requirement benchmarks/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

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
	rm -rf $(VENV) .venv-bench out
