# `make help` lists the targets. Everything happens in .venv and build/ of this checkout; PYTHON selects the interpreter.
.DEFAULT_GOAL := help
.PHONY: help dev cpp-test

PYTHON ?= python3
SANITIZE ?=
comma := ,
CPP_BUILD := build/cpp$(if $(SANITIZE),-$(firstword $(subst $(comma), ,$(SANITIZE))))
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

dev:  ## build the extension into gpucomm/ of this checkout, for use with PYTHONPATH=. (PYTHON needs cmake, ninja, pybind11)
	@$(PYTHON) -m cmake -S . -B build/dev -G Ninja -DGPUCOMM_IN_SOURCE=ON -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" --log-level=WARNING
	@$(PYTHON) -m cmake --build build/dev -j $(JOBS)

cpp-test:  ## build and run the C++ tests; SANITIZE=address,undefined or SANITIZE=thread (PYTHON needs cmake, ninja)
	@$(PYTHON) -m cmake -S . -B $(CPP_BUILD) -G Ninja -DGPUCOMM_BUILD_BINDINGS=OFF -DGPUCOMM_BUILD_TESTS=ON \
	  -DGPUCOMM_SANITIZE="$(SANITIZE)" --log-level=WARNING
	@$(PYTHON) -m cmake --build $(CPP_BUILD) -j $(JOBS)
	@cd $(CPP_BUILD) && ctest --output-on-failure --no-tests=error
