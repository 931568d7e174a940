# Every target does its own set-up: the first one makes .venv, later ones use it again. `make` alone lists them.
#
#   PYTHON=python3.12 make test      the interpreter that .venv is made from
#   make gpu-check PYTHON=/path OUT=results
#                                    with that interpreter and what it has: no .venv, nothing is downloaded

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= runs

# The oldest torch that is supported, with the torchvision that belongs to it.
OLDEST = torch==2.11.0 torchvision==0.26.0

RUN      = $(VENV)/bin/python
KERNELS  = $(wildcard lightning_sparse/kernels/csrc/*)
DEPENDS  = pyproject.toml constraints.txt $(wildcard setup.py)
ARGS     =

# ninja, which compiles the kernels, is a program in the environment
export PATH := $(abspath $(VENV))/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest lint format bench docs docs-serve gpu-check gpu-check-data conformance clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.built ## train on a small cluster inside this machine, dense and sparse, and compare
	$(RUN) examples/demo.py --out $(OUT)/demo $(ARGS)

test: $(VENV)/.built ## run the tests; what needs root or a GPU is skipped without
	$(RUN) -m pytest $(ARGS)

test-oldest: ## run the tests with the oldest supported torch, in an environment of its own
	$(MAKE) --no-print-directory test VENV=.venv-oldest TORCH="$(OLDEST)"

lint: $(VENV)/.installed ## check style, types, spelling and the format of native code
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/codespell $$(git ls-files)
	@if ! command -v clang-format > /dev/null; then echo "clang-format not found: native code is not checked"; \
	elif [ -n "$(filter %.cpp %.cu %.h %.cuh,$(KERNELS))" ]; then \
		clang-format --dry-run --Werror $(filter %.cpp %.cu %.h %.cuh,$(KERNELS)); fi

format: $(VENV)/.installed ## put code into shape
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	@if command -v clang-format > /dev/null && [ -n "$(filter %.cpp %.cu %.h %.cuh,$(KERNELS))" ]; then \
		clang-format -i $(filter %.cpp %.cu %.h %.cuh,$(KERNELS)); fi

bench: $(VENV)/.built ## run the quick benchmarks
	$(RUN) benchmarks/kernels.py $(OUT)/bench --quick $(ARGS)

docs: $(VENV)/.installed ## build the documentation into runs/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --site-dir $(OUT)/docs
	@echo "open $(OUT)/docs/index.html"

docs-serve: $(VENV)/.installed ## show the documentation at http://127.0.0.1:8000 while it is written
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

# No environment is made: machines with a GPU are often cut off from package indexes.
gpu-check: ## with PYTHON as it is: build the kernels, run the GPU tests, time the kernels
	LIGHTNING_SPARSE_BUILD=cuda $(PYTHON) setup.py build_ext --inplace
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p tests.helpers.timeout_optional -m gpu $(ARGS)
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/kernels.py $(OUT) --device cuda

conformance: $(VENV)/.built ## run Lightning's own tests of DDP against the strategy; LIGHTNING=path of a checkout
	$(RUN) -m pip install --quiet cloudpickle
	$(RUN) tests/conformance/run.py $(LIGHTNING) --out $(OUT)/conformance.json $(ARGS)

gpu-check-data: ## with PYTHON as it is: DALI on the GPU against the CPU: samples, pixels, images per second
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p tests.helpers.timeout_optional -m gpu tests/data $(ARGS)
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/data.py $(OUT) --device cuda

clean: ## remove environments and what was built
	rm -rf .venv .venv-oldest build *.egg-info lightning_sparse/kernels/*.so lightning_sparse/kernels/build_report.txt

# torch comes first: the kernels are built against the torch they will run with, so without build isolation.
# editable_mode=compat: else a program in the folder above the checkout finds that, of the package's name, before the package.
$(VENV)/.installed: $(DEPENDS)
	@echo "making $(VENV): 6 GB of packages, torch and DALI among them. Some minutes, in silence, once."
	$(PYTHON) -m venv $(VENV)
	grep -v -E '$(if $(TORCH),^(torch|torchvision|setuptools)==,^$$)' constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install --quiet -c $(VENV)/constraints.txt 'setuptools>=77' wheel ninja numpy $(or $(TORCH),torch torchvision)
	LIGHTNING_SPARSE_BUILD=none $(RUN) -m pip install --quiet --no-build-isolation -c $(VENV)/constraints.txt \
		--config-settings editable_mode=compat -e '.[dev]'
	touch $@

$(VENV)/.built: $(VENV)/.installed $(KERNELS)
	if [ -f setup.py ]; then $(RUN) setup.py --quiet build_ext --inplace; fi
	touch $@
