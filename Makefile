# Two commands: `make train` trains llama3-debug on this machine, `make test` runs lint and the tests.
# Each makes .venv by itself. ARGS goes to the command: make train ARGS="--steps 50".
PYTHON ?= python3
BIN := .venv/bin
# Without an NVIDIA driver, torch as CI has it, in a CPU build where pip finds one; with a driver, the newest torch.
# To choose: make train PINS='torch==2.15.0'.
PINS ?= $(if $(shell which nvidia-smi 2>/dev/null),,-c constraints.txt)
# Python compiles the modules that it imports, a fifth of the 16,000 that pip would compile here for a minute. It must
# keep them: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PINS)

.PHONY: train test test-long test-torch lint docs clean

train: .venv/.train
	$(BIN)/python -m stepgraph train llama3-debug $(ARGS)

# One thread per test process: the processes share the cores.
test: .venv/.test
	$(MAKE) --no-print-directory -j2 lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal -m "not long" $(ARGS)

# Larger cases of what `test` covers: more ranks, more models, more of Inductor, all combinations of parameters.
test-long: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $$(nproc) --dist worksteal -m long $(ARGS)

# The tests of `test` on another torch, in an environment of its own outside the checkout; the outcome goes to
# benchmarks/versions.json: make test-torch VERSION=2.15.0
test-torch:
	$(PYTHON) tests/versions.py --torch "$(VERSION)" $(ARGS)

lint: .venv/.test
	$(BIN)/ruff check stepgraph tests examples docs/api.py
	$(BIN)/ruff format --check stepgraph tests examples docs/api.py
	$(BIN)/pyrefly check

# The API reference from docstrings, in build/api; a warning is an error.
docs: .venv/.test
	$(BIN)/python docs/api.py build/api

clean:
	rm -rf .venv

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "stepgraph needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 train"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.train: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e .
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -e '.[test]'
	@touch $@ .venv/.train
