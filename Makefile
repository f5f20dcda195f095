# Every target sets up what it needs in .venv: Python >= 3.11, a C++ compiler and make are enough; on Debian and Ubuntu
# python3-dev and python3-venv too. Where python3 is older: PYTHON=python3.12 make ...
#   make throughput      the main job on the bundled model: speed with and without drafts
#   make throughput MODEL=smollm2      the same on a real small model, fetched on first use
#   make test            the test suite; EVERY=3 takes a third of the cases of each test, and of the files with long tests
#                        a third, another one after every commit
#   make lint            ruff
#   make test-debug      the compiled core with bounds checks, its own tests
#   make test-ptx        the GPU kernels as they are compiled for sm_90, run without a GPU; CAPABILITY=80 for sm_80,
#                        PTX_EVERY=1 for all cases of each test, where it takes a third of them
#   make test-mlx        the engine around models of MLX, which this installs
#   make test-wheel      the wheel beside the oldest torch, transformers, numpy and msgpack that it takes
#   make torch-builds    torch, for the suite and for the wheel
#   make environments    what test-debug and test-wheel run in
#   make wheel           the wheel to hand out: its ABI, its size, the drafter's tests on the oldest and newest Python here
# On a machine with a GPU: make CONSTRAINTS=constraints-gpu.txt ...
# Without one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ..., else pip may bring 2.7 GB of CUDA

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
# Options for scripts/throughput.py, e.g. make throughput ARGS="--trajectories 1,4"
ARGS ?=
# A real model for make throughput: smollm2, gemma3-270m, a folder or a hub id. Its run is sized for two cores.
MODEL ?=
MODEL_ARGS ?= --trajectories 1,4,16 --problem-counts 6,6,3 --max-new-tokens 160 --temperature 0.8 --top-p 0.95

BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(CONSTRAINTS) $(shell find stand trees verifiers -name '*.pyx' -o -name '*.pxi' -o -name '*.h')
MODULES := $(shell find stand trees verifiers -name '*.py')
CORE_TESTS := tests/trees tests/gpu/test_gpu_packing.py tests/gpu/test_gpu_work_list.py tests/engine/test_filters.py

# A wheel holds the files of the source and modules compiled with the same options: what can go wrong is that one is
# missing, or found in the source folder only. So every module is imported, and tests of each part are run. What
# goes wrong with old versions is what models, `generate` and Triton do: every family, custom_generate, fused kernels,
# and fences in the attention as it is compiled.
WHEEL_TESTS := tests/test_installed.py tests/engine/test_stream.py tests/trees/test_lookup_file.py \
  tests/verifiers/test_compiled.py tests/gpu/test_gpu_packing.py \
  tests/scripts/test_throughput.py::test_document_has_every_problem_and_arm \
  tests/engine/test_refused_models.py tests/engine/test_forward.py::test_tree_logits_equal_plain_forwards \
  tests/engine/test_engine.py::test_greedy_equals_transformers_token_for_token tests/engine/test_hub.py \
  tests/engine/test_tensor_parallel.py \
  tests/engine/test_recurrent_layers.py::test_greedy_tokens_are_those_of_generate \
  tests/gpu/test_gpu_fusion.py::test_fused_logits_and_cache_equal_the_models_own tests/gpu/test_gpu_proxy_fence.py
# Of the documentation, and among the longest.
NOT_OF_VERSIONS := --deselect tests/engine/test_hub.py::test_the_page_runs_as_printed
# Kernels as Triton compiles them, each instruction run on the CPU (tests/oracles/ptx). All of tests/gpu can run so; these
# take the shortest time.
CAPABILITY ?= 90
PTX_EVERY ?= 3
PTX_PARTS := ptx ptx_models fused_kernels recurrent_kernels traverse draw race softmax top_tokens compact filter
PTX_TESTS := $(PTX_PARTS:%=tests/gpu/test_gpu_%.py)
# Test processes at a time. Each has neighbours, which share what took long to make, and takes over what is left.
WORKERS ?= 2
# Of the cases of each test one in so many (tests/oracles/thinned.py); which ones changes with every commit. Its time, and
# not how many there are: a clone without history always has one.
EVERY ?= 1
TURN ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal --turn $(TURN)

