# Everything runs in a virtual environment that is made on first use. A target's
# dependencies are installed once, and again when pyproject.toml changes.

PYTHON ?= python3
NEWEST ?= python3.13
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
ARGS ?=
BENCHMARKS ?= autocast head loss_scaling moments steps insight accuracy sweep code_bases

.PHONY: help demo test test-benchmarks slow targets mutants docs benchmarks
.PHONY: notebooks notebooks-newest gpu-tests search
.PHONY: lint format types clean thirdparty jax-tests findings

help:
	@echo "make demo     train on real digits in three precisions (about a minute)"
	@echo "make test     the tests and doctests, in twelve minutes"
	@echo "make test-benchmarks  the tests of the benchmarks"
	@echo "make slow     the tests that take longer, notebooks among them"
	@echo "make targets  the tests that compile for an H100 and a TPU v5e"
	@echo "make gpu-tests  the laws on an NVIDIA GPU, where there is one (two minutes)"
	@echo "make mutants  plant faults in the package, and count those that tests catch"
	@echo "make search N=10000  look for a program in which mixed loses what O1 keeps"
	@echo "make notebooks  run the notebooks from their text halves"
	@echo "make notebooks-newest  run them with the newest JAX, and write nothing"
	@echo "make jax-tests JAX=...  JAX's own tests with autocast around their transforms"
	@echo "make docs     the documentation as a site, in docs/_build"
	@echo "make benchmarks  what it costs, beside its peers, and the tables of it"
	@echo "make findings  what surprises outside of this library, one script each (minutes)"
	@echo "make thirdparty  programs of other packages under autocast (an hour)"
	@echo "make lint     ruff; make format mends what it can"
	@echo "make types    pyright"
	@echo "make clean    remove the virtual environment and caches"
	@echo "Another interpreter: make PYTHON=python3.12 VENV=.venv-3.12 test"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.test
	@echo "All tests but the slow ones: about twelve minutes on two cores."
	$(BIN)/python -m pytest -m "not (slow or targets or benchmarks)" -q \
	  --numprocesses auto --dist loadscope $(ARGS)

test-benchmarks: $(VENV)/.test
	$(BIN)/python -m pytest -m "benchmarks and not (slow or targets)" -q \
	  --numprocesses auto --dist loadscope $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -m "slow and not targets" -q \
	  --numprocesses auto --dist worksteal $(ARGS)

mutants:
	$(MAKE) PYTHON=$(NEWEST) VENV=.venv-newest .venv-newest/.test
	.venv-newest/bin/python tests/mutations/run.py $(ARGS)

N ?= 1000
search: $(VENV)/.test
	PYTHONPATH=tests:. JAX_PLATFORMS=cpu $(BIN)/python -m search $(N) $(ARGS)

# JAX is a checkout of JAX's repository at the installed version.
jax-tests: $(VENV)/.test
	$(BIN)/python tests/jax_tests/driver.py $(JAX) $(ARGS)

targets: $(VENV)/.targets
	$(BIN)/python -m pytest -m targets --numprocesses auto --dist loadscope $(ARGS)

# For a machine with a GPU and a JAX that knows it; elsewhere the tests are skipped.
gpu-tests: $(VENV)/.test
	JAX_PLATFORMS= $(BIN)/python -m pytest -q -m slow tests/gpu $(ARGS)

notebooks: $(VENV)/.test
	JAX_PLATFORMS=cpu $(BIN)/python -m notebooks.run $(ARGS)

# CI runs the shorter notebooks, with the oldest JAX: run this once for a day's work.
notebooks-newest:
	$(MAKE) PYTHON=$(NEWEST) VENV=.venv-newest .venv-newest/.test
	.venv-newest/bin/python -m pytest -m slow -q --numprocesses auto tests/test_notebooks.py

docs: $(VENV)/.docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --builder html --fail-on-warning \
	  --keep-going --quiet docs docs/_build

benchmarks: $(VENV)/.peers
	for each in $(BENCHMARKS); do \
	  JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.$$each --json benchmarks/results $(ARGS) \
	  || exit 1; done
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.growth --json benchmarks/results \
	  --picture benchmarks/results
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.formats --json benchmarks/results \
	  --picture benchmarks/results
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.tables
	JAX_PLATFORMS=cpu $(BIN)/python docs/figures.py

# In an environment of its own: the versions of so many packages fit together once.
thirdparty: .venv-thirdparty/.thirdparty
	JAX_PLATFORMS=cpu .venv-thirdparty/bin/python -m benchmarks.thirdparty \
	  --json benchmarks/results $(ARGS)
	JAX_PLATFORMS=cpu .venv-thirdparty/bin/python -m benchmarks.tables

# Each installs what it needs in a temporary folder, and fails if it is no longer so.
findings:
	for each in findings/*.sh; do PYTHON=$(NEWEST) bash $$each || exit 1; done

.venv-thirdparty/.thirdparty: pyproject.toml
	@$(PYTHON) -m venv .venv-thirdparty
	@.venv-thirdparty/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@.venv-thirdparty/bin/python -m pip install --quiet --editable . --group thirdparty
	@touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist docs/_build docs/jupyter_execute docs/notebooks

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "jmp_lite needs Python >= 3.11 and finds no '$(PYTHON)'."; \
	  echo "Name one that is there: make PYTHON=/path/to/python3.12 demo"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "jmp_lite needs Python >= 3.11, but $(PYTHON) is %d.%d.\n" \
	  "Name a newer one: make PYTHON=/path/to/python3.12 demo" \
	  % sys.version_info[:2])'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu:"; \
	  echo "apt install python3-venv)."; exit 1; }
	@$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "Installing what the demo needs into $(VENV) ..."
	@$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) --editable ".[demo]" --group test
	@touch $@

$(VENV)/.targets: $(VENV)/.test
	@echo "Installing the compilers for the H100 and the TPU v5e into $(VENV) ..."
	@$(PIP) --editable ".[demo]" --group test --group targets
	@touch $@

$(VENV)/.peers: $(VENV)/.targets
	@echo "Installing what the benchmarks measure beside it into $(VENV) ..."
	@$(PIP) --editable ".[demo]" --group test --group targets --group peers
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	@echo "Installing what the documentation needs into $(VENV) ..."
	@$(PIP) --editable ".[demo]" --group test --group docs
	@touch $@

# All of these for CI, in one installation.
$(VENV)/.all: $(VENV)/.python pyproject.toml
	@$(PIP) --editable ".[demo]" $(addprefix --group ,test dev docs targets)
	@touch $(addprefix $(VENV)/.,demo test dev docs targets) $@

$(VENV)/.dev: $(VENV)/.test
	@echo "Installing ruff and pyright into $(VENV) ..."
	@$(PIP) --editable ".[demo]" --group test --group dev
	@touch $@
