# `make help` lists the targets. Everything happens in .venv and build/ of this checkout. PYTHON chooses the interpreter
# (3.10 to 3.13), CXX the compiler, VENV a virtual environment elsewhere. tools/setup.sh installs, and only what has changed since the last call.
.DEFAULT_GOAL := help
.PHONY: help train test test-all test-clients test-fake-gpu test-cost test-nvidia lint format bench dev cpp-test clean

VENV ?= .venv
VENV_PYTHON := $(abspath $(VENV))/bin/python
SETUP := PYTHON="$(PYTHON)" VENV="$(VENV)" tools/setup.sh
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
SANITIZE ?=
comma := ,
CPP_BUILD := build/cpp$(if $(SANITIZE),-$(firstword $(subst $(comma), ,$(SANITIZE))))

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

train:  ## train a byte-level GPT on 2 CPU ranks and compare with stock DDP (2-4 minutes)
	@$(SETUP) package
	@$(VENV_PYTHON) -m gpucomm.examples.train_lm --preset small --compare $(ARGS)

test:  ## the core test suite (8 to 11 minutes on 2 cores); ARGS go to pytest
	@$(SETUP) package test
	@$(VENV_PYTHON) -m pytest -m "not slow and not clients" $(ARGS)

test-all:  ## the slow tests and the C++ ones too (needs GoogleTest)
	@$(SETUP) package test
	@$(MAKE) --no-print-directory cpp-test
	@$(VENV_PYTHON) -m pytest -m "not clients" $(ARGS)

test-clients:  ## Accelerate, transformers and Lightning over ours (installs them; Python 3.11 or newer)
	@$(SETUP) package test clients
	@$(VENV_PYTHON) -m pytest -m clients $(ARGS)

# What parameters on a GPU go through, with stand-ins for the CUDA driver and NCCL (tests/fake_cuda).
OVER_FAKE_GPU := ddp ddp_backward ddp_parameters unused nonfinite means wire_dtype program_grads buffers second_order comm_hooks \
  clip transport communicator failures pipeline surface torch_optimizers

test-fake-gpu:  ## the suites of transports and DistributedDataParallel on a GPU that is a stand-in (5 minutes)
	@$(SETUP) package test
	@GPUCOMM_TEST_DEVICE=fake_cuda $(VENV_PYTHON) -m pytest $(OVER_FAKE_GPU:%=tests/test_%.py) $(ARGS)

test-cost:  ## instructions of the engine per gradient and bucket on a GPU, counted (needs valgrind and GoogleTest; 2 minutes)
	@$(SETUP) package test
	@GPUCOMM_TEST_COST=required $(VENV_PYTHON) -m pytest tests/test_engine_cost.py $(ARGS)
	@PYTHONPATH=tests $(VENV_PYTHON) -m cost.counts

test-nvidia:  ## ours against headers, compilers and libraries of NVIDIA (fetches them, 1.3 GB; needs no GPU)
	@$(SETUP) package test nvidia
	@GPUCOMM_TEST_NVIDIA=required $(VENV_PYTHON) -m pytest -m nvidia $(ARGS)

lint:  ## ruff, clang-format, mypy
	@$(SETUP) run lint
	@PATH="$(abspath $(VENV))/bin:$$PATH" tools/lint.sh

format:  ## rewrite the sources as ruff and clang-format want them
	@$(SETUP) lint
	@PATH="$(abspath $(VENV))/bin:$$PATH" tools/lint.sh --fix

bench:  ## the microbenchmarks, one after the other
	@$(SETUP) package bench
	@for file in bench/bench_*.py; do echo "== $$file"; $(VENV_PYTHON) $$file $(ARGS) || exit 1; done

dev:  ## build the extension into gpucomm/ of this checkout, for use with PYTHONPATH=.
	@$(SETUP) run build
	@$(VENV_PYTHON) -m cmake -S . -B build/dev -G Ninja -DGPUCOMM_IN_SOURCE=ON \
	  -DPython_EXECUTABLE="$(VENV_PYTHON)" --log-level=WARNING
	@$(VENV_PYTHON) -m cmake --build build/dev -j $(JOBS)

cpp-test:  ## the C++ tests; SANITIZE=address,undefined or SANITIZE=thread (needs GoogleTest)
	@$(SETUP) build
	@$(VENV_PYTHON) -m cmake -S . -B $(CPP_BUILD) -G Ninja -DGPUCOMM_BUILD_BINDINGS=OFF -DGPUCOMM_BUILD_TESTS=ON \
	  -DGPUCOMM_SANITIZE="$(SANITIZE)" -DGPUCOMM_WERROR=ON --log-level=WARNING
	@$(VENV_PYTHON) -m cmake --build $(CPP_BUILD) -j $(JOBS)
	@CTEST_OUTPUT_ON_FAILURE=1 CTEST_NO_TESTS_ACTION=error $(VENV_PYTHON) -m cmake --build $(CPP_BUILD) --target test

clean:  ## remove .venv, build products and caches
	rm -rf .venv build dist gpucomm/_core*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