# Python compiles what it imports; to compile every file of every package takes pip as long as all else.
export PIP_COMPILE := 0
# What it compiles it must keep: where it may not, each process that imports torch and transformers takes three times as
# long to start (17.5 s for 5.4 s).
unexport PYTHONDONTWRITEBYTECODE

# One thread: the matrices of the suite are too small for more, and as many processes run as there are cores.
test test-debug test-ptx test-mlx test-wheel: export OMP_NUM_THREADS ?= 1

.PHONY: throughput test lint torch-builds environments test-debug test-ptx test-mlx test-wheel wheel away clean

throughput: $(VENV)/.ready
	$(BIN)/python scripts/throughput.py $(if $(MODEL),--model $(MODEL) $(MODEL_ARGS)) $(ARGS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --every $(EVERY)

test-ptx: $(VENV)/.ready
	STAND_PTX=$(CAPABILITY) $(BIN)/python -m pytest $(SIDE_BY_SIDE) --every $(PTX_EVERY) $(PTX_TESTS) $(ARGS)

# MLX has no builds for older Linux (glibc below 2.35), so the suite does without.
test-mlx: $(VENV)/.mlx
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --every $(EVERY) tests/plugins/test_mlx.py tests/scripts/test_mlx_check.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .

# Side by side where make is given --jobs: while one of them downloads or unpacks, the other one compiles.
torch-builds: $(VENV)/.ready .venv-wheel/.torch
environments: .venv-debug/.ready .venv-wheel/.ready

# Both run away from the source tree, so that only what was installed can be imported.
test-debug: .venv-debug/.ready away
	cd build/away && $(CURDIR)/.venv-debug/bin/python -m pytest $(SIDE_BY_SIDE) --every $(EVERY) $(CORE_TESTS)

test-wheel: .venv-wheel/.ready away
	cd build/away && $(CURDIR)/.venv-wheel/bin/python -m pytest $(SIDE_BY_SIDE) --every $(EVERY) $(WHEEL_TESTS) $(NOT_OF_VERSIONS)
	cd build/away && STAND_PTX=90 $(CURDIR)/.venv-wheel/bin/python -m pytest tests/gpu/test_gpu_ptx_models.py -k "fence or small"

# The wheel holds the stable ABI of Python 3.11. Without torch: that is what serving engines install.
wheel: $(VENV)/.ready away
	@rm -rf build/wheel build/lib* build/bdist*
	@$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	@$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt "stand-decoding[wheel]"
	@$(BIN)/python scripts/pack_wheel.py build/wheel/*.whl
	cd build/away && $(CURDIR)/$(BIN)/python scripts/check_wheel.py $(CURDIR)/build/wheel/*.whl

away:
	rm -rf build/away && mkdir -p build/away
	cp -r tests scripts docs pyproject.toml README.md build/away/
	find stand trees verifiers \( -name '*.py' -o -name '*.pyx' \) > build/away/modules.txt

# Said before anything is downloaded.
CHECK_PYTHON := import os, sys, sysconfig; \
  has_headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")); \
  sys.exit("Python must be 3.11 or newer, got %d.%d; name one: PYTHON=python3.12 make ..." % sys.version_info[:2] \
    if sys.version_info[:2] < (3, 11) else None if has_headers else \
    "Python.h must be there to compile modules, got none; on Debian and Ubuntu: apt install python3-dev python3-venv")

# torch goes first and alone: another package's looser range must not choose the build. Where pip finds no build without
# CUDA, the one that it finds is taken. $(2): what is asked for; $(1)/constraints.txt: what was settled, for all that follows.
define install_torch
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@echo "== $(1): installing torch (a download of 0.2 GB, with CUDA 2.7 GB); this takes minutes"
	@$(PYTHON) -m venv $(1)
	@cp $(2) $(1)/constraints.txt
	@$(1)/bin/pip install --quiet --constraint $(1)/constraints.txt torch 2> $(1)/pip.log || { \
	  if grep -q '+cpu' $(2) && grep -qE 'No matching distribution|ResolutionImpossible' $(1)/pip.log; then \
	    echo "== $(1): pip finds no build of torch without CUDA, so the one with CUDA comes: a download of 2.7 GB." \
	      "For the small one stop here and name an index that has it, in PIP_EXTRA_INDEX_URL"; \
	    sed 's/+cpu//' $(2) > $(1)/constraints.txt; \
	    $(1)/bin/pip install --quiet --constraint $(1)/constraints.txt torch; \
	  else cat $(1)/pip.log >&2; exit 1; fi; }
endef

$(VENV)/.ready: $(SOURCES)
	$(call install_torch,$(VENV),$(CONSTRAINTS))
	@$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt "setuptools>=77" "Cython>=3.3" "numpy>=2" wheel
	@echo "== $(VENV): compiling the modules in C++ (one or two minutes) and installing the rest"
	@# Of two builds of one module Python takes the one that names its own version, however old it is.
	@find stand trees verifiers -name '*.cpython-*.so' -delete
	@$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --no-build-isolation --editable ".[test]"
	@touch $@

$(VENV)/.mlx: $(VENV)/.ready
	@$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt "stand-decoding[mlx]" "mlx-lm[cpu]"
	@touch $@

# The debug build is an ordinary, non-editable install of a copy, so that it never replaces the fast core. Everything else
# it finds in $(VENV): a path file lends its packages, but not the editable install among them.
.venv-debug/.ready: $(SOURCES) $(VENV)/.ready $(MODULES)
	@echo "== .venv-debug: compiling the modules with bounds checks (one or two minutes)"
	@$(PYTHON) -m venv --without-pip .venv-debug
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-debug/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lent.pth"
	@rm -rf build/debug && mkdir -p build/debug
	@cp -r setup.py pyproject.toml MANIFEST.in README.md LICENSE stand trees verifiers build/debug/
	@find build/debug \( -name '*.so' -o -name '*.cpp' -o -name _cyutility.c \) -delete
	@STAND_DEBUG=1 $(BIN)/pip --python .venv-debug/bin/python install --quiet --no-build-isolation --no-deps \
	  --ignore-installed ./build/debug
	@touch $@

.venv-wheel/.torch: constraints-oldest.txt
	$(call install_torch,.venv-wheel,constraints-oldest.txt)
	@touch $@

.venv-wheel/.ready: $(SOURCES) $(VENV)/.ready $(MODULES) .venv-wheel/.torch
	@echo "== .venv-wheel: building the wheel (one or two minutes)"
	@rm -rf build/wheel build/lib* build/bdist*
	@# The modules of $(VENV) were compiled by the same commands; setuptools compiles none that is newer than its source.
	@library=build/lib.$$($(BIN)/python -c 'import sys, sysconfig as s; print(s.get_platform(), sys.implementation.cache_tag, sep="-")'); \
	for source in $$(find stand trees verifiers -name '*.pyx') stand/_cyutility.c; do \
	  folder=$$library/$$(dirname $$source | sed -e 's,^trees,stand/&,' -e 's,^verifiers,stand/&,'); \
	  mkdir -p $$folder && cp $${source%.*}.*.so $$folder/ || exit 1; \
	done
	@$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	@wheel=$$(ls $(CURDIR)/build/wheel/*.whl) && \
	  .venv-wheel/bin/pip install --quiet --force-reinstall --no-deps "$$wheel" && \
	  .venv-wheel/bin/pip install --quiet --constraint .venv-wheel/constraints.txt "$$wheel[test]"
	@touch $@

clean:
	rm -rf .venv .venv-debug .venv-wheel build dist *.egg-info
	find stand trees verifiers \( -name '*.so' -o -name '*.cpp' -o -name _cyutility.c \) -delete
