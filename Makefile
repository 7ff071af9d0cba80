# Needs Python 3.11+, pip and make; everything else goes into .venv (and .venv-vllm, .venv-trl).

PYTHON ?= python3
SEEDS ?= 1000
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_RUN := $(VENV)/.installed-to-run
VENV_VLLM := .venv-vllm
STAMP_VLLM := $(VENV_VLLM)/.installed
VENV_TRL := .venv-trl
STAMP_TRL := $(VENV_TRL)/.installed
# Two processes, each with a stretch of the suite: what the tests of a file share is made once.
TWO := -n 2 --dist worksteal
# Modules are compiled when they are first imported: most never are, and it takes a minute. So that
# must not be switched off, as in many containers: every process would compile torch anew, for seconds.
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# Handed out one at a time, and three at once: those that take long wait for much of it.
LONG := -n 3 --dist load --maxschedchunk 1
# What has a fast path, or runs with one.
PORTABLE := $(addprefix tests/,engines machine quickstart sandbox tasks) \
	$(patsubst %,tests/models/test_%.py,cpu linear stacking) \
	$(patsubst %,tests/trainer/test_%.py,trainer with_engine) \
	$(patsubst %,tests/runtime/test_%.py,evaluation hostile inline local local_starts machine \
	memory reward_log rollout trainer_starts zombie)

# Python before 3.13 reads the path of an editable install in the encoding of the locale, and does
# not start at all if ASCII is all that it has and a directory is called größe.
ifneq (,$(filter C POSIX,$(LC_ALL)))
export LC_ALL := C.UTF-8
endif

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm venv-trl quickstart test test-slow test-portable test-docs test-smollm2 \
	test-vllm test-ray test-faults test-gpu lint format bench soak clean

help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

# The stamp is renewed only by a complete install, so an interrupted one is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: dora-rl needs Python 3.11 or newer. Use make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt -e '.[dev]'
	@touch $@

# To run needs neither the development tools nor a C compiler, as one task library does.
$(STAMP_RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: dora-rl needs Python 3.11 or newer. Use make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt -e '.[engine,train]'
	@touch $@

venv: $(STAMP) ## create .venv and install the project with its development tools

# --no-deps: the file names every package, and leaves out what has no CPU build.
$(STAMP_VLLM): requirements-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: vLLM needs Python 3.11 or newer. Use make PYTHON=python3.11")'
	@test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install $(PIP_OPTIONS) --no-deps -r requirements-vllm.txt
	@touch $@

venv-vllm: $(STAMP_VLLM) ## create .venv-vllm, the environment of the vLLM engine (3.7 GB)

$(STAMP_TRL): requirements-trl.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: TRL needs Python 3.11 or newer. Use make PYTHON=python3.11")'
	@test -x $(VENV_TRL)/bin/python || $(PYTHON) -m venv $(VENV_TRL)
	$(VENV_TRL)/bin/python -m pip install $(PIP_OPTIONS) --no-deps -r requirements-trl.txt
	@touch $@

venv-trl: $(STAMP_TRL) ## create .venv-trl, the environment of dora-rl bench trl (1.5 GB)

quickstart: $(if $(wildcard $(STAMP)),$(STAMP),$(STAMP_RUN)) ## train a tiny language model with several live versions
	$(BIN)/dora-rl train

# Core by itself, for its coverage: with all of it traced, the rest takes twice as long.
test: $(STAMP) ## run the tests; the branch coverage of core must reach 95 %
	$(BIN)/python -m pytest $(TWO) tests/core --cov --cov-report=term --cov-fail-under=95
	$(BIN)/python -m pytest $(TWO) --ignore tests/core

test-slow: $(STAMP) ## run the tests that take long and rarely break, those of test-faults too
	$(BIN)/python -m pytest $(LONG) -m "(slow or faults) and not smollm2 and not gpu and not ray"

# As on a machine that has no fast path and is not Linux.
test-portable: $(STAMP) ## run engine, trainer, rewards and runs with every fast path switched off
	DORA_RL_PORTABLE=1 $(BIN)/python -m pytest $(TWO) $(PORTABLE)

test-smollm2: $(STAMP) ## run the tests that need SmolLM2-135M, which is fetched first
	$(BIN)/dora-rl fetch-model smollm2
	$(BIN)/python -m pytest $(TWO) -m smollm2

# The engine in its own environment, then runs whose workers are started there. What its libraries
# warn of is not ours to mend.
test-vllm: $(STAMP) $(STAMP_VLLM) ## run the tests that need vLLM, in an environment of its own
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest $(TWO) -o filterwarnings=default -m vllm tests/engines/vllm
	$(BIN)/python -m pytest $(TWO) -m vllm tests/runtime/test_vllm.py tests/runtime/test_vllm_faults.py tests/runtime/ray/test_vllm.py tests/benchmarks/test_migration.py

# One process: clusters of several nodes share the machine with the runs on them.
test-ray: $(STAMP) ## run the tests of runs on Ray, with clusters of several nodes on this machine
	$(BIN)/python -m pytest -m "ray and not vllm" tests/runtime tests/cli/test_chaos.py

# A machine without a GPU tests nothing here, which must not look like success.
test-gpu: $(STAMP) ## run the tests that need a GPU; without one, say so and fail
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "error: torch " + torch.__version__ + " finds no GPU: the tests that need one were not run. Run make test-gpu on a machine with one, with a build of torch for CUDA.")'
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP) ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure the orchestrator, the embedded engine and the paradigms
	$(BIN)/dora-rl bench orchestrator
	$(BIN)/dora-rl bench modes
	$(BIN)/dora-rl bench engine --model tiny
	$(BIN)/dora-rl bench versions --model tiny

test-faults: $(STAMP) ## kill runs at every point where a file changes, fail every write, and more
	$(BIN)/python -m pytest $(LONG) -m "faults and not ray"

test-docs: $(STAMP) ## run every command and every Python block of the documentation
	$(BIN)/python -m tests.docs.run --jobs 2

soak: $(STAMP) ## run the fault storm: make soak SEEDS=10000
	$(BIN)/python -m tests.soak --seeds $(SEEDS)

clean: ## remove the environments and every cache
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_TRL) build dist htmlcov .coverage .coverage.* .hypothesis \
		.mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
