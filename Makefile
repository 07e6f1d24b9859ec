# Two commands: `make train` trains llama3-debug on this machine, `make test` runs lint and the tests.
# Each makes .venv by itself. ARGS goes to the command: make train ARGS="--steps 50".
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-long lint clean

train: .venv/.train
	$(BIN)/python -m stepgraph train llama3-debug $(ARGS)

# One thread per test process: the processes share the cores.
test: .venv/.test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal -m "not long" $(ARGS)

# Larger cases of what `test` covers: more ranks, more models, more of Inductor.
test-long: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal -m long $(ARGS)

lint: .venv/.test
	$(BIN)/ruff check stepgraph tests
	$(BIN)/ruff format --check stepgraph tests

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepgraph needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 train"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.train: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ .venv/.train
